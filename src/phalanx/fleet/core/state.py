"""The coordinator's state: the nodes, the seat of each node, the epoch, and the nodes that it waits for.

A *seat* is a block of consecutive ranks, as many as a node has workers; a node in a seat holds its ranks.
Seats are the unit of planning, so a fleet of 100,000 ranks is one of 12,500 seats.

The state is plain data: it is written as JSON and read back equal. It is mutated in place, but only by the
core's ``step`` and through the functions here. So the cost of an event depends on its changes and not on the
size of the fleet. Each ``Node`` is frozen and replaced as a unit. A caller of ``step`` gives its state away
and uses the one returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Literal

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from phalanx.fleet.core.commands import Fresh, FromDisk
from phalanx.fleet.core.messages import NO_EPOCH, NO_STEP, RankSnapshot
from phalanx.fleet.core.settings import CoreSettings
from phalanx.observe.events import IncidentKind
from phalanx.run.identity import FencingToken

NO_SEAT = -1
UNMET = 0
"""The incarnation of a node that is known by name alone, and has not described itself to this coordinator
yet.
"""
INCIDENTS_KEPT = 200


class FleetPhase(StrEnum):
    """The phase of the fleet as a whole."""

    FORMING = "forming"
    BINDING = "binding"
    RUNNING = "running"
    PARKING = "parking"
    WAITING = "waiting"
    """Too few nodes; no worker is in an epoch; agents' memory and the newest checkpoint hold the state."""
    SAVING = "saving"
    """The run ends, and agents write to disk the state that only their memory holds."""
    FINISHED = "finished"
    FAILED = "failed"


class Eligibility(StrEnum):
    """Permission of a node to hold ranks."""

    GOOD = "good"
    QUARANTINED = "quarantined"
    DRAINED = "drained"
    LEAVING = "leaving"
    """To be given back (``phalanx.fleet.core.requests``)."""


class Node(Struct, frozen=True):
    """The core's record of one node."""

    name: str
    incarnation: int
    workers: int
    host: str
    data_port: int
    domain: tuple[str, ...] = ()
    alive: bool = True
    """False if this incarnation is fenced for good."""
    meeting_points: tuple[str, ...] = ()
    engaged: bool = False
    """True if its workers may still run in an epoch that it was removed from; it cannot be seated until they
    have parked.
    """
    eligibility: Eligibility = Eligibility.GOOD
    reason: str = field(default="", name="why")
    fault: IncidentKind = IncidentKind.NOTE
    """The kind of the incident for which it was lost or quarantined; ``reason`` is its text."""
    seat: int = NO_SEAT
    started_as_spare: bool = False
    """True if, in the first epoch, it gets a seat only in place of a missing node."""
    strikes: tuple[float, ...] = ()
    snapshots: tuple[RankSnapshot, ...] = field(default=(), name="held")

    @property
    def warm(self) -> bool:
        """True if each of its workers waits for a rank, or has one."""
        return len(self.meeting_points) == self.workers and all(self.meeting_points)


class Census(Struct):
    """Snapshots by the last roll call: every member of that epoch held these, except the absent."""

    epoch: int
    ranks: int
    steps: tuple[int, ...]
    seats: tuple[str, ...]
    ring: tuple[int, ...]
    absent: dict[str, int]
    """Node -> its seat then. They report for themselves, or are lost."""


class RestorePoint(Struct, frozen=True, tag=True):
    """A snapshot in memory, of which living nodes hold every part."""

    ranks: int
    step: int


class Incident(Struct, frozen=True):
    """An event that the user should see."""

    at_s: float
    epoch: int
    node: str
    """Empty if it concerns no single node."""
    text: str = field(name="what")
    ended_epoch: bool = False
    """True if it ended ``epoch``; ``text`` is the reason."""
    level: Literal["info", "warning", "error"] = "warning"
    kind: IncidentKind = IncidentKind.NOTE
    step: int = NO_STEP
    """The step that it concerns, if it concerns one."""
    held_ranks: bool = False
    """True if ``node`` had a seat then."""


class Distrust(Struct, frozen=True):
    """After a silent corruption: state after step ``step`` from epochs up to ``epoch`` is not restored."""

    epoch: int
    step: int


class Accusation(Struct, frozen=True):
    """A node's report that the run cannot continue, which no other node has confirmed."""

    node: str
    kind: str
    """The class of its error."""
    step: int
    """The last step that was completed then.

    Once a later one is completed, the others have shown that the run can continue.
    """


class NonFiniteDoubt(Struct, frozen=True):
    """A step whose result was not finite, and is computed again."""

    step: int
    epoch: int
    """The last epoch in which it was not finite."""
    nodes: tuple[str, ...] = ()
    """The nodes that are blamed and left out; empty: every rank changes its node."""
    confirmed: bool = False
    """True if other nodes have computed the same: it is the run's own."""


StateSource = Fresh | FromDisk | RestorePoint


class FleetState(Struct):
    """The complete state of the core."""

    settings: CoreSettings
    fencing: FencingToken
    """The start of the run that this fleet trains; it never changes while the journal exists."""
    phase: FleetPhase = FleetPhase.FORMING
    epoch: int = NO_EPOCH
    seen_epoch: int = NO_EPOCH
    """The highest epoch that any message has named."""
    now_s: float = 0.0
    since_s: float = 0.0
    """When the phase began."""
    reason: str = ""
    """Why the last epoch was ended, or why the fleet waits."""
    planned: bool = False
    """True if the epoch is being left at a step boundary, not because of a fault."""
    reports_requested_s: float | None = field(name="asked_s", default=None)
    """Time of the last request for every node's description, because their state was lost or not to be
    trusted.
    """
    left_s: float | None = None
    """Time of the decision to leave the last epoch that trained, if there was one."""
    left_planned: bool = False
    """True if that epoch was left at a step boundary."""
    stopping: bool = False
    step: int = NO_STEP
    """The last step completed in this epoch, as far as reported."""
    step_s: float = 0.0
    pace_s: float = 0.0
    """Seconds that a step usually takes, smoothed."""
    diagnosed: bool = False
    is_wait_recorded: bool = field(name="told_of_waiting", default=False)
    """True once an incident has recorded that the present step waits for samples."""
    best_step: int = NO_STEP
    """The furthest step ever completed, as far as known."""
    tries: int = 0
    """Number of faults since there was progress beyond ``best_step``."""
    durable: list[int] = []
    condemned: list[int] = []
    """Steps of checkpoints on disk that are not trusted; the shell sets them aside."""
    distrust: tuple[Distrust, ...] = ()
    """Ascending in epoch and in step: a later entry does not restore trust in what an earlier one covers."""
    accusations: tuple[Accusation, ...] = ()
    doubt: NonFiniteDoubt | None = None
    source: StateSource = Fresh()
    """The source from which the present epoch was restored; while SAVING, the snapshot that is saved."""
    writing: dict[str, list[tuple[int, int]]] = {}
    """While SAVING: node -> (rank, state) of the snapshots that it is to write."""
    ends_as: FleetPhase = FleetPhase.FINISHED
    """The phase after SAVING."""
    result_json: str = ""
    key: str = ""
    """The name of the agents' token, once it was changed."""
    epoch_key: str = ""
    """The name of the token under which the ranks of the present epoch meet.

    It is fixed once some of them have received it.
    """

    nodes: dict[str, Node] = {}
    ranks: int = 0
    seats: list[str] = []
    ring: list[int] = []
    """Seat -> the seat of its buddy, which keeps the second copy of its snapshots."""
    ring_level: int = 0
    """Number of levels of the failure domain, from the widest, in which buddies must differ."""
    vacant: set[int] = set()
    """Seats whose node cannot hold ranks now (derived from ``nodes``)."""
    spares: set[str] = set()
    """Nodes without a seat that could take one now (derived from ``nodes``)."""
    leaving: set[str] = set()
    """Living nodes that are to be given back (derived from ``nodes``)."""
    awaiting: set[str] = set()
    """Members that have not parked or bound yet."""
    early: set[str] = set()
    """Members that parked before the order to park."""
    evidence: bool = False
    """A collective broke in this epoch, so a broken connection counts as proof that its node is gone."""

    last_seen_s: dict[str, float] = field(default_factory=dict, name="heard")
    """Node -> time of its last message."""
    rolled_s: float = -1e18
    """Time of the last roll call, which is a sign of life of every node that is not in ``silent``."""
    silent: set[str] = set()
    next_lease_s: float = 0.0
    """No lease runs out before this time."""
    suspects: dict[str, float] = {}
    """Node -> time at which its connection broke."""

    copies: dict[str, dict[str, dict[str, int]]] = {}
    """``ranks/step`` -> key -> node that holds that state by its own report -> rank of its copy (derived from ``Node.snapshots``)."""
    census: Census | None = None
    incidents: list[Incident] = []
    stale: int = 0
    """Number of messages ignored: late, repeated, or from a fenced node."""
    recoveries: int = 0
    regroups: int = 0
    """Number of planned ends of an epoch."""


_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(FleetState)


def encode_state(state: FleetState) -> bytes:
    """Return the state as JSON. Equal states give equal bytes."""
    return _encoder.encode(state)


def decode_state(data: bytes) -> FleetState:
    """Return the state that ``encode_state`` wrote. Raises msgspec.ValidationError."""
    return _decoder.decode(data)


# --- the only functions that change nodes ---------------------------------------------------------


def usable(state: FleetState, node: Node) -> bool:
    """Return True if a node could hold ranks in the next epoch: alive, warm, in no epoch, GOOD, and with enough
    workers.
    """
    return (
        node.alive
        and node.warm
        and not node.engaged
        and node.eligibility is Eligibility.GOOD
        and node.workers >= state.settings.formation.workers_per_node
    )


def is_leaving(node: Node) -> bool:
    """Return True if a node is to be given back, and is still there."""
    return node.alive and node.eligibility is Eligibility.LEAVING


def put(state: FleetState, node: Node) -> Node:
    """Replace a node, and update the state derived from nodes: ``vacant``, ``spares``, ``leaving`` and ``copies``.

    Returns ``node``.
    """
    old = state.nodes.get(node.name)
    if old is None or old.snapshots != node.snapshots or old.alive != node.alive:
        if old is not None:
            # The node's snapshots are removed from ``copies``.
            for snapshot, key in {(snapshot, key) for snapshot, key, _ in _listed(state, old)}:
                keys = state.copies[snapshot]
                del keys[key][old.name]
                if not keys[key]:
                    del keys[key]
                if not keys:
                    del state.copies[snapshot]
        _enlist(state, node)
    state.nodes[node.name] = node
    if is_leaving(node):
        state.leaving.add(node.name)
    else:
        state.leaving.discard(node.name)
    fit = usable(state, node)
    if node.seat != NO_SEAT:
        state.spares.discard(node.name)
        if fit:
            state.vacant.discard(node.seat)
        else:
            state.vacant.add(node.seat)
    elif fit:
        state.spares.add(node.name)
    else:
        state.spares.discard(node.name)
    return node


def change(state: FleetState, node: Node, **changes: object) -> Node:
    """Replace a node by a copy with some fields changed, as ``put`` does."""
    return put(state, replace(node, **changes))


def may_be_restored(state: FleetState, holding: RankSnapshot) -> bool:
    """Return True if no silent corruption that was found so far can have reached a snapshot."""
    return trusts(state, holding.epoch, holding.step)


def trusts(state: FleetState, epoch: int, step: int) -> bool:
    """Return True if the state after ``step``, as computed in ``epoch``, may be restored."""
    return all(epoch > limit.epoch or step <= limit.step for limit in state.distrust)


def _listed(state: FleetState, node: Node) -> Iterator[tuple[str, str, int]]:
    """Yield (snapshot, state, rank) of each snapshot in a node's memory that may be restored; none if the node is dead."""
    formation = state.settings.formation
    for holding in node.snapshots if node.alive else ():
        legal = formation.largest(holding.ranks) == holding.ranks > holding.rank
        if legal and may_be_restored(state, holding):
            yield (
                f"{holding.ranks}/{holding.step}",
                str(formation.key(holding.ranks, holding.rank)),
                holding.rank,
            )


def _enlist(state: FleetState, node: Node) -> None:
    """Add a node's snapshots to the copies of each state."""
    for snapshot, key, rank in _listed(state, node):
        state.copies.setdefault(snapshot, {}).setdefault(key, {}).setdefault(node.name, rank)


def distrust(state: FleetState, step: int) -> None:
    """Exclude all present state after ``step`` from restores, in memory and on disk. Earlier stricter limits stay.

    Later durable steps become condemned, and ``copies`` is built again.
    """
    earlier = (limit for limit in state.distrust if limit.step < step)
    state.distrust = (*earlier, Distrust(state.epoch, step))
    state.condemned += [saved for saved in state.durable if saved > step]
    state.durable = [saved for saved in state.durable if saved <= step]
    if state.census is not None:
        state.census.steps = tuple(kept for kept in state.census.steps if kept <= step)
    state.copies = {}
    for node in state.nodes.values():
        if node.snapshots:
            _enlist(state, node)


def node_called(name: str) -> str:
    """Return a node's name for a sentence: ``node 7``, but ``node-7`` if the name begins with "node" already."""
    return name if name.startswith("node") else f"node {name}"


def note(
    state: FleetState,
    node: str,
    text: str,
    *,
    ended_epoch: bool = False,
    level: Literal["info", "warning", "error"] = "warning",
    kind: IncidentKind = IncidentKind.NOTE,
    step: int = NO_STEP,
) -> None:
    """Record an incident at the present time and epoch; only the newest ``INCIDENTS_KEPT`` are kept. ``node`` may
    be empty.
    """
    held_ranks = node in state.nodes and state.nodes[node].seat != NO_SEAT
    incident = Incident(state.now_s, state.epoch, node, text, ended_epoch, level, kind, step, held_ranks)
    state.incidents.append(incident)
    del state.incidents[:-INCIDENTS_KEPT]


def forget_copies(state: FleetState, name: str) -> None:
    """Remove a node from the census: from now on only its own reports count for its snapshots."""
    census = state.census
    if census is not None and name not in census.absent and name in census.seats:
        census.absent[name] = census.seats.index(name)
