"""The parts of a coordinator's turn: the inbox, the core's decisions, operators' requests, token rotation, and the run's disk.

Events wait in the inbox and are one line of the journal. The core takes them all, and its commands are sent only if its state breaks no
invariant. Operators get their answers at once, and the core receives an event of each accepted request in the next turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.fleet.control.credentials import Credentials
from phalanx.fleet.control.fleet_file import record_distrust
from phalanx.fleet.control.inquiry import Inquiry
from phalanx.fleet.control.security import SecurityError, require_rotatable, rotate_token
from phalanx.fleet.control.transport import FleetServer
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.decide import step
from phalanx.fleet.core.epochs.epoch_plan import deliveries, is_needed
from phalanx.fleet.core.invariants import Mark, check, mark
from phalanx.fleet.core.requests import CannotShrinkError, choose, require_enough
from phalanx.fleet.core.settings import formation_of
from phalanx.fleet.core.state import FleetState
from phalanx.run.directory.paths import DirectoryKeeper, RunDirectory, step_of
from phalanx.run.spec import RunSpec
from phalanx.wire.messages import token_name

# Inbox: events for the core since the coordinator's last turn, as one batch, which is one line of the journal. Of heartbeats only the last
# one of each node counts, so that 12,500 nodes cost one event.


@dataclass
class Inbox:
    """The events of the next turn, in their order."""

    events: list[m.CoreEvent] = field(default_factory=list)
    heartbeats: dict[str, m.Heartbeat] = field(default_factory=dict)
    """Node -> its last heartbeat."""
    deaf_s: float = 0.0
    """Time in which this process did not read messages, and of which the core has not been told."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a turn is due before its time."""

    def add(self, *events: m.CoreEvent) -> None:
        """Queues events for a turn that begins at once."""
        self.events += events
        self.wake.set()

    def holds(self, kind: type[m.CoreEvent]) -> bool:
        """True if an event of this kind waits for its turn."""
        return any(isinstance(event, kind) for event in self.events)

    def batch(self, on_disk: m.DiskHolds | None) -> tuple[m.CoreEvent, ...]:
        """All that the core is to be told now; it stays here until ``clear``, since the journal may not take it."""
        stood_still = [m.StoodStill(self.deaf_s)] if self.deaf_s else []
        looked = [on_disk] if on_disk is not None else []
        folded = [m.Folded(tuple(self.heartbeats.values()))] if self.heartbeats else []
        return (*stood_still, *looked, *folded, *self.events, m.Tick())

    def clear(self) -> None:
        """Forgets what the journal has taken."""
        self.events, self.heartbeats, self.deaf_s = [], {}, 0.0

    def put_back(self, undecided: Collection[m.CoreEvent]) -> None:
        """Queues events of a batch that were not decided, before those that have come since."""
        self.events[:0] = [event for event in undecided if not isinstance(event, m.Tick)]

    async def measure_deafness(self, tick_s: float) -> None:
        """Measures, until cancelled, how long this process reads no messages: stopped, swapped out, starved, or busy with a turn.

        The time in which it waits for a disk does not count. A thread does that, and messages are read meanwhile.
        """
        while True:
            due_s = time.monotonic() + tick_s / 4
            await asyncio.sleep(tick_s / 4)
            late_s = time.monotonic() - due_s
            if late_s > tick_s / 2:
                self.deaf_s += late_s


_BEING_DECIDED = "refused: another request of this kind is being decided; ask again"


# Decisions of one turn: the core takes a batch of events, and its commands are sent only if its state breaks no invariant.


@dataclass
class Decided:
    """What the core has made of a batch."""

    state: FleetState
    before: Mark
    """The marks of the state before the batch."""
    sending: list[tuple[str, c.Command]] = field(default_factory=list)
    """Commands, each with the node that it goes to; not to be sent if there is a ``contradiction``."""
    inquiry: Inquiry | None = None
    """An inquiry into a hang, if the core has asked for flight records."""
    contradiction: Exception | None = None
    """The state contradicts itself, or the core has raised."""
    undecided: Sequence[m.CoreEvent] = ()
    """Events behind the one at which the core raised."""


def decide(state: FleetState, batch: Sequence[m.CoreEvent], now_s: float) -> Decided:
    """Lets the core decide all events of ``batch``, then checks its invariants; ``state`` is taken over."""
    decided, undecided = Decided(state, mark(state)), deque(batch)
    try:
        while undecided:
            decided.state, orders = step(decided.state, undecided.popleft(), now_s)
            for order in orders:
                if isinstance(order.command, c.Diagnose):
                    decided.inquiry = Inquiry.into(decided.state, order.command.silent_s, now_s)
            decided.sending += deliveries(decided.state, orders)
        check(decided.state, decided.before)
    except Exception as error:
        # A state that contradicts itself may also make the core raise.
        decided.contradiction, decided.undecided = error, tuple(undecided)
    return decided


# Requests of operators: whether one is accepted, and the event that then goes to the core.


class Answer(NamedTuple):
    """What an operator is told."""

    text: str
    event: m.CoreEvent | None = None
    """What the core is told; None if the request is refused."""


def answer(
    request: m.CoreEvent | m.Shrink | m.Grow, state: FleetState, inbox: Inbox, spec: RunSpec, own_node: str
) -> Answer:
    """The answer to a request, by the state of now and the requests that wait in ``inbox``; ``own_node`` is the coordinator's."""
    if isinstance(request, m.Shrink):
        return _shrink(request, state, inbox, own_node)
    if isinstance(request, m.Grow):
        return _grow(request.by, state, inbox, spec)
    if isinstance(request, m.Drain | m.Admit) and request.node not in state.nodes:
        known = ", ".join(sorted(state.nodes)[:20]) or "none yet"
        return Answer(f"there is no node {request.node}; there are: {known}")
    if isinstance(request, m.Drain) and is_needed(state, request.node):
        return Answer(
            f"refused: without {request.node} too few nodes are left, and the fleet would only wait. phalanx fleet stop saves "
            "and ends the run; phalanx fleet add brings a drained node back"
        )
    if isinstance(request, m.Drain) and request.node in state.leaving:
        return Answer(f"refused: {request.node} is being given back; phalanx fleet add keeps it")
    return Answer("accepted", request)


def _shrink(wish: m.Shrink, state: FleetState, inbox: Inbox, own_node: str) -> Answer:
    """Chooses the nodes to be given back; the answer has their names."""
    unknown = [name for name in wish.nodes if name not in state.nodes]
    if unknown:
        return Answer(f"there is no node {', '.join(unknown)}; phalanx status RUN lists them")
    if own_node in wish.nodes:
        return Answer(f"refused: the coordinator runs on {own_node}, which therefore stays")
    if inbox.holds(m.GiveBack):
        return Answer(_BEING_DECIDED)
    try:
        names = wish.nodes or choose(state, wish.by, own_node)
        require_enough(state, names)
    except CannotShrinkError as error:
        return Answer(f"refused: {error}")
    return Answer(" ".join(("accepted", *names)), m.GiveBack(names))


def _grow(by: int, state: FleetState, inbox: Inbox, spec: RunSpec) -> Answer:
    """Lets ``by`` more nodes hold ranks."""
    if inbox.holds(m.Enlarge):
        return Answer(_BEING_DECIDED)
    settings, fleet = state.settings, spec.fleet
    expected = settings.expected_nodes + by
    wanted = max(settings.wanted_nodes, expected - fleet.spares)
    formation = formation_of(replace(spec, fleet=replace(fleet, nodes=wanted)))
    if formation.largest(wanted * fleet.workers_per_node) <= state.ranks:
        return Answer(
            f"refused: {wanted} nodes would hold no more than the {state.ranks} ranks of now; a replica needs more: phalanx show "
            "explains the layout"
        )
    return Answer("accepted", m.Enlarge(wanted, expected, formation.legal, formation.fewer))


# Rotation of a run's tokens while its coordinator leads: first on disk, then for new connections, then by the core for the agents.


def rekeyed(credentials: Credentials) -> m.Rekeyed:
    """The event by which the core learns of the token that agents are to have, and of the one before."""
    keys = credentials.earlier
    before = token_name(keys.earlier[0][0]) if keys.earlier else ""
    return m.Rekeyed(token_name(keys.token), before)


class TokenRotation:
    """Changes the tokens of the server's credentials, one change at a time."""

    def __init__(self, run_dir: Path, server: FleetServer, inbox: Inbox) -> None:
        self._run_dir, self._server, self._inbox = run_dir, server, inbox
        self._rotation: asyncio.Task[str] | None = None
        """The last change of the tokens, which may be under way."""

    async def rotate(self, grace_s: float) -> str:
        """Changes the tokens, the ones before being accepted for ``grace_s`` more; returns the answer for the operator."""
        if self._rotation is not None and not self._rotation.done():
            return "refused: the tokens are being changed"
        self._rotation = asyncio.create_task(self._rotate(grace_s))
        # Not ended with the operator's stream: this process goes by what is on disk.
        return await asyncio.shield(self._rotation)

    async def _rotate(self, grace_s: float) -> str:
        held, run_dir = self._server.credentials, self._run_dir
        trouble = "refused"
        try:
            # Neither is changed if it is known that the other cannot be.
            await asyncio.to_thread(require_rotatable, run_dir, "operate", held.operator_token)
            await asyncio.to_thread(require_rotatable, run_dir, "join", held.token)
            # One after the other: each file is whole at any moment, and says by itself until when the token before is accepted.
            operate = await asyncio.to_thread(
                rotate_token, run_dir, "operate", held.earlier_operators, grace_s
            )
            self._server.credentials = replace(held, operator_token=operate.token, earlier_operators=operate)
            trouble = "half done: the token of operators was changed, that of agents was not; ask again"
            join = await asyncio.to_thread(rotate_token, run_dir, "join", held.earlier, grace_s)
            self._server.credentials = self._server.credentials.with_keys(join)
        except SecurityError as error:
            return f"{trouble}: {error}"
        self._inbox.add(rekeyed(self._server.credentials))
        return "accepted"


# The run's disk: checkpoints, the run's small files, and checkpoints that are not to be trusted.


class RunDisk:
    """The run directory, looked at once per tick."""

    def __init__(self, directory: RunDirectory, tick_s: float, log: Callable[[str], None]) -> None:
        self._directory, self._tick_s, self._log = directory, tick_s, log
        self._keeper = DirectoryKeeper(directory)
        self._checkpoints: tuple[int, ...] = ()
        """The committed steps that the core knows of."""
        self._complaint = ""
        self.due_s = 0.0
        """When it is to be looked at again."""

    def look(self, now_s: float) -> m.DiskHolds | None:
        """The committed checkpoints, if the core knows of others; it is told them until ``told``."""
        self.due_s = now_s + self._tick_s
        found = self._committed()
        return m.DiskHolds(found) if found != self._checkpoints else None

    def told(self, holds: m.DiskHolds) -> None:
        """The core knows of these from now on."""
        self._checkpoints = holds.steps

    def mend(self) -> list[str]:
        """Mends the run's record and run file if they were damaged; returns what is to be told of that."""
        with suppress(OSError):  # tried again at the next look
            return list(self._keeper.look())
        return []

    def _committed(self) -> tuple[int, ...]:
        """The committed steps on disk; those of the last look if the disk, or this process's open files, allow none now."""
        try:
            found = tuple(self._directory.committed_steps())
        except OSError as error:
            if str(error) != self._complaint:
                self._log(f"cannot look for checkpoints: {error}; trying again")
            self._complaint = str(error)
            return self._checkpoints
        self._complaint = ""
        return found

    def set_aside(self, state: FleetState, *, stored: bool) -> None:
        """Sets aside the checkpoints that are not to be trusted; their steps are saved again. ``stored``: there are copies in a store."""
        if state.condemned and state.distrust and stored:
            with suppress(OSError):  # written again at the next turn, for as long as they are on disk
                record_distrust(self._directory, state.distrust[-1].step)
        for saved in state.condemned:
            with suppress(CheckpointError, OSError):
                DiskTier(self._directory.checkpoints).set_aside(saved)


def first_step(spec: RunSpec, directory: RunDirectory, log: Callable[[str], None]) -> int:
    """The step that the run begins with if nothing is on disk: of the newest copy in its store, or of its parent; 0 for another run."""
    if spec.checkpoint.store and not directory.committed_steps():
        # The client of stores, only where there is one.
        from phalanx.checkpoint.tiers.object_tier import ObjectTier
        from phalanx.store.open_store import open_store

        try:
            copied = ObjectTier(open_store(spec.checkpoint.store)).steps()
        except CheckpointError as error:
            log(f"cannot look for copies: {error}")  # the workers will try again
        else:
            if copied:
                return copied[-1]
    inherits = spec.checkpoint.init_with == "training"
    return (step_of(Path(spec.checkpoint.init_from)) or 0) if inherits else 0
