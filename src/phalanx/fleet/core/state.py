"""What the coordinator knows: the nodes, who sits where, which epoch it is and what is waited for.

A *seat* is a block of consecutive ranks, as many as a node has workers; a node in a seat holds its ranks. Seats are the
unit of planning, so a fleet of 100,000 ranks is one of 12,500 seats.

The state is plain data: it is written as JSON and read back equal. It is changed in place, though only by the core's
``step`` and through the functions here, so that an event costs what it changes and not what there is; each ``Node`` is
frozen and replaced as a whole. Who calls ``step`` gives the state away and goes on with the one returned.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from enum import StrEnum

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from phalanx.fleet.core.messages import NO_EPOCH, NO_STEP, Fresh, FromDisk, HeldSnapshot
from phalanx.run.layout import layout_problems, replica_ranks
from phalanx.run.spec import FleetSpec, RunSpec

NO_SEAT = -1
INCIDENTS_KEPT = 200
_SHORTEST_LEAVE_S = 5.0


class Formation(Struct, frozen=True):
    """What the fleet must know of a run's layout: the legal sizes, and which ranks hold equal state."""

    workers_per_node: int
    legal: tuple[int, ...]
    """Legal numbers of ranks, rising."""
    pipeline: int = 1
    model_ranks: int = 1
    """Ranks that compute one slot together: context x tensor."""
    shard_ranks: int = 0
    """Data-parallel ranks that share one copy of the state; 0 means all of them."""

    def seats(self, ranks: int) -> int:
        """Nodes that ``ranks`` ranks need."""
        return -(-ranks // self.workers_per_node)

    def ranks_of(self, seat: int, ranks: int) -> range:
        """The ranks of a seat."""
        first = seat * self.workers_per_node
        return range(first, min(first + self.workers_per_node, ranks))

    def largest(self, ranks: int) -> int:
        """The largest legal number of ranks that is at most ``ranks``; 0 if there is none."""
        index = bisect.bisect_right(self.legal, ranks)
        return self.legal[index - 1] if index else 0

    def stage_ranks(self, ranks: int) -> int:
        """Ranks of one pipeline stage, without its replicas."""
        return (self.shard_ranks or ranks // (self.pipeline * self.model_ranks)) * self.model_ranks

    def keys(self, ranks: int) -> int:
        """How many different states the ranks hold."""
        return self.pipeline * self.stage_ranks(ranks)

    def key(self, ranks: int, rank: int) -> int:
        """Which of these a rank holds. The mesh is pipeline x replicate x (shard x context x tensor)."""
        inner = self.stage_ranks(ranks)
        return rank // (ranks // self.pipeline) * inner + rank % inner

    def replicas(self, ranks: int, key: int) -> range:
        """The ranks that hold ``key``."""
        inner, stage = self.stage_ranks(ranks), ranks // self.pipeline
        first = key // inner * stage + key % inner
        return range(first, first - key % inner + stage, inner)


def formation_of(spec: RunSpec) -> Formation:
    """The formation of a run on its fleet.

    Raises ValueError where no number of nodes up to the one asked for is legal.
    """
    fleet, parallel = spec.fleet, spec.parallel
    most, unit = fleet.nodes * fleet.workers_per_node, replica_ranks(parallel)
    legal = tuple(ranks for ranks in range(unit, most + 1, unit) if not layout_problems(spec, ranks))
    if not legal:
        raise ValueError(
            f"fleet.nodes = {fleet.nodes} x fleet.workers_per_node = {fleet.workers_per_node}: no number of ranks up to "
            f"{most} is legal; one replica needs {unit}. `phalanx show` explains the layout"
        )
    return Formation(
        workers_per_node=fleet.workers_per_node,
        legal=legal,
        pipeline=parallel.pipeline,
        model_ranks=parallel.context * parallel.tensor,
        shard_ranks=1 if parallel.sharding == "none" else parallel.shard_ranks,
    )


class CoreSettings(Struct, frozen=True):
    """The core's patience and taste."""

    formation: Formation
    wanted_nodes: int
    min_nodes: int = 1
    lease_s: float = 15.0
    """A node silent for so long is lost."""
    confirm_s: float = 2.0
    """A node whose connection broke is lost after so long, or with the first broken collective."""
    park_s: float = 15.0
    """Who has not left an epoch after so long is lost."""
    bind_s: float = 300.0
    """Meeting and restoring take at most so long."""
    stall_s: float = 120.0
    """Without a step for so long, and for ten usual steps, a hang is diagnosed; after twice that, broken off."""
    form_s: float = 60.0
    """How long the first formation waits for all the nodes that are wanted."""
    grow_s: float = 30.0
    """An epoch lasts at least so long before it is ended to let more nodes in."""
    strikes: int = 3
    """A node that fails so often within ``strike_window_s`` is quarantined (a lemon: arXiv:2410.21680, section 5)."""
    strike_window_s: float = 86_400.0
    max_tries: int = 50
    """Failures in a row without one step between them, after which the run, not the fleet, is at fault."""


def leave_s(fleet: FleetSpec) -> float:
    """How long a worker may take to leave an epoch before its agent kills it."""
    return max(_SHORTEST_LEAVE_S, 3 * fleet.worker_lease_s)


def settings_of(spec: RunSpec) -> CoreSettings:
    """The settings of a run file. Raises ValueError as ``formation_of`` does."""
    fleet: FleetSpec = spec.fleet
    return CoreSettings(
        formation=formation_of(spec),
        wanted_nodes=fleet.nodes,
        min_nodes=fleet.min_nodes,
        lease_s=fleet.lease_s,
        confirm_s=fleet.confirm_s,
        park_s=max(fleet.lease_s, 2 * leave_s(fleet)),
        stall_s=fleet.stall_s,
    )


class FleetPhase(StrEnum):
    """Where the fleet as a whole is."""

    FORMING = "forming"
    BINDING = "binding"
    RUNNING = "running"
    PARKING = "parking"
    WAITING = "waiting"
    """Too few nodes; nobody is in an epoch, state is safe in memory and on disk."""
    FINISHED = "finished"
    FAILED = "failed"


class Eligibility(StrEnum):
    """Whether a node may hold ranks."""

    GOOD = "good"
    QUARANTINED = "quarantined"
    DRAINED = "drained"


class Node(Struct, frozen=True):
    """What is known of one node."""

    name: str
    incarnation: int
    workers: int
    host: str
    data_port: int
    domain: tuple[str, ...] = ()
    alive: bool = True
    """Not alive: this incarnation is fenced for good."""
    meeting_points: tuple[str, ...] = ()
    engaged: bool = False
    """Its workers are, or may be, in an epoch of which it is not a member."""
    eligibility: Eligibility = Eligibility.GOOD
    why: str = ""
    seat: int = NO_SEAT
    started_as_spare: bool = False
    """Started as a spare: in the first epoch it gets a seat only if the others are too few."""
    strikes: tuple[float, ...] = ()
    held: tuple[HeldSnapshot, ...] = ()

    @property
    def warm(self) -> bool:
        """Each of its workers waits for a rank, or has one."""
        return len(self.meeting_points) == self.workers and all(self.meeting_points)


class Census(Struct):
    """What the last roll call said about snapshots: who was a member held this, but for the absent."""

    epoch: int
    ranks: int
    steps: tuple[int, ...]
    seats: tuple[str, ...]
    ring: tuple[int, ...]
    absent: dict[str, int]
    """Node -> its seat then. They speak for themselves, or are gone."""


class RestorePoint(Struct, frozen=True, tag=True):
    """A snapshot of which some living node holds each part."""

    ranks: int
    step: int


class Incident(Struct, frozen=True):
    """Something worth telling the user."""

    at_s: float
    epoch: int
    node: str
    """Empty if it concerns no single node."""
    what: str
    ended_epoch: bool = False
    """It ended ``epoch``; ``what`` is the reason."""


class Distrust(Struct, frozen=True):
    """After a silent corruption: what epochs up to ``epoch`` made after step ``step`` is not used."""

    epoch: int
    step: int


StateSource = Fresh | FromDisk | RestorePoint


class FleetState(Struct):
    """All that the core knows."""

    settings: CoreSettings
    phase: FleetPhase = FleetPhase.FORMING
    epoch: int = NO_EPOCH
    seen_epoch: int = NO_EPOCH
    """The highest that anybody has spoken of."""
    now_s: float = 0.0
    since_s: float = 0.0
    """When the phase began."""
    reason: str = ""
    """Why the last epoch was ended, or why the fleet waits."""
    planned: bool = False
    """The epoch is being left at a step boundary, for no fault."""
    left_s: float | None = None
    """When it was decided to leave the last epoch that trained, if there was one."""
    left_planned: bool = False
    """It was left at a step boundary."""
    stopping: bool = False
    step: int = NO_STEP
    """Last completed in this epoch, as far as reported."""
    step_s: float = 0.0
    pace_s: float = 0.0
    """Seconds a step usually takes, smoothed."""
    diagnosed: bool = False
    best_step: int = NO_STEP
    """Furthest step ever completed, as far as known."""
    tries: int = 0
    """Faults since there was progress beyond ``best_step``."""
    durable: list[int] = []
    condemned: list[int] = []
    """Checkpoints that are on disk and not trusted; the shell is to delete them."""
    distrust: tuple[Distrust, ...] = ()
    """Rising in epoch and in step: a later one does not make good what an earlier one spoke of."""
    source: StateSource = Fresh()
    """What the present epoch was restored from."""
    result_json: str = ""

    nodes: dict[str, Node] = {}
    ranks: int = 0
    seats: list[str] = []
    ring: list[int] = []
    """Seat -> the seat that keeps its second copy."""
    ring_level: int = 0
    """In how many levels of their failure domain buddies may not agree."""
    vacant: set[int] = set()
    """Seats whose node cannot hold ranks now."""
    spares: set[str] = set()
    """Nodes without a seat that could take one now."""
    awaiting: set[str] = set()
    """Who has not yet parked or bound."""
    early: set[str] = set()
    """Who has parked before the others were told to."""
    evidence: bool = False
    """A collective broke in this epoch: a broken connection counts as proof."""

    heard: dict[str, float] = {}
    rolled_s: float = -1e18
    """Time of the last roll call; who was not silent in it was heard then."""
    silent: set[str] = set()
    next_lease_s: float = 0.0
    """No lease runs out before."""
    suspects: dict[str, float] = {}
    """Node -> when its connection broke."""

    copies: dict[str, dict[str, list[str]]] = {}
    """``ranks/step`` -> key -> who holds it, of what nodes said one by one (derived from ``Node.held``)."""
    census: Census | None = None
    incidents: list[Incident] = []
    stale: int = 0
    """Messages ignored: late, repeated, or from the fenced."""
    recoveries: int = 0
    regroups: int = 0
    """Planned ends of an epoch."""


_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(FleetState)


def encode_state(state: FleetState) -> bytes:
    """The state as JSON; equal states give equal bytes."""
    return _encoder.encode(state)


def decode_state(data: bytes) -> FleetState:
    """The state that ``encode_state`` wrote. Raises msgspec.ValidationError."""
    return _decoder.decode(data)


# --- the only ways in which nodes change ------------------------------------------------------------


def usable(state: FleetState, node: Node) -> bool:
    """Whether a node could hold ranks in the next epoch."""
    return (
        node.alive
        and node.warm
        and not node.engaged
        and node.eligibility is Eligibility.GOOD
        and node.workers >= state.settings.formation.workers_per_node
    )


def put(state: FleetState, node: Node) -> Node:
    """Writes a node, and keeps the sets that are derived from nodes."""
    old = state.nodes.get(node.name)
    if old is None or old.held != node.held or old.alive != node.alive:
        if old is not None:
            _unlist(state, old)
        _enlist(state, node)
    state.nodes[node.name] = node
    fit = usable(state, node)
    if node.seat != NO_SEAT:
        state.spares.discard(node.name)
        (state.vacant.discard if fit else state.vacant.add)(node.seat)
    else:
        (state.spares.add if fit else state.spares.discard)(node.name)
    return node


def change(state: FleetState, node: Node, **changes: object) -> Node:
    """``put`` of the node with some fields changed."""
    return put(state, replace(node, **changes))


def trusted(state: FleetState, holding: HeldSnapshot) -> bool:
    """Whether a copy may be restored from."""
    return trusts(state, holding.epoch, holding.step)


def trusts(state: FleetState, epoch: int, step: int) -> bool:
    """Whether what was made in ``epoch`` after ``step`` may be restored from."""
    return all(epoch > limit.epoch or step <= limit.step for limit in state.distrust)


def _listed(state: FleetState, node: Node) -> Iterator[tuple[str, str]]:
    formation = state.settings.formation
    for holding in node.held if node.alive else ():
        legal = formation.largest(holding.ranks) == holding.ranks > holding.rank
        if legal and trusted(state, holding):
            yield f"{holding.ranks}/{holding.step}", str(formation.key(holding.ranks, holding.rank))


def _enlist(state: FleetState, node: Node) -> None:
    for snapshot, key in _listed(state, node):
        state.copies.setdefault(snapshot, {}).setdefault(key, []).append(node.name)


def _unlist(state: FleetState, node: Node) -> None:
    for snapshot, key in _listed(state, node):
        keys = state.copies[snapshot]
        keys[key].remove(node.name)
        if not keys[key]:
            del keys[key]
        if not keys:
            del state.copies[snapshot]


def distrust(state: FleetState, step: int) -> None:
    """From now on, nothing that was made until now after ``step`` is restored from."""
    earlier = (limit for limit in state.distrust if limit.step < step)
    state.distrust = (*earlier, Distrust(state.epoch, step))
    state.condemned += [saved for saved in state.durable if saved > step]
    state.durable = [saved for saved in state.durable if saved <= step]
    if state.census is not None:
        state.census.steps = tuple(kept for kept in state.census.steps if kept <= step)
    state.copies = {}
    for node in state.nodes.values():
        _enlist(state, node)


def note(state: FleetState, node: str, what: str, *, ended_epoch: bool = False) -> None:
    """Remembers an incident; the oldest are forgotten."""
    state.incidents.append(Incident(state.now_s, state.epoch, node, what, ended_epoch))
    del state.incidents[:-INCIDENTS_KEPT]
