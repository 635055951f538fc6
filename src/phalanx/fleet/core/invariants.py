"""Invariants of the core's state, the resynchronization of a state that breaks one, and the replay of a
journal, which checks both.

The simulator checks the invariants after each event. The live coordinator checks them once per turn, after
the events of the turn and before any command is sent, since only commands can do harm. A violation is a bug
in the core, never a fault of the fleet; ``resync`` then rebuilds the state from the nodes' reports.

Cost, measured on one busy core with 8 workers a node: 0.63 ms for 1,000 nodes, 11.5 ms for 12,500. With a
check after each heartbeat, the core would handle 1,580 of 216,000 heartbeats/s of 1,000 nodes. With one check
per turn, a turn of 1,000 heartbeats takes 2.6 ms instead of 2.0 ms, and a turn comes about once a second.

The live coordinator, the simulator and the tests all replay with ``replay``, so property tests cover the code
that a restarted coordinator runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from phalanx.fleet.core import decide
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.commands import Shutdown, TellAll
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
    """The core has contradicted itself; the text has the contradiction and how to reproduce it."""


class StateMark(Struct, frozen=True):
    """The part of a state that later states are compared with: numbers that may only grow, and the phase."""

    epoch: int
    ended: int
    """Epochs that were ended."""
    phase: FleetPhase


def mark(state: FleetState) -> StateMark:
    """Return the mark of a state. Take it before an event."""
    return StateMark(state.epoch, state.recoveries + state.regroups, state.phase)


def check(state: FleetState, before: StateMark | None = None) -> None:
    """Raise BrokenInvariant naming every violated invariant. Costs O(nodes)."""
    wrong = [*_seats(state), *_phases(state), *(_order(state, before) if before else ())]
    if wrong:
        raise BrokenInvariant("; ".join(wrong))


def _seats(state: FleetState) -> Iterator[str]:
    """Yield each contradiction between seats, nodes, spares, vacancies and the ring of buddies."""
    if len(set(state.seats)) != len(state.seats):
        yield f"a node has two seats: {state.seats}"
    for seat, name in enumerate(state.seats):
        node = state.nodes[name]
        if node.seat != seat:
            yield f"node {name} has seat {node.seat} by its own record, and holds seat {seat}"
    # One pass that visits each node once: it is most of the cost of a turn of a large fleet.
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
    """Yield each contradiction between the phase and the nodes it waits for, what is being written, vacancies and
    ranks.
    """
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


def _order(state: FleetState, before: StateMark) -> Iterator[str]:
    """Yield each contradiction between the state and the one before: epochs that go back or overlap, a run that is over
    and continues.
    """
    if state.epoch < before.epoch:
        yield f"epoch {before.epoch} was followed by {state.epoch}"
    ended = state.recoveries + state.regroups > before.ended
    if state.epoch > before.epoch and before.phase in (FleetPhase.RUNNING, FleetPhase.BINDING) and not ended:
        yield f"epoch {state.epoch} began while {before.epoch} was {before.phase}"
    if before.phase in (FleetPhase.FINISHED, FleetPhase.FAILED) and state.phase is not before.phase:
        yield f"{before.phase} was followed by {state.phase}"


# Resynchronization.
#
# A broken invariant is a bug in the core (or a bit that flipped in its memory), and decisions from such a
# state cannot be trusted. They might seat two nodes on one rank, or begin an epoch while an old one still
# trains. Four reactions are possible.
#
# - Ending the process is a crash loop: the next coordinator replays the same journal to the same state.
# - Logging it and continuing sends unreliable commands, and only commands can do harm.
# - Sending nothing any more is safe, since training continues without a coordinator, but only until the next
#   fault.
# - Dropping derived state, and requesting every node's description, is the case of a lost journal, which
#   agents and core already handle.
#
# The last one is taken. The commands of the contradictory turn are never sent. Facts that nodes cannot repeat
# are kept: fenced incarnations (so that no earlier one is accepted), quarantined and drained nodes, the
# highest epoch (a number is never used twice), untrusted steps, and steps on disk. Seats, the buddy ring,
# copies and all pending waits are dropped.
#
# Each node counts as engaged until it has reported that its workers are in no epoch. The next epoch forms
# when no living node is engaged any more (or ``form_s`` has passed), so that every member has parked and its
# snapshot counts. Each resynchronization counts as a fault without progress, so a bug that strikes again at
# once ends the run after ``max_tries``, with its text as the reason.
#
# If a coordinator is killed before the rebuilt state is on disk, the replay of its journal resynchronizes
# likewise (``replay``). So does the replay of a journal with damaged lines: the nodes report the lost facts
# again.

_REASON_MAX = 1000


def reason(error: Exception) -> str:
    """Return the text of a contradiction, no longer than an incident should be."""
    return f"{error or type(error).__name__}"[:_REASON_MAX]


def resync(
    state: FleetState,
    before: StateMark,
    detail: str,
    cause: str = "the coordinator's state contradicted itself",
) -> tuple[FleetState, list[Order]]:
    """Return a consistent state rebuilt from ``state``, and its orders: nodes describe themselves, or shut down at the run's end.

    All seats and snapshots are forgotten, and the fleet forms again; it counts as a recovery and a try, and
    more than ``max_tries`` tries fail the run. A run that was over, or that the contradictory turn ended, stays
    over. ``before`` marks the last good state; ``detail`` and ``cause`` are texts for people.
    """
    was_over = before.phase in OVER
    over = was_over or state.phase in OVER
    nodes = {
        node.name: replace(node, seat=NO_SEAT, meeting_points=(), snapshots=(), engaged=node.alive)
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
        reports_requested_s=now_s,
        reason=state.reason if over else detail,
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
        rolled_s=now_s,  # No silence counts from before.
        next_lease_s=now_s + state.settings.lease_s,
        incidents=state.incidents,
        stale=state.stale,
        recoveries=state.recoveries + 1,
        regroups=state.regroups,
    )
    text = f"{cause}; all nodes must describe themselves again: {detail}"
    note(rebuilt, "", text, ended_epoch=before.phase in IN_EPOCH)
    orders: list[Order] = []
    if over and not was_over:  # The turn that sent the nodes the end was dropped.
        orders.append(Order(LIVING, Shutdown(rebuilt.reason)))
    elif not over and rebuilt.tries > rebuilt.settings.max_tries:
        end(
            rebuilt,
            orders,
            FleetPhase.FAILED,
            f"{rebuilt.tries} faults in a row without progress; the last one: {detail}",
        )
    elif not over:
        orders.append(Order(LIVING, TellAll()))
    return rebuilt, orders


# Replay: the lines of the coordinator's journal, and the one function that replays them to a state. A journal
# begins with a state and continues with batches of events, each with the time at which the core received it
# (``phalanx.fleet.control.succession.journal`` keeps the lines on disk). A journal can lead to a state that
# contradicts itself: the coordinator was killed before it had written the new journal. The replay rebuilds
# the state as that coordinator would have. Refusing the journal would end, at its second start, a run that
# the resynchronization is meant to save.


JOURNAL_VERSION = 9
"""Version of the journal's lines: raised whenever a state, an event or a rule of the core changes its
meaning.
"""
RESTARTED = (m.Restarted(),)
"""First batch of a coordinator: it began, and replayed the journal."""
UNTOLD = (m.EpochUnsent(),)
"""Follows it if the epoch at the end of the journal was never claimed."""
_REMEDY = "move it away and start again: the run continues from its newest checkpoint"


class JournalError(RuntimeError):
    """The journal cannot be read or written; the message has the remedy."""


class Began(Struct, frozen=True, tag=True):
    """The first line of a journal: the state that the later lines build on."""

    version: int
    state: msgspec.Raw
    restarts: int = 0
    """Number of earlier restarts of the coordinator."""


class Happened(Struct, frozen=True, tag=True):
    """A later line: events in the order in which the core received them, all at one time."""

    now_s: float
    events: tuple[m.CoreEvent, ...]


_lines: msgspec.json.Decoder[Began | Happened] = msgspec.json.Decoder(Began | Happened)


def first_line(state: FleetState, restarts: int = 0) -> bytes:
    """Return the line that begins a journal at ``state``."""
    return msgspec.json.encode(Began(JOURNAL_VERSION, msgspec.Raw(encode_state(state)), restarts))


def batch_line(now_s: float, events: tuple[m.CoreEvent, ...]) -> bytes:
    """Return the line of a batch of events."""
    return msgspec.json.encode(Happened(now_s, events))


class Replayed(NamedTuple):
    """The result of replaying a journal."""

    state: FleetState
    restarts: int
    """Number of restarts of the coordinator."""
    contradiction: Exception | None
    """Why the state was rebuilt, if it was: the journal is then evidence, and a new one has to begin."""


def replay(lines: Sequence[bytes], step: decide.CoreStep = decide.step) -> Replayed:
    """Replay a journal to the state after its last event; orders are dropped, since they were sent then.

    A batch that contradicts itself leaves a rebuilt state. If that was not the last line, the final state is
    rebuilt too, since later orders are unknown. Raises ``JournalError`` for lines of no journal or of another
    version.
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
            state, broken = replay_batch(state, happened.events, happened.now_s, step)
            contradiction, in_last_line = broken or contradiction, broken is not None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise JournalError(f"the journal was written by another version ({error}); {_REMEDY}") from error
    if contradiction is not None and not in_last_line:
        # The coordinator that wrote the later lines had another state, so its orders then are unknown here.
        state, _ = resync(state, mark(state), reason(contradiction))
    return Replayed(state, restarts, contradiction)


def replay_batch(
    state: FleetState, events: tuple[m.CoreEvent, ...], now_s: float, step: decide.CoreStep = decide.step
) -> tuple[FleetState, Exception | None]:
    """Return the state after a batch of events, and the last contradiction for which it was rebuilt, or None.

    Mutates ``state``. An exception of the core or a broken invariant is such a contradiction.
    """
    before, contradiction = mark(state), None
    for event in events:
        try:
            state, _ = step(state, event, now_s)
        except Exception as error:
            state, _ = resync(state, before, reason(error))
            contradiction = error
    try:
        check(state, before)
    except Exception as error:
        state, _ = resync(state, before, reason(error))
        contradiction = error
    return state, contradiction
