"""The core's settings: the layouts that the run allows, and the timeouts and limits of its fleet."""

from __future__ import annotations

import bisect

from msgspec import Struct

from phalanx.launch.placing import Order, block_seats
from phalanx.run.layout import replica_ranks
from phalanx.run.smaller_degrees import divisions, legal_ranks
from phalanx.run.spec import FleetSpec, RunSpec

_SHORTEST_LEAVE_S = 5.0


class Formation(Struct, frozen=True):
    """The facts of a run's layout that the fleet needs: the legal numbers of ranks, and which ranks hold
    equal state.
    """

    workers_per_node: int
    legal: tuple[int, ...]
    """Legal numbers of ranks, ascending."""
    pipeline: int = 1
    model_ranks: int = 1
    """Ranks that compute one slot together, by the run file: context x tensor."""
    shard_ranks: int = 0
    """Data-parallel ranks that share one copy of the state; 0 means all of them."""
    fewer: tuple[tuple[int, int], ...] = ()
    """(below this number of ranks, ranks that compute a slot together), where the tensor or context degree
    may fall; both descend.
    """

    def seats(self, ranks: int) -> int:
        """Return the number of nodes that ``ranks`` ranks need."""
        return -(-ranks // self.workers_per_node)

    def ranks_of(self, seat: int, ranks: int) -> range:
        """Return the ranks of a seat."""
        first = seat * self.workers_per_node
        return range(first, min(first + self.workers_per_node, ranks))

    def largest(self, ranks: int) -> int:
        """Return the largest legal number of ranks that is at most ``ranks``; 0 if there is none."""
        index = bisect.bisect_right(self.legal, ranks)
        return self.legal[index - 1] if index else 0

    def slot_ranks(self, ranks: int) -> int:
        """Return the number of ranks that compute one slot together when there are ``ranks`` in all."""
        return next((together for below, together in reversed(self.fewer) if ranks < below), self.model_ranks)

    def stage_ranks(self, ranks: int) -> int:
        """Return the number of ranks of one pipeline stage, without its replicas."""
        together = self.slot_ranks(ranks)
        return (self.shard_ranks or ranks // (self.pipeline * together)) * together

    def keys(self, ranks: int) -> int:
        """Return the number of different states that the ranks hold."""
        return self.pipeline * self.stage_ranks(ranks)

    def key(self, ranks: int, rank: int) -> int:
        """Return the index of the state that a rank holds; replicas of it have the same.

        The mesh of ``ranks`` ranks is pipeline x replicate x (shard x context x tensor).
        """
        inner = self.stage_ranks(ranks)
        return rank // (ranks // self.pipeline) * inner + rank % inner

    def replicas(self, ranks: int, key: int) -> range:
        """Return the ranks that hold the state with index ``key``."""
        inner, stage = self.stage_ranks(ranks), ranks // self.pipeline
        first = key // inner * stage + key % inner
        return range(first, first - key % inner + stage, inner)


def formation_of(spec: RunSpec) -> Formation:
    """Return the formation of a run on its fleet: all legal numbers of ranks, also with smaller degrees where
    nothing larger fits.

    Raises ``ValueError`` if no number of ranks up to those of ``fleet.nodes`` is legal.
    """
    fleet, parallel = spec.fleet, spec.parallel
    most, unit = fleet.nodes * fleet.workers_per_node, replica_ranks(parallel)
    legal: tuple[int, ...] = ()
    fewer: list[tuple[int, int]] = []
    for divided in divisions(spec):
        # A smaller degree is for when there are too few ranks for any larger one.
        smallest = legal[0] if legal else most + 1
        ranks = legal_ranks(spec, divided, smallest - 1)
        if ranks and divided is not parallel:
            fewer.append((smallest, divided.context * divided.tensor))
        legal = ranks + legal
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
        fewer=tuple(fewer),
    )


class CoreSettings(Struct, frozen=True):
    """The core's timeouts and limits. Durations in seconds."""

    formation: Formation
    wanted_nodes: int
    min_nodes: int = 1
    lease_s: float = 15.0
    """A node without a heartbeat for this long is lost."""
    confirm_s: float = 2.0
    """A node whose connection broke is lost after this long, or with the first broken collective."""
    park_s: float = 15.0
    """A node that has not left an epoch after this long is lost."""
    bind_s: float = 300.0
    """Rendezvous and restore take at most this long."""
    stall_s: float = 120.0
    """Without a step for this long, and for ten usual steps, a hang is diagnosed; after twice that, the epoch is ended."""
    form_s: float = 60.0
    """The first formation waits this long for all wanted nodes."""
    grow_s: float = 30.0
    """An epoch lasts at least this long before it is ended to let more nodes in."""
    strikes: int = 3
    """A node that fails this often within ``strike_window_s`` is quarantined (a lemon: arXiv:2410.21680, section 5)."""
    strike_window_s: float = 86_400.0
    save_s: float = 600.0
    """At the end of a run, the agents may take this long to write state that only their memory holds."""
    first_step: int = 0
    """The step at which the run begins: above 0 if it takes over a checkpoint of its parent."""
    block: int = 1
    """Seats that the axes inside a slot span; they are adjacent."""
    unit: int = 1
    """Seats that are placed together, below one switch where that can be."""
    order: Order = "data"
    """Which ranks are neighbors in the network: data-parallel ranks, or stages of a replica."""
    expected_nodes: int = 0
    """Nodes that the first formation expects, spares included, if nodes have domains: then the choice is
    among all of them.
    """
    gather_s: float = 15.0
    """The first formation waits this long for ``expected_nodes`` while there are enough without them."""
    snapshot_every_steps: int = 1
    """Steps between snapshots into memory; 0 means none."""
    max_tries: int = 50
    """Number of failures in a row without a step between them after which the run, not the fleet, is at fault."""


def leave_s(fleet: FleetSpec) -> float:
    """Return the seconds that a worker may take to leave an epoch before its agent kills it."""
    return max(_SHORTEST_LEAVE_S, 3 * fleet.worker_lease_s)


def settings_of(spec: RunSpec, first_step: int = 0) -> CoreSettings:
    """Return the settings of a run file, for a run that begins at ``first_step``.

    Raises ValueError as ``formation_of`` does.
    """
    fleet: FleetSpec = spec.fleet
    formation = formation_of(spec)
    inner = replica_ranks(spec.parallel) // formation.pipeline
    ranks = formation.largest(fleet.nodes * fleet.workers_per_node)
    block = block_seats(inner, ranks // formation.pipeline, fleet.workers_per_node)
    return CoreSettings(
        formation=formation,
        wanted_nodes=fleet.nodes,
        min_nodes=fleet.min_nodes,
        lease_s=fleet.lease_s,
        confirm_s=fleet.confirm_s,
        park_s=max(fleet.lease_s, 2 * leave_s(fleet)),
        stall_s=fleet.stall_s,
        first_step=first_step,
        block=block,
        unit=spec.launch.unit or block,
        order=spec.launch.order,
        expected_nodes=fleet.nodes + fleet.spares,
        snapshot_every_steps=fleet.snapshot_every_steps,
    )
