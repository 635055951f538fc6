"""Invariants of the core's state, the resynchronization of a state that breaks one, and the replay of a journal, which checks both.

The simulator checks the invariants after each event. The live coordinator checks them once per turn, after the events of the turn and
before any command is sent, since only commands can do harm. A violation is a bug in the core, never a fault of the fleet; ``resync`` then
rebuilds the state from what the nodes report.

Cost, measured on one busy core with 8 workers a node: 0.63 ms for 1,000 nodes, 11.5 ms for 12,500. Of 216,000 heartbeats/s that the core
takes for 1,000 nodes, 1,580/s would be left with a check after each; once per turn, a turn of 1,000 heartbeats takes 2.6 ms instead of 2.0
ms, and a turn comes about once a second.

The live coordinator, the simulator and the tests all replay with ``replay``: what the property tests hold it to is what a restarted
coordinator does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from phalanx.fleet.core import decide
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.commands import (
    Shutdown,
    TellAll,
)
from phalanx.fleet.core.epochs.epoch_plan import LIVING, Order
from phalanx.fleet.core.epochs.life_cycle import IN_EPOCH, pause_s
from phalanx.fleet.core.epochs.progress import OVER, end
from phalanx.fleet.core.state import (
    NO_SEAT,
    FleetPhase,
    FleetState,
    RestorePoint,
    decode_state,
    encode_state,
    is_leaving,
    note,
    usable,
)


class BrokenInvariant(AssertionError):  # noqa: N818
    """The core has contradicted itself; the text says how, and how to reproduce it."""


class Mark(Struct, frozen=True):
    """The part of a state that later states are compared with: numbers that may only grow, and the phase."""

    epoch: int
    ended: int
    """Epochs that were ended."""
    phase: FleetPhase


def mark(state: FleetState) -> Mark:
    """The mark of a state, to be taken before an event."""
    return Mark(state.epoch, state.recoveries + state.regroups, state.phase)


def check(state: FleetState, before: Mark | None = None) -> None:
    """Raises BrokenInvariant naming everything that does not hold. Costs O(nodes)."""
    wrong = [*_seats(state), *_phases(state), *(_order(state, before) if before else ())]
    if wrong:
        raise BrokenInvariant("; ".join(wrong))


def _seats(state: FleetState) -> Iterator[str]:
    if len(set(state.seats)) != len(state.seats):
        yield f"a node has two seats: {state.seats}"
    for seat, name in enumerate(state.seats):
        node = state.nodes[name]
        if node.seat != seat:
            yield f"node {name} has seat {node.seat} by its own record, and holds seat {seat}"
    # One pass, which asks of each node once: it is most of what a turn of a large fleet costs.
    seats, vacant, spares, leaving = state.seats, state.vacant, state.spares, state.leaving
    for name, node in state.nodes.items():
        seat, fit = node.seat, usable(state, node)
        if seat == NO_SEAT:
            if fit != (name in spares):
                yield f"node {name} is wrongly {'not ' if fit else ''}called a spare"
        elif seat >= len(seats) or seats[seat] != name:
            yield f"node {name} has seat {seat} by its own record, which another node holds"
        elif fit == (seat in vacant):
            yield f"seat {seat} (node {name}) is wrongly called {'vacant' if fit else 'taken'}"
        elif name in spares:
            yield f"node {name} is wrongly called a spare"
        if is_leaving(node) != (name in leaving):
            yield f"node {name} is wrongly {'' if name in leaving else 'not '}called leaving"
    if state.seats and sorted(state.ring) != list(range(len(state.seats))):
        yield f"the ring of buddies {state.ring} is no permutation of the seats"


def _phases(state: FleetState) -> Iterator[str]:
    seated, formation = set(state.seats), state.settings.formation
    if not state.awaiting <= seated:
        yield f"waits for nodes without a seat: {sorted(state.awaiting - seated)}"
    if state.awaiting and state.phase not in (FleetPhase.PARKING, FleetPhase.BINDING):
        yield f"waits for {sorted(state.awaiting)} while {state.phase}"
    pausing = state.phase is FleetPhase.PARKING and state.now_s < state.since_s + pause_s(state.tries)
    if not state.awaiting and state.phase in (FleetPhase.PARKING, FleetPhase.BINDING) and not pausing:
        yield f"waits for nobody while {state.phase}"
    if any(not state.nodes[name].alive for name in state.awaiting):
        yield "waits for the dead"
    if (state.phase is FleetPhase.SAVING) != bool(state.writing):
        yield f"{state.writing} are to be saved while {state.phase}"
    if any(not state.nodes[name].alive for name in state.writing):
        yield "the dead are to save their memory"
    if isinstance(state.source, RestorePoint) and state.writing:
        states = sorted(key for share in state.writing.values() for _, key in share)
        if states != list(range(formation.keys(state.source.ranks))):
            yield f"the states {states} are to be saved, each once"
    if state.phase in (FleetPhase.BINDING, FleetPhase.RUNNING):
        if state.vacant:
            yield f"{state.phase} with vacant seats {sorted(state.vacant)}"
        if state.ranks not in formation.legal or formation.seats(state.ranks) != len(state.seats):
            yield f"{len(state.seats)} seats for {state.ranks} ranks"


def _order(state: FleetState, before: Mark) -> Iterator[str]:
    if state.epoch < before.epoch:
        yield f"epoch {before.epoch} was followed by {state.epoch}"
    ended = state.recoveries + state.regroups > before.ended
    if state.epoch > before.epoch and before.phase in (FleetPhase.RUNNING, FleetPhase.BINDING) and not ended:
        yield f"epoch {state.epoch} began while {before.epoch} was {before.phase}"
    if before.phase in (FleetPhase.FINISHED, FleetPhase.FAILED) and state.phase is not before.phase:
        yield f"{before.phase} was followed by {state.phase}"


# Resynchronization.
#
# A broken invariant is a bug in the core (or a bit that flipped in its memory), and decisions of such a state cannot be
# trusted: they might seat two nodes on one rank, or begin an epoch while an old one still trains. Four answers are possible.
#
# - To end the process is a crash loop: the next coordinator replays the same journal to the same state.
# - To log it and go on sends commands that nobody can vouch for, and only commands can do harm.
# - To say nothing any more is safe, since training goes on without a coordinator, but only until the next fault.
# - To drop what is derived, and ask every node, is what happens when a journal was lost; agents and core know that case.
#
# The last one is taken. The commands of the contradictory turn are never sent. What nodes cannot repeat is kept: who is
# fenced (so that no earlier incarnation is believed), who is quarantined or drained, the highest epoch (a number is never used twice), which
# steps are not to be trusted, what is on disk. Seats, the buddy ring, copies and everybody whom the core waits for are
# dropped. Each node counts as engaged until it has said that its workers are in no epoch, and the next epoch forms when no
# living node is engaged any more (or ``form_s`` has passed), so that every member has parked and its snapshot counts. Each
# resynchronization counts as a fault without progress, so a bug that strikes again at once ends the run after ``max_tries``,
# with its text as the reason. A coordinator that is killed before the rebuilt state is on disk is no exception: the replay of
# its journal resynchronizes likewise (``replay``). A journal with damaged lines leads to a state that is
# rebuilt in the same way: what the lost lines said, the nodes say again.

_REASON_MAX = 1000


def reason(error: Exception) -> str:
    """The text of a contradiction, for people, and not longer than an incident should be."""
    return f"{error or type(error).__name__}"[:_REASON_MAX]


def resync(
    state: FleetState, before: Mark, why: str, cause: str = "the coordinator's state contradicted itself"
) -> tuple[FleetState, list[Order]]:
    """A state that keeps its invariants in place of ``state``, and the orders that ask every node to describe itself.

    A run that was over, or that the contradictory turn ended, stays over.

    Args:
        state: The state that contradicts itself.
        before: The mark of the last state that did not.
        why: What was wrong, for people.
        cause: Why the state is not to be trusted, for people.
    """
    was_over = before.phase in OVER
    over = was_over or state.phase in OVER
    nodes = {
        node.name: replace(node, seat=NO_SEAT, meeting_points=(), held=(), engaged=node.alive)
        for node in state.nodes.values()
    }
    now_s, epoch = state.now_s, max(state.epoch, before.epoch)
    rebuilt = FleetState(
        settings=state.settings,
        fencing=state.fencing,
        phase=before.phase if was_over else state.phase if over else FleetPhase.FORMING,
        epoch=epoch,
        seen_epoch=max(state.seen_epoch, epoch),
        now_s=now_s,
        since_s=now_s,
        asked_s=now_s,
        reason=state.reason if over else why,
        left_s=now_s if state.left_s is None else state.left_s,
        stopping=state.stopping,
        step=state.step,
        step_s=now_s,
        pace_s=state.pace_s,
        best_step=state.best_step,
        tries=state.tries + 1,
        durable=state.durable,
        condemned=state.condemned,
        distrust=state.distrust,
        accusations=state.accusations,
        doubt=state.doubt,
        source=state.source,
        result_json=state.result_json,
        key=state.key,
        nodes=nodes,
        leaving={name for name, node in nodes.items() if is_leaving(node)},
        rolled_s=now_s,  # nobody's silence counts from before
        next_lease_s=now_s + state.settings.lease_s,
        incidents=state.incidents,
        stale=state.stale,
        recoveries=state.recoveries + 1,
        regroups=state.regroups,
    )
    text = f"{cause}, every node is asked anew: {why}"
    note(rebuilt, "", text, ended_epoch=before.phase in IN_EPOCH)
    orders: list[Order] = []
    if over and not was_over:  # the turn that told the nodes was dropped
        orders.append(Order(LIVING, Shutdown(rebuilt.reason)))
    elif not over and rebuilt.tries > rebuilt.settings.max_tries:
        end(
            rebuilt,
            orders,
            FleetPhase.FAILED,
            f"{rebuilt.tries} faults in a row without a step between them; the last one: {why}",
        )
    elif not over:
        orders.append(Order(LIVING, TellAll()))
    return rebuilt, orders


# Replay: the lines of the coordinator's journal, and the one function that replays them to a state.
#
# A journal begins with a state and goes on with batches of events, each with the time at which the core received it
# (``phalanx.fleet.control.succession.journal`` keeps the lines on disk).
#
# A journal can lead to a state that contradicts itself: the coordinator that found it was killed before it had written the
# new journal. The replay rebuilds the state as that coordinator would have. To refuse the
# journal would end at its second start the run that the resynchronization is there to save.


JOURNAL_VERSION = 9
"""Version of the journal's lines: raised whenever a state, an event or a rule of the core changes its meaning."""
RESTARTED = (m.Restarted(),)
"""A batch of this event alone is a coordinator's first: it began, and replayed the journal."""
UNTOLD = (m.Untold(),)
"""Follows it where the epoch that the journal ends in was never claimed."""
_REMEDY = "move it away and start again: the run goes on from its newest checkpoint"


class JournalError(RuntimeError):
    """The journal cannot be read or written; the message says what to do."""


class Began(Struct, frozen=True, tag=True):
    """The first line of a journal: the state that the rest builds on."""

    version: int
    state: msgspec.Raw
    restarts: int = 0
    """How often the coordinator had been started again by then."""


class Happened(Struct, frozen=True, tag=True):
    """A later line: events in the order in which the core saw them, all at one time."""

    now_s: float
    events: tuple[m.CoreEvent, ...]


_lines: msgspec.json.Decoder[Began | Happened] = msgspec.json.Decoder(Began | Happened)


def first_line(state: FleetState, restarts: int = 0) -> bytes:
    """The line that begins a journal at ``state``."""
    return msgspec.json.encode(Began(JOURNAL_VERSION, msgspec.Raw(encode_state(state)), restarts))


def batch_line(now_s: float, events: tuple[m.CoreEvent, ...]) -> bytes:
    """The line of a batch of events."""
    return msgspec.json.encode(Happened(now_s, events))


class Replayed(NamedTuple):
    """Where a journal leads."""

    state: FleetState
    restarts: int
    """How often the coordinator had been started again."""
    contradiction: Exception | None
    """Why the state was rebuilt, if it was: the journal is then evidence, and a new one has to begin."""


def replay(lines: Sequence[bytes], step: decide.CoreStep = decide.step) -> Replayed:
    """Replays a journal to the state after its last event; a state that contradicts itself on the way is rebuilt.

    The orders that follow from the events are left out: they were given when the events happened. Where the state was
    rebuilt, every node has to describe itself before anything is decided.

    Raises:
        JournalError: The lines are no journal, or one of another version.
    """
    try:
        began = _lines.decode(lines[0])
        if not isinstance(began, Began):
            raise JournalError(f"the journal does not begin with a state; {_REMEDY}")
        if began.version != JOURNAL_VERSION:
            raise JournalError(
                f"the journal has version {began.version}, and this Phalanx reads version {JOURNAL_VERSION}; {_REMEDY}"
            )
        state, restarts = decode_state(bytes(began.state)), began.restarts
        contradiction: Exception | None = None
        in_last_line = False
        for line in lines[1:]:
            happened = _lines.decode(line)
            if isinstance(happened, Began):
                raise JournalError(f"the journal begins twice; {_REMEDY}")
            if happened.events == RESTARTED:
                restarts += 1
            state, found = replay_batch(state, happened.events, happened.now_s, step)
            contradiction, in_last_line = found or contradiction, found is not None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise JournalError(f"the journal was written by another version ({error}); {_REMEDY}") from error
    if contradiction is not None and not in_last_line:
        # The coordinator that wrote the lines behind it had another state: what it ordered then is not known here.
        state, _ = resync(state, mark(state), reason(contradiction))
    return Replayed(state, restarts, contradiction)


def replay_batch(
    state: FleetState, events: tuple[m.CoreEvent, ...], now_s: float, step: decide.CoreStep = decide.step
) -> tuple[FleetState, Exception | None]:
    """The state after a batch of events, and the contradiction for which it was rebuilt, if it was. Mutates ``state``."""
    before, found = mark(state), None
    for event in events:
        try:
            state, _ = step(state, event, now_s)
        except Exception as error:
            state, _ = resync(state, before, reason(error))
            found = error
    try:
        check(state, before)
    except Exception as error:
        state, _ = resync(state, before, reason(error))
        found = error
    return state, found
