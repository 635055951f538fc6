"""Checkpoint tiers: how long a save to each stops the training, and how long restoring from it takes.

A saved state passes through tiers: from the accelerator into its host's memory (the only part for which
training must stand still), from there to a peer's memory, to the node's own flash, or to the cluster's
durable storage, while training goes on (Gemini, SOSP 2023; two-stage checkpoints of MegaScale,
arXiv:2402.15627). A farther tier survives more and takes longer to drain; the next save into it can begin
when the last has drained. Every rank writes its own part, so that all links work at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.hardware.cluster import Cluster, Fact

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
