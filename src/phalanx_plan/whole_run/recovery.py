"""Times of saving, recovery and starting: how long a checkpoint to each tier stops training, what a failure costs, and the time to the first step.

A saved state passes through tiers: from the accelerator into its host's memory (the only part for which
training must stand still), from there to a peer's memory, to the node's own flash, or to the cluster's
durable storage, while training continues (Gemini, SOSP 2023; two-stage checkpoints of MegaScale,
arXiv:2402.15627). A farther tier survives more and takes longer to drain; the next save into it can begin
when the last has drained. Every rank writes its own part, so that all links work at once.

Three ways to recover, each a list of phases whose times were published: a warm spare takes the place of the lost node
while all other processes live on; the run continues without the lost replica until a node comes back; or
everything is started again from durable storage. The time to read the state back is not in these lists: it
follows from the checkpoint's size and tier. The phases carry the names of the goodput ledger's buckets, and so do the phases of a start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from phalanx.hardware.cluster import Cluster, Fact
from phalanx_plan.whole_run.failures import RateLevel
from phalanx_plan.whole_run.goodput import RecoveryPhase

# Checkpoint tiers.


TierName = Literal["host", "peer", "nvme", "storage"]

NVME_BYTES_PER_S = Fact(
    10e9,
    "assumption: sequential write of a node with several data-center NVMe drives",
)
COPIES_IN_FLIGHT = 2
"""The last complete save, and the one that is being written (a crash must never find only a torn one)."""


class TierError(ValueError):
    """Sizes that no cluster can have."""


@dataclass(frozen=True)
class TierCost:
    """One place for checkpoints, for one run on one cluster."""

    name: TierName
    stall_s: float
    """Training stands still, once a save."""
    drain_s: float
    """Seconds from the end of the stall until the save is complete; the next save begins no sooner."""
    restore_s: float
    """Seconds until the state is back in the accelerators that lost it."""
    survives: str
    host_bytes_per_node: float
    """Host memory that it occupies."""
    fits: bool
    """True if the node's memory holds that."""


def tiers(
    cluster: Cluster,
    checkpoint_bytes: float,
    accelerators: int | None = None,
    snapshot_overlap: float = 0.0,
) -> dict[TierName, TierCost]:
    """The four tiers of a state of ``checkpoint_bytes`` (all ranks together), spread evenly over ``accelerators``;
    None for all.

    ``snapshot_overlap`` (0 to 1) is the share of the copy to host memory that the next step's computation hides.
    Raises ``TierError`` for an argument out of its range.
    """
    number = cluster.accelerators if accelerators is None else accelerators
    if checkpoint_bytes < 0 or number < 1:
        raise TierError(
            f"checkpoint_bytes must be >= 0 and accelerators >= 1: {checkpoint_bytes=}, {number=}"
        )
    if not 0 <= snapshot_overlap <= 1:
        raise TierError(f"snapshot_overlap must be between 0 and 1, is {snapshot_overlap}")
    own_bytes = checkpoint_bytes / number
    node_bytes = own_bytes * min(cluster.per_node, number)
    copy_s = own_bytes / cluster.accelerator.host_bytes_per_s.value
    stall_s = copy_s * (1 - snapshot_overlap)
    # A cluster without a fabric is one scale-up domain; state then goes to a peer over its links.
    link_bytes_per_s = cluster.fabric.bytes_per_s.value or cluster.domain.bytes_per_s.value
    send_s = own_bytes / link_bytes_per_s if link_bytes_per_s else float("inf")
    flash_s = node_bytes / NVME_BYTES_PER_S.value
    store_s = max(checkpoint_bytes / cluster.storage_bytes_per_s.value, 0.0 if number == 1 else send_s)

    def tier(name: TierName, drain_s: float, restore_s: float, survives: str, copies: int) -> TierCost:
        """Return a tier with ``copies`` copies in host memory, and with ``stall_s``."""
        room = copies * node_bytes
        return TierCost(
            name, stall_s, drain_s, restore_s, survives, room, room <= cluster.host_memory_bytes.value
        )

    hidden_s = copy_s - stall_s
    own = COPIES_IN_FLIGHT
    return {
        "host": tier("host", hidden_s, copy_s, "a worker", own),
        "peer": tier(
            "peer", hidden_s + send_s, send_s + copy_s, "a node, unless its peer dies with it", 2 * own
        ),
        "nvme": tier(
            "nvme", hidden_s + flash_s, flash_s + copy_s, "a restart of all nodes, not the loss of one", own
        ),
        "storage": tier(
            "storage",
            hidden_s + store_s,
            store_s + copy_s,
            "the loss of all nodes",
            own,
        ),
    }


def host_bytes_per_node(tier: TierCost, durable: TierCost) -> float:
    """Host memory of a node for all saves: those into ``tier``, and beside them one staged copy on its way to ``durable``."""
    if tier.name == durable.name:
        return tier.host_bytes_per_node
    return tier.host_bytes_per_node + durable.host_bytes_per_node / COPIES_IN_FLIGHT


# Recovery.


RecoveryMethod = Literal["spare", "shrink", "restart"]

TIER_OF: dict[RecoveryMethod, TierName] = {"spare": "peer", "shrink": "peer", "restart": "storage"}
"""The tier that the lost state is restored from."""

_TRAINMOVER = "TrainMover (Alibaba, OSDI 2026), restart at 8,192 GPUs, as reported by its authors' team"
_BYTEROBUST = "ByteRobust, arXiv:2509.16293, Table 3"
_BYTEDANCE = "explicit failures are detected in about 60 s on ByteDance's platform (arXiv:2509.16293)"
_MEGASCALE = "MegaScale, arXiv:2402.15627: communicators of over 10,000 GPUs in under 30 s"
_FT_HSDP = "FT-HSDP, arXiv:2602.00277, synchronous recovery at O(100k) GPUs, as summarized by others"

# Seconds (low, typical, high) and the source of each.
_PHASES: dict[RecoveryMethod, tuple[tuple[str, tuple[float, float, float], str], ...]] = {
    "spare": (
        ("fault.undetected", (2, 10, 60), f"{_BYTEROBUST}: 2 to 30 s with inspection; high: {_BYTEDANCE}"),
        ("reconfigure", (8, 30, 60), f"{_MEGASCALE}; low: TrainMover's whole recovery takes 20 s"),
        (
            "start.warmup",
            (5, 10, 60),
            "assumption: processes and compiled code stay; the first step is slower",
        ),
    ),
    "shrink": (
        ("fault.undetected", (2, 10, 60), f"{_BYTEROBUST}: 2 to 30 s with inspection; high: {_BYTEDANCE}"),
        ("reconfigure", (8, 30, 120), f"{_MEGASCALE}; high: FT-HSDP stalls 180 s in all (arXiv:2602.00277)"),
        (
            "start.warmup",
            (5, 10, 60),
            "assumption: processes and compiled code stay; the first step is slower",
        ),
    ),
    "restart": (
        ("fault.undetected", (10, 60, 600), f"{_BYTEDANCE}; high: a collective's usual timeout, 10 min"),
        ("fault.drain", (10, 31, 60), f"cleaning up: {_TRAINMOVER}: 0.52 min"),
        ("start.process", (45, 90, 120), f"rescheduling: {_TRAINMOVER}: 1.50 min; high: {_FT_HSDP}"),
        ("start.rendezvous", (30, 65, 300), f"{_TRAINMOVER}: 1.09 min; low: {_MEGASCALE}; high: {_FT_HSDP}"),
        ("start.warmup", (30, 108, 200), f"{_TRAINMOVER}: 1.80 min; high: {_FT_HSDP}"),
    ),
}


class RecoveryError(ValueError):
    """A way of recovery that does not exist."""


def recovery_phases(
    method: RecoveryMethod, tier: TierCost, level: RateLevel = "typical"
) -> tuple[RecoveryPhase, ...]:
    """The phases of a recovery, in order; the state is read back from ``tier`` before the warm-up.

    Raises ``RecoveryError`` for an unknown method.
    """
    if method not in _PHASES:
        raise RecoveryError(f"no recovery named {method!r}; there are {', '.join(get_args(RecoveryMethod))}")
    column = ("low", "typical", "high").index(level)
    *before, (warm, warm_s, warm_source) = _PHASES[method]
    return (
        *(RecoveryPhase(name, seconds[column], source) for name, seconds, source in before),
        RecoveryPhase(
            "start.restore", tier.restore_s, f"checkpoint size over the bandwidths of tier {tier.name}"
        ),
        RecoveryPhase(warm, warm_s[column], warm_source),
    )


def fleet_share(method: RecoveryMethod, nodes_away: float, nodes: float, replicas: int) -> float:
    """Return the mean share of the run's throughput while ``nodes_away`` of its nodes are in repair; 1 unless ``method`` is "shrink".

    With "shrink", a replica stops while any of its nodes is away. The number away from one replica is Poisson (see
    ``failures.spares_needed``), so e^-mean of the replicas are complete. If several replicas share a node, the same
    holds for nodes.
    """
    if method != "shrink":
        return 1.0
    return math.exp(-nodes_away / min(replicas, nodes))


# Start-up time, a closed form for each phase. Independent work of each node (the interpreter, imports from its own disk) takes
# as long on one node as on 25,000. Work at one shared place takes N times as long: files of a shared file system, the
# coordinator's event loop, the store in which ranks connect. It takes more if that place iterates over all nodes for some of
# them. The agents attach while their workers import, so the longer of the two counts. ``bench.fleet.start`` measured the costs
# of one node. Costs that no test on one machine can show are published figures. The wait for a scheduler's nodes is not
# counted.


_BENCH = "bench.fleet.start, 2026-11-25, one core of a shared machine"
Files = Literal["local", "shared"]
"""Where Python and its packages lie: on each node (its disk, a container image that is there), or on one file system for all."""


class StartError(ValueError):
    """An invalid argument of a start; the message names it."""


@dataclass(frozen=True)
class StartCosts:
    """Costs of a start, of one node, one rank, or one call."""

    agent_import_s: Fact
    worker_import_s: Fact
    file_calls: Fact
    """Calls of one node that name a file."""
    file_bytes: Fact
    """Bytes of files that one node reads."""
    file_calls_per_s: Fact
    """Calls that a shared file system answers in a second, for all nodes."""
    file_bytes_per_s: Fact
    """The same."""
    host_s: Fact
    """One login by ssh that starts Python; every host has two."""
    hosts_at_once: int
    """Logins by ssh at a time."""
    attach_s: Fact
    """The coordinator's event loop for one agent."""
    attach_s_per_node: Fact
    """More for each agent that is there already."""
    form_s: Fact
    """The coordinator's event loop for one node's place, orders and answer in the first epoch."""
    form_s_per_node: Fact
    """More for each node of the fleet."""
    store_connect_s: Fact
    """The store's thread for one rank's connection."""
    store_call_s: Fact
    """The same for one call."""
    store_calls: int
    """Calls of one rank to the store."""
    proof_s: Fact
    """One rank's time to check another's proof of the token."""
    group_s: Fact
    """Time of a communicator for each rank in it."""


MEASURED = StartCosts(
    agent_import_s=Fact(0.4, _BENCH),
    worker_import_s=Fact(3.5, f"{_BENCH}; PyTorch for CPUs"),
    file_calls=Fact(41_000, f"{_BENCH}: an agent and one worker, whose files the node keeps for the others"),
    file_bytes=Fact(0.73e9, f"{_BENCH}: files read, and libraries mapped; PyTorch for CPUs"),
    file_calls_per_s=Fact(
        500e3,
        "mdtest stat at 240 threads, Dell HPC Lustre Storage with EDR, figure 12: one metadata server's best",
    ),
    file_bytes_per_s=Fact(2e12, "Llama 3, arXiv:2407.21783, section 3.3.1: 2 TB/s sustained"),
    host_s=Fact(0.5, "an sshd on loopback, 2026-11-25"),
    hosts_at_once=32,  # ``launch.engines.bare``
    attach_s=Fact(
        1.0e-3, f"{_BENCH}: 500 to 6,000 agents; more threads' time with TLS, as much of the event loop's"
    ),
    attach_s_per_node=Fact(0.08e-6, f"{_BENCH}: all nodes are looked at in every turn"),
    form_s=Fact(0.13e-3, _BENCH),
    form_s_per_node=Fact(0.10e-6, f"{_BENCH}: all nodes are looked at in every turn"),
    store_connect_s=Fact(33e-6, f"{_BENCH}: TCPStore"),
    store_call_s=Fact(25e-6, f"{_BENCH}: TCPStore"),
    store_calls=16,  # an assumption: two for each group of a mesh of several axes
    proof_s=Fact(4e-6, _BENCH),
    group_s=Fact(
        3e-3, "MegaScale, arXiv:2402.15627: communicators of over 10,000 GPUs in under 30 s; taken as linear"
    ),
)


@dataclass(frozen=True)
class Start:
    """The phases of a start in their order, with where their costs come from."""

    nodes: int
    phases: tuple[RecoveryPhase, ...]
    hidden: str
    """The phase that is hidden by another one running at the same time."""

    @property
    def total_s(self) -> float:
        """Seconds from the launch to the first step."""
        return sum(phase.duration_s for phase in self.phases if phase.name != self.hidden)


def start(
    nodes: int,
    workers: int = 8,
    *,
    files: Files = "local",
    by_ssh: bool = False,
    restore_s: float = 0.0,
    warmup_s: float = 0.0,
    costs: StartCosts = MEASURED,
) -> Start:
    """Compute the phases of the start of a run, in seconds. Attaching agents and importing workers overlap: the
    shorter is ``hidden``.

    Args:
        nodes: Nodes, spares included.
        workers: Workers of each node.
        files: Where Python is installed.
        by_ssh: The launcher logs into every node, first to check it, then to start it.
        restore_s: Seconds to read the checkpoint (``read_s``); 0 for a new run.
        warmup_s: Compilation and the extra time of the first step.
        costs: Costs of one node; the measured ones by default.

    Raises:
        StartError: There are no nodes or workers, or a time is negative.
    """
    if nodes < 1 or workers < 1:
        raise StartError(f"a run has a node and a worker at least: {nodes=}, {workers=}")
    if restore_s < 0 or warmup_s < 0:
        raise StartError(f"seconds cannot be negative: {restore_s=}, {warmup_s=}")
    ranks = nodes * workers
    rounds = 2 * math.ceil(nodes / costs.hosts_at_once) if by_ssh else 0
    attaching = nodes * (costs.attach_s.value + nodes * costs.attach_s_per_node.value)
    forming = nodes * (costs.form_s.value + nodes * costs.form_s_per_node.value)
    storm_s = storm(nodes, costs) if files == "shared" else 0.0
    importing = max(costs.worker_import_s.value, storm_s)
    meeting = ranks * (
        costs.store_connect_s.value
        + costs.store_calls * costs.store_call_s.value
        + 2 * costs.proof_s.value
        + costs.group_s.value * (ranks > 1)
    )
    phases = (
        RecoveryPhase("launch", rounds * costs.host_s.value, costs.host_s.source),
        RecoveryPhase("agents import", costs.agent_import_s.value, costs.agent_import_s.source),
        RecoveryPhase(
            "workers import",
            importing,
            costs.file_calls_per_s.source if storm_s else costs.worker_import_s.source,
        ),
        RecoveryPhase("agents attach", attaching, costs.attach_s.source),
        RecoveryPhase("epoch is formed", forming, costs.form_s.source),
        RecoveryPhase("ranks meet", meeting, costs.group_s.source),
        RecoveryPhase("checkpoint", restore_s, "its size over the storage's rate"),
        RecoveryPhase("warm-up", warmup_s, "given"),
    )
    return Start(nodes, phases, "agents attach" if attaching < importing else "workers import")


def storm(nodes: int, costs: StartCosts) -> float:
    """Seconds until a shared file system has served the imports of all nodes, which come at once: its calls, or its bytes."""
    calls = nodes * costs.file_calls.value / costs.file_calls_per_s.value
    return max(calls, nodes * costs.file_bytes.value / costs.file_bytes_per_s.value)


def read_s(checkpoint_bytes: float, nodes: int, storage_bytes_per_s: float, node_bytes_per_s: float) -> float:
    """Seconds to read a checkpoint of which every node reads its share, at the lower of the storage's rate for all and that of all nodes.

    Raises ``StartError`` for a rate or a number of nodes that is not above 0.
    """
    if not (storage_bytes_per_s > 0 and node_bytes_per_s > 0 and nodes > 0):
        raise StartError(f"a rate must be above 0: {storage_bytes_per_s=}, {node_bytes_per_s=}, {nodes=}")
    return max(checkpoint_bytes / storage_bytes_per_s, checkpoint_bytes / nodes / node_bytes_per_s)
