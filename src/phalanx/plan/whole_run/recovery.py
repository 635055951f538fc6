"""Recovery times: what a failure costs until the next step, by the way the run recovers.

Three ways, each a list of phases whose times were published: a warm spare takes the place of the lost node
while all other processes live on; the run goes on without the lost replica until a node comes back; or
everything is started again from durable storage. The time to read the state back is not in these lists: it
follows from the checkpoint's size and tier. The phases carry the names of the goodput ledger's buckets.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from phalanx.plan.whole_run.checkpoint_tiers import TierCost, TierName
from phalanx.plan.whole_run.failures import RateLevel
from phalanx.plan.whole_run.goodput import RecoveryPhase

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
