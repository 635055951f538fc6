"""The parts of a coordinator's turn: the inbox, the core's decisions, operators' requests, token rotation,
and the run's disk.

Events wait in the inbox and are one line of the journal. The core takes them all, and its commands are sent
only if its state breaks no invariant. Operators get their answers at once, and the core receives an event of
each accepted request in the next turn.
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
from phalanx.fleet.core.invariants import StateMark, check, mark
from phalanx.fleet.core.requests import CannotShrinkError, choose, require_enough
from phalanx.fleet.core.settings import formation_of
from phalanx.fleet.core.state import FleetState
from phalanx.run.directory.paths import DirectoryKeeper, RunDirectory, step_of
from phalanx.run.spec import RunSpec
from phalanx.wire.messages import token_name

# Inbox: events for the core since the coordinator's last turn, as one batch, which is one line of the
# journal. Only the last heartbeat of each node counts, so that 12,500 nodes cost one event.


@dataclass
class Inbox:
    """The events of the next turn, in order."""

    events: list[m.CoreEvent] = field(default_factory=list)
    heartbeats: dict[str, m.Heartbeat] = field(default_factory=dict)
    """Node -> its last heartbeat."""
    deaf_s: float = 0.0
    """Seconds in which this process did not read messages, not yet reported to the core."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a turn is due before its time."""

    def add(self, *events: m.CoreEvent) -> None:
        """Queue events for a turn that begins at once."""
        self.events += events
        self.wake.set()

    def holds(self, kind: type[m.CoreEvent]) -> bool:
        """Return True if an event of this kind waits for its turn."""
        return any(isinstance(event, kind) for event in self.events)

    def batch(self, on_disk: m.DiskHolds | None) -> tuple[m.CoreEvent, ...]:
        """Return the pending events for the core: time without reading, ``on_disk``, folded heartbeats, the others
        in order, and a Tick.

        They stay here until ``clear``, since the journal may not take them.
        """
        stood_still = [m.StoodStill(self.deaf_s)] if self.deaf_s else []
        looked = [on_disk] if on_disk is not None else []
        folded = [m.Folded(tuple(self.heartbeats.values()))] if self.heartbeats else []
        return (*stood_still, *looked, *folded, *self.events, m.Tick())

    def clear(self) -> None:
        """Drop the events that are in the journal."""
        self.events, self.heartbeats, self.deaf_s = [], {}, 0.0

    def put_back(self, undecided: Collection[m.CoreEvent]) -> None:
        """Queue the undecided events of a batch, before those that have arrived since."""
        self.events[:0] = [event for event in undecided if not isinstance(event, m.Tick)]

    async def measure_deafness(self, tick_s: float) -> None:
        """Add to ``deaf_s``, until cancelled, the seconds for which this process read no messages: stopped, swapped
        out, starved, or busy with a turn.

        Delays below half of ``tick_s`` do not count. Nor does waiting for a disk in a thread: messages are read
        meanwhile.
        """
        while True:
            due_s = time.monotonic() + tick_s / 4
            await asyncio.sleep(tick_s / 4)
            late_s = time.monotonic() - due_s
            if late_s > tick_s / 2:
                self.deaf_s += late_s


_BEING_DECIDED = "refused: another request of this kind is being decided; try again"


# Decisions of one turn: the core takes a batch of events, and its commands are sent only if its state breaks no invariant.


@dataclass
class TurnDecision:
    """The core's decisions on a batch of events."""

    state: FleetState
    before: StateMark
    """The marks of the state before the batch."""
    sending: list[tuple[str, c.Command]] = field(default_factory=list)
    """(node, command) pairs; not to be sent if there is a ``contradiction``."""
    inquiry: Inquiry | None = None
    """An inquiry into a hang, if the core has requested flight records."""
    contradiction: Exception | None = None
    """Set if the state contradicts itself, or the core has raised."""
    undecided: Sequence[m.CoreEvent] = ()
    """Events behind the one at which the core raised."""


def decide(state: FleetState, batch: Sequence[m.CoreEvent], now_s: float) -> TurnDecision:
    """Let the core decide all events of ``batch`` in order, then check its invariants. Takes ownership of
    ``state``.

    Returns the commands to send, and an inquiry if one was ordered. Any exception is returned as ``contradiction``,
    with the events after it as ``undecided``.
    """
    decided, undecided = TurnDecision(state, mark(state)), deque(batch)
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


class OperatorReply(NamedTuple):
    """Reply to an operator's request."""

    text: str
    event: m.CoreEvent | None = None
    """Event for the core; None if the request is refused."""


def answer(
    request: m.CoreEvent | m.Shrink | m.Grow, state: FleetState, inbox: Inbox, spec: RunSpec, own_node: str
) -> OperatorReply:
    """Reply to a request, by the present state and the requests that wait in ``inbox``; nothing is changed.

    "accepted" comes with the event for the core. Refused are unknown nodes, and to drain a node that is needed or
    leaving. For Shrink and Grow see ``_shrink`` and ``_grow``. ``own_node`` is the coordinator's.
    """
    if isinstance(request, m.Shrink):
        return _shrink(request, state, inbox, own_node)
    if isinstance(request, m.Grow):
        return _grow(request.by, state, inbox, spec)
    if isinstance(request, m.Drain | m.Admit) and request.node not in state.nodes:
        names = ", ".join(sorted(state.nodes)[:20]) or "none yet"
        return OperatorReply(f"there is no node {request.node}; there are: {names}")
    if isinstance(request, m.Drain) and is_needed(state, request.node):
        return OperatorReply(
            f"refused: without {request.node} too few nodes are left, and the fleet would only wait. phalanx fleet stop saves "
            "and ends the run; phalanx fleet add brings a drained node back"
        )
    if isinstance(request, m.Drain) and request.node in state.leaving:
        return OperatorReply(f"refused: {request.node} is being given back; phalanx fleet add keeps it")
    return OperatorReply("accepted", request)


def _shrink(wish: m.Shrink, state: FleetState, inbox: Inbox, own_node: str) -> OperatorReply:
    """Reply to a request to give nodes back: those named, else ``wish.by`` nodes chosen by the core. Return their
    names and the event.

    Refused for unknown nodes, the coordinator's own, too few remaining nodes, or while another such request waits.
    """
    unknown = [name for name in wish.nodes if name not in state.nodes]
    if unknown:
        return OperatorReply(f"there is no node {', '.join(unknown)}; phalanx status RUN lists them")
    if own_node in wish.nodes:
        return OperatorReply(f"refused: the coordinator runs on {own_node}, which therefore stays")
    if inbox.holds(m.GiveBack):
        return OperatorReply(_BEING_DECIDED)
    try:
        names = wish.nodes or choose(state, wish.by, own_node)
        require_enough(state, names)
    except CannotShrinkError as error:
        return OperatorReply(f"refused: {error}")
    return OperatorReply(" ".join(("accepted", *names)), m.GiveBack(names))


def _grow(by: int, state: FleetState, inbox: Inbox, spec: RunSpec) -> OperatorReply:
    """Reply to a request that ``by`` more nodes hold ranks, with the event for the core if it is accepted.

    Refused if no larger number of ranks would be legal, or while another such request waits.
    """
    if inbox.holds(m.Enlarge):
        return OperatorReply(_BEING_DECIDED)
    settings, fleet = state.settings, spec.fleet
    expected = settings.expected_nodes + by
    target_nodes = max(settings.wanted_nodes, expected - fleet.spares)
    formation = formation_of(replace(spec, fleet=replace(fleet, nodes=target_nodes)))
    if formation.largest(target_nodes * fleet.workers_per_node) <= state.ranks:
        return OperatorReply(
            f"refused: {target_nodes} nodes would hold no more than the present {state.ranks} ranks; a replica needs more: phalanx show "
            "explains the layout"
        )
    return OperatorReply("accepted", m.Enlarge(target_nodes, expected, formation.legal, formation.fewer))


# Rotation of a run's tokens while its coordinator leads: first on disk, then for new connections, then by the core for the agents.


def rekeyed(credentials: Credentials) -> m.Rekeyed:
    """Return the event with the name of the agents' new token and of the one before."""
    keys = credentials.earlier
    before = token_name(keys.earlier[0][0]) if keys.earlier else ""
    return m.Rekeyed(token_name(keys.token), before)


class TokenRotation:
    """Rotates the tokens of the server's credentials, one rotation at a time."""

    def __init__(self, run_dir: Path, server: FleetServer, inbox: Inbox) -> None:
        self._run_dir, self._server, self._inbox = run_dir, server, inbox
        self._rotation: asyncio.Task[str] | None = None
        """The last rotation, which may be in progress."""

    async def rotate(self, grace_s: float) -> str:
        """Rotate the tokens, and accept the previous ones for ``grace_s`` seconds more. Return the answer for the
        operator.

        Refused while another rotation is in progress. It continues if the caller is cancelled.
        """
        if self._rotation is not None and not self._rotation.done():
            return "refused: the tokens are being changed"
        self._rotation = asyncio.create_task(self._rotate(grace_s))
        # It continues after the end of the operator's stream, since this process must match the files on
        # disk.
        return await asyncio.shield(self._rotation)

    async def _rotate(self, grace_s: float) -> str:
        """Replace the operators' token, then the agents', and queue the event for the core; return the answer for
        the operator.

        If one of them cannot be rotated, none is. If the second fails to be written, the first stays changed, and
        the answer states that.
        """
        credentials, run_dir = self._server.credentials, self._run_dir
        trouble = "refused"
        try:
            # Neither is changed if the other is known to be unchangeable.
            await asyncio.to_thread(require_rotatable, run_dir, "operate", credentials.operator_token)
            await asyncio.to_thread(require_rotatable, run_dir, "join", credentials.token)
            # One after the other: each file is complete at any moment, and states until when the previous
            # token is accepted.
            operate = await asyncio.to_thread(
                rotate_token, run_dir, "operate", credentials.earlier_operators, grace_s
            )
            self._server.credentials = replace(
                credentials, operator_token=operate.token, earlier_operators=operate
            )
            trouble = "half done: the token of operators was changed, that of agents was not; try again"
            join = await asyncio.to_thread(rotate_token, run_dir, "join", credentials.earlier, grace_s)
            self._server.credentials = self._server.credentials.with_keys(join)
        except SecurityError as error:
            return f"{trouble}: {error}"
        self._inbox.add(rekeyed(self._server.credentials))
        return "accepted"


# The run's disk: checkpoints, the run's small files, and untrusted checkpoints.


class RunDisk:
    """The run directory, checked once per tick."""

    def __init__(self, directory: RunDirectory, tick_s: float, log: Callable[[str], None]) -> None:
        """Set up the checks of ``directory``, one in ``tick_s`` seconds; the first is due at once."""
        self._directory, self._tick_s, self._log = directory, tick_s, log
        self._keeper = DirectoryKeeper(directory)
        self._checkpoints: tuple[int, ...] = ()
        """The committed steps last reported to the core."""
        self._complaint = ""
        self.due_s = 0.0
        """Time of the next check."""

    def look(self, now_s: float) -> m.DiskHolds | None:
        """Return the committed checkpoints if they differ from those last reported, until ``mark_reported``."""
        self.due_s = now_s + self._tick_s
        steps = self._committed()
        return m.DiskHolds(steps) if steps != self._checkpoints else None

    def mark_reported(self, holds: m.DiskHolds) -> None:
        """Note that the core has these checkpoints."""
        self._checkpoints = holds.steps

    def mend(self) -> list[str]:
        """Repair the run's record and run file if they were damaged, and return lines about the repairs for the
        log.

        On an ``OSError`` nothing is returned; the next look retries.
        """
        with suppress(OSError):  # tried again at the next look
            return list(self._keeper.look())
        return []

    def _committed(self) -> tuple[int, ...]:
        """Return the committed steps on disk. If they cannot be read, return those of the last look, and log a new
        error.
        """
        try:
            steps = tuple(self._directory.committed_steps())
        except OSError as error:
            if str(error) != self._complaint:
                self._log(f"cannot look for checkpoints: {error}; trying again")
            self._complaint = str(error)
            return self._checkpoints
        self._complaint = ""
        return steps

    def set_aside(self, state: FleetState, *, stored: bool) -> None:
        """Rename the checkpoints that are not to be trusted; their steps are saved again. Errors are ignored: the next
        turn repeats it.

        ``stored``: there are copies in a store, and the distrust is recorded for their uploader.
        """
        is_recorded = bool(state.condemned and state.distrust and stored)
        if is_recorded:  # Before: a coordinator that ends meanwhile leaves it.
            self._record_distrust(state)
        for saved in state.condemned:
            with suppress(CheckpointError, OSError):
                DiskTier(self._directory.checkpoints).set_aside(saved)
        if is_recorded:  # And after: the uploader keeps copies of steps that it still finds on disk, and forgets the record.
            self._record_distrust(state)

    def _record_distrust(self, state: FleetState) -> None:
        """Record the newest distrust for the uploader. An error is ignored: the next turn with condemned steps repeats it."""
        with suppress(OSError):
            record_distrust(self._directory, state.distrust[-1].step)


def first_step(spec: RunSpec, directory: RunDirectory, log: Callable[[str], None]) -> int:
    """Return the step at which the run begins if nothing is committed on disk: that of the newest copy in its
    store.

    Without copies, it is the step of ``checkpoint.init_from`` if that is continued as training, else 0. A store
    that cannot be read is logged, and counts as empty.
    """
    if spec.checkpoint.store and not directory.committed_steps():
        # The client of stores is imported only if there is one.
        from phalanx.checkpoint.tiers.object_tier import ObjectTier
        from phalanx.store.open_store import open_store

        try:
            copied = ObjectTier(open_store(spec.checkpoint.store)).steps()
        except CheckpointError as error:
            log(f"cannot look for copies: {error}")  # The workers will try again.
        else:
            if copied:
                return copied[-1]
    inherits = spec.checkpoint.init_with == "training"
    return (step_of(Path(spec.checkpoint.init_from)) or 0) if inherits else 0
