"""Saving and recovery times: how long a checkpoint to each tier stops the training, and what a failure costs until the next step.

A saved state passes through tiers: from the accelerator into its host's memory (the only part for which
training must stand still), from there to a peer's memory, to the node's own flash, or to the cluster's
durable storage, while training goes on (Gemini, SOSP 2023; two-stage checkpoints of MegaScale,
arXiv:2402.15627). A farther tier survives more and takes longer to drain; the next save into it can begin
when the last has drained. Every rank writes its own part, so that all links work at once.

Three ways, each a list of phases whose times were published: a warm spare takes the place of the lost node
while all other processes live on; the run goes on without the lost replica until a node comes back; or
everything is started again from durable storage. The time to read the state back is not in these lists: it
follows from the checkpoint's size and tier. The phases carry the names of the goodput ledger's buckets.
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
    """The four tiers of a state of ``checkpoint_bytes`` (all ranks together), spread evenly over
    ``accelerators``.

    ``snapshot_overlap`` (0 to 1) is the share of the copy to host memory that the next step's computation
    hides.
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
    """The phases of a recovery, in order; the state is read back from ``tier`` before the warm-up."""
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
    """Returns the mean share of the run's throughput that is left while ``nodes_away`` of its nodes are in repair.

    With spares in time it is all. Without (``shrink``), a replica stands still while any of its nodes is
    away: the number away from one replica is Poisson (see ``failures.spares_needed``), so e^-mean of the
    replicas are whole. Where several replicas share a node, the same holds for nodes.
    """
    if method != "shrink":
        return 1.0
    return math.exp(-nodes_away / min(replicas, nodes))
