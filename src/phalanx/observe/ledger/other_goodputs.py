"""What others call goodput, computed from our ledger, so that a figure can be held against one that was published elsewhere.

* Google (ml-goodput-measurement 0.2.3): productive step time over the job's elapsed time, from its first start to its end; everything else
  is badput of a named type. Exposed communication, bubbles and waiting for stragglers count as productive there.
* Meta (Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025, arXiv:2410.21680): ETTR,
  productive runtime over wall time. Not productive are steps computed again after the last checkpoint, the overhead of starts and restarts,
  and the time between two attempts; writing a checkpoint and scoring held-out text are.

All times are integer nanoseconds, and the parts of each account sum to its whole exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.observe.ledger.goodput import Goodput
from phalanx.observe.ledger.ledger import Bucket

STEP = "step."
BADPUT_OF_BUCKET: Mapping[str, str] = {
    Bucket.START_RENDEZVOUS: "TPU_INITIALIZATION",
    Bucket.START_PROCESS: "PROGRAM_STARTUP",
    Bucket.START_PLAN_COMPILE: "PROGRAM_STARTUP",
    Bucket.START_PREPARE_DATA: "TRAINING_PREP",
    Bucket.START_DATA_SEEK: "TRAINING_PREP",
    Bucket.START_WARMUP: "TRAINING_PREP",
    Bucket.START_RESTORE: "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    Bucket.CKPT_BLOCKING: "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    Bucket.STEP_DATA_WAIT: "DATA_LOADING_SYNC",
    Bucket.FAULT_UNDETECTED: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Bucket.FAULT_DIAGNOSE: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Bucket.FAULT_DRAIN: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Bucket.RECONFIGURE: "ELASTIC_REINITIALIZATION",
    Bucket.EVAL: "CUSTOM_BADPUT_EVENTS",
    Bucket.HEALTH_SDC_CHECK: "CUSTOM_BADPUT_EVENTS",
    Bucket.PAUSE_OPERATOR: "CUSTOM_BADPUT_EVENTS",
}
"""Google's type of badput for each bucket that is not productive there; of what is not listed: ``OTHER``, but steps are productive."""
WASTED = "WASTED_PROGRESS_FROM_DISRUPTION"
BETWEEN = "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"
_OVERHEAD = ("start.", "fault.", "reconfigure")


@dataclass(frozen=True)
class GoogleGoodput:
    """Google's account: the parts of ``badput_ns`` and ``productive_ns`` sum to ``elapsed_ns``."""

    elapsed_ns: int
    productive_ns: int
    badput_ns: Mapping[str, int]

    @property
    def goodput(self) -> float:
        """Productive over elapsed time, 0 to 1."""
        return self.productive_ns / self.elapsed_ns if self.elapsed_ns else 0.0


@dataclass(frozen=True)
class MetaEttr:
    """Meta's account: the four parts sum to ``wall_ns``."""

    productive_ns: int
    catch_up_ns: int
    """Steps that were lost, and computed again."""
    restart_overhead_ns: int
    """The first start is among them."""
    between_ns: int
    """Between two attempts: queueing, among others. What passed before the first start is not known to a run."""

    @property
    def wall_ns(self) -> int:
        """Time from the first start to the end."""
        return self.productive_ns + self.catch_up_ns + self.restart_overhead_ns + self.between_ns

    @property
    def ettr(self) -> float:
        """The effective training time ratio, 0 to 1."""
        return self.productive_ns / self.wall_ns if self.wall_ns else 0.0


def google_goodput(ours: Goodput) -> GoogleGoodput:
    """Our account in Google's terms. Lost steps are waste with all that was in them, so a part of the waiting for data is there."""
    badput: dict[str, int] = {}
    for name, value in ours.buckets_ns.items():
        kind = BADPUT_OF_BUCKET.get(name, "" if name.startswith(STEP) else "OTHER")
        if kind:
            badput[kind] = badput.get(kind, 0) + value
    badput["DATA_LOADING_SYNC"] = ours.waiting_ns
    badput[WASTED] = ours.rollback_ns
    badput[BETWEEN] = badput.get(BETWEEN, 0) + ours.gap_ns
    elapsed_ns = ours.held_ns + ours.gap_ns
    return GoogleGoodput(
        elapsed_ns,
        elapsed_ns - sum(badput.values()),
        {kind: value for kind, value in badput.items() if value},
    )


def meta_ettr(ours: Goodput) -> MetaEttr:
    """Our account in the terms of Meta's effective training time ratio."""
    overhead_ns = sum(value for name, value in ours.buckets_ns.items() if name.startswith(_OVERHEAD))
    return MetaEttr(
        productive_ns=ours.held_ns - overhead_ns - ours.rollback_ns,
        catch_up_ns=ours.rollback_ns,
        restart_overhead_ns=overhead_ns,
        between_ns=ours.gap_ns,
    )
