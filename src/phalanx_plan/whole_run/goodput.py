"""Goodput: the share of a run's time that ends up in its weights despite failures, and its distribution.

Failures are memoryless with mean time ``M`` between them. A run computes ``tau`` seconds, stalls
``delta`` seconds for a checkpoint, and so on. A failure costs a recovery of ``R`` seconds, which may itself
be interrupted, and the work since the last checkpoint. The mean wall time of one interval is then (Daly 2006,
"A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22)

    T = M e^(R/M) (e^((tau + delta)/M) - 1)

and tau / T is the goodput. Both fractions are exact, and so are the optimum below and the split of T into
the buckets of the goodput ledger. A ``Risk`` is one kind of failure with its checkpoint tier. Two nest:
within an interval of the rare risk (a complete rack, a corrupt copy: back to durable storage), the frequent one
(a node: back to a peer's memory) only makes the run slower.

The same process is simulated draw by draw for the distribution: many runs at once, one failure of each per
round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phalanx.checkpoint.save.save_schedule import optimal_interval_s
from phalanx_plan.workload.candidates import Floats


class GoodputError(ValueError):
    """Times that no run can have."""


@dataclass(frozen=True)
class RecoveryPhase:
    """One part of a recovery. ``name`` is a bucket of the goodput ledger."""

    name: str
    duration_s: float
    source: str = ""


@dataclass(frozen=True)
class Risk:
    """One kind of failure, and what it costs."""

    mtti_s: float
    """Mean time to interruption of the whole job, infinite if it never happens."""
    stall_s: float
    """Seconds that training stands still at each checkpoint of the tier that this risk is recovered from."""
    recovery: tuple[RecoveryPhase, ...]
    """Phases from the failure to the first step, in order, without the work done again."""

    def __post_init__(self) -> None:
        """Raise ``GoodputError`` for a time between failures that is not positive, or a negative stall or recovery."""
        if not self.mtti_s > 0:
            raise GoodputError(f"mtti_s must be positive, is {self.mtti_s}")
        if self.stall_s < 0 or any(phase.duration_s < 0 for phase in self.recovery):
            raise GoodputError(f"stall_s and the recovery's phases must not be negative: {self}")

    @property
    def recovery_s(self) -> float:
        return sum(phase.duration_s for phase in self.recovery)


# --- the checkpoint interval --------------------------------------------------------------------


def interval_s(risk: Risk, at_least_s: float = 0.0, step_s: float = 0.0) -> float:
    """The best interval in seconds of useful work: an integer number of steps, at least as long as the last save
    takes to drain.

    ``step_s`` of 0 leaves out the rounding; infinite without failures.
    """
    best = max(optimal_interval_s(risk.mtti_s, risk.stall_s), at_least_s, step_s)
    if step_s == 0 or math.isinf(best):
        return best
    steps = max(1, math.ceil(at_least_s / step_s - 1e-9), round(best / step_s))
    return steps * step_s


# --- the mean -----------------------------------------------------------------------------------


def efficiency(risk: Risk, interval_s: float, slowdown: float = 1.0) -> float:
    """Useful over wall time, with failures of this risk (exponential times between them, after Daly 2006).

    Useful time passes ``slowdown`` times slower. 0 if it would never finish. Raises ``GoodputError`` for an interval
    that is not positive.
    """
    if interval_s <= 0:
        raise GoodputError(f"a checkpoint interval must be positive, is {interval_s}")
    if math.isinf(risk.mtti_s):
        return (
            interval_s / (interval_s * slowdown + risk.stall_s)
            if not math.isinf(interval_s)
            else 1 / slowdown
        )
    segment = (interval_s * slowdown + risk.stall_s) / risk.mtti_s
    exponent = risk.recovery_s / risk.mtti_s + segment
    if exponent > 700:
        return 0.0
    wall_s = risk.mtti_s * math.exp(risk.recovery_s / risk.mtti_s) * math.expm1(segment)
    return interval_s / wall_s


def breakdown(risk: Risk, interval_s: float) -> dict[str, float]:
    """Shares of wall time by the ledger's names. They sum to 1; "committed" is the goodput.

    A second belongs to phase [a, b) of the recovery if the last failure was that long ago, which the
    memoryless process makes e^(-a/M) - e^(-b/M) of all time. The remainder is work, or a stall, that a failure
    undid.
    """
    good = efficiency(risk, interval_s)
    shares = {"committed": good, "ckpt.blocking": good * risk.stall_s / interval_s}
    return _with_losses(shares, risk)


def nested_efficiency(frequent: Risk, interval: float, rare: Risk, rare_interval_s: float) -> float:
    """Goodput with both risks; intervals in seconds of useful work. The rare risk rolls back the work that the
    frequent one leaves.

    That of the frequent risk alone if it leaves nothing, or the rare one never comes.
    """
    inner = efficiency(frequent, interval)
    if inner == 0 or math.isinf(rare.mtti_s):
        return inner
    return efficiency(_interrupted(rare, frequent), rare_interval_s, slowdown=1 / inner)


def nested_breakdown(frequent: Risk, interval: float, rare: Risk, rare_interval_s: float) -> dict[str, float]:
    """Shares of wall time with both risks, by the ledger's names; they sum to 1.

    Those of the frequent risk alone if it leaves no progress, or the rare one never comes.
    """
    inner = breakdown(frequent, interval)
    if inner["committed"] == 0 or math.isinf(rare.mtti_s):
        return inner
    # Seen from the rare risk, all that the frequent one leaves is "work", at 1/inner of its speed.
    longer = _interrupted(rare, frequent)
    good = efficiency(longer, rare_interval_s, slowdown=1 / inner["committed"])
    kept = good / inner["committed"]
    shares = {name: kept * share for name, share in inner.items()}
    shares["ckpt.blocking"] += good * rare.stall_s / rare_interval_s
    return _with_losses(shares, longer)


def _interrupted(rare: Risk, frequent: Risk) -> Risk:
    """The rare risk with the mean length of its recovery when frequent failures restart it: M (e^(R/M) - 1).

    R is the length without them, and M their mean time to an interruption.
    """
    if math.isinf(frequent.mtti_s) or rare.recovery_s == 0:
        return rare
    ratio = rare.recovery_s / frequent.mtti_s
    longer = math.expm1(min(ratio, 600.0)) / ratio
    phases = tuple(replace(phase, duration_s=phase.duration_s * longer) for phase in rare.recovery)
    return replace(rare, recovery=phases)


def _with_losses(shares: dict[str, float], risk: Risk) -> dict[str, float]:
    """Add to the shares of kept time, and return them, the recovery's phases and, for the remainder up to 1, undone work."""
    begin_s = 0.0
    for phase in risk.recovery:
        end_s = begin_s + phase.duration_s
        share = math.exp(-begin_s / risk.mtti_s) - math.exp(-end_s / risk.mtti_s)
        shares[phase.name] = shares.get(phase.name, 0.0) + share
        begin_s = end_s
    undone = max(0.0, 1.0 - sum(shares.values()))
    shares["discarded.rollback"] = shares.get("discarded.rollback", 0.0) + undone
    return shares


# --- the distribution ---------------------------------------------------------------------------

HOPELESS = 0.1
"""Goodput below which a run is reported as never finishing."""
MOST_FAILURES = 4000
"""Most simulated failures of one run. A run with more is a sum of so many independent parts that the central limit theorem
gives the remainder.
"""


@dataclass(frozen=True)
class CheckpointPlan:
    """Two risks and their checkpoint intervals, in seconds of useful work."""

    frequent: Risk
    interval_s: float
    rare: Risk
    rare_interval_s: float

    @property
    def goodput(self) -> float:
        return nested_efficiency(self.frequent, self.interval_s, self.rare, self.rare_interval_s)

    @property
    def breakdown(self) -> dict[str, float]:
        return nested_breakdown(self.frequent, self.interval_s, self.rare, self.rare_interval_s)

    def at_rate(self, factor: float) -> CheckpointPlan:
        """The same checkpoints in a fleet that fails ``factor`` times as often as it was planned for."""
        return replace(
            self,
            frequent=replace(self.frequent, mtti_s=self.frequent.mtti_s / factor),
            rare=replace(self.rare, mtti_s=self.rare.mtti_s / factor),
        )


def simulate(
    plan: CheckpointPlan, work_s: Floats, rate_factor: Floats, seed: int, most_failures: float = MOST_FAILURES
) -> Floats:
    """Wall seconds of as many runs as ``work_s`` has entries; infinite for one whose goodput is below ``HOPELESS``.

    ``work_s``: useful seconds that each run needs; ``rate_factor``: how much more often than planned it fails. The
    same seed gives the same draws. If any run expects more than ``most_failures``, all are simulated in part, the deviation from
    the exact mean scaled by the root of the number of such parts.
    """
    goodput = np.array([plan.at_rate(factor).goodput for factor in rate_factor])
    alive = goodput >= HOPELESS
    wall_s = np.full(len(work_s), np.inf)
    if not alive.any():
        return wall_s
    per_s = rate_factor[alive] * (1 / plan.frequent.mtti_s + 1 / plan.rare.mtti_s)
    mean_s = work_s[alive] / goodput[alive]
    # Runs are cut into parts; each part still has enough durable checkpoints to represent the full run.
    longest = float(work_s[alive].min()) / (20 * plan.rare_interval_s)
    parts = max(1.0, min(float((mean_s * per_s).max()) / most_failures, longest))
    part_s = _simulated(plan, work_s[alive] / parts, per_s, np.random.default_rng(seed))
    wall_s[alive] = mean_s + math.sqrt(parts) * (part_s - mean_s / parts) if parts > 1 else part_s
    return wall_s


def _simulated(plan: CheckpointPlan, work_s: Floats, per_s: Floats, random: np.random.Generator) -> Floats:
    """Wall seconds of runs that fail ``per_s`` times a second, simulated failure by failure, all runs at once."""
    rare_per_s = 1 / plan.rare.mtti_s
    rare_share = rare_per_s / max(1 / plan.frequent.mtti_s + rare_per_s, 1e-300)
    wall_s = np.empty(len(work_s))
    live = _Runs(np.arange(len(work_s)), work_s, per_s, *(np.zeros(len(work_s)) for _ in range(3)))
    while len(live.index):
        gap_s = random.exponential(size=len(live.index)) / np.maximum(live.per_s, 1e-300)
        live, finished, at_s = _until_failure(plan, live, gap_s, random.random(len(gap_s)) < rare_share)
        wall_s[finished] = at_s
    return wall_s


@dataclass(frozen=True)
class _Runs:
    """Runs under way, an entry each: which, what it needs, how often it fails; wall time and checkpointed
    work so far, and the recovery that it has before it."""

    index: NDArray[np.intp]
    work_s: Floats
    per_s: Floats
    wall_s: Floats
    done_s: Floats
    recovery_s: Floats


def _until_failure(
    plan: CheckpointPlan, runs: _Runs, gap_s: Floats, is_rare: NDArray[np.bool_]
) -> tuple[_Runs, NDArray[np.intp], Floats]:
    """Return the runs after their next failure, which comes after ``gap_s``; the indices of those that finish before,
    and when.

    A failure keeps the work up to the last checkpoint, a rare one up to the last durable one. A failure during a
    recovery starts the longer of the two recoveries.
    """
    interval_s = plan.interval_s
    # The stall of both tiers per interval; the durable tier's is spread over the intervals of the other.
    stall_s = plan.frequent.stall_s + plan.rare.stall_s * interval_s / plan.rare_interval_s
    rest_s = runs.work_s - runs.done_s
    to_end_s = runs.recovery_s + rest_s + stall_s * np.maximum(np.ceil(rest_s / interval_s) - 1, 0)
    finished = to_end_s <= gap_s
    usable_s = gap_s - runs.recovery_s
    done_s = runs.done_s + interval_s * np.floor(np.maximum(usable_s, 0) / (interval_s + stall_s))
    done_s = np.where(is_rare, plan.rare_interval_s * np.floor(done_s / plan.rare_interval_s), done_s)
    next_s = np.where(is_rare, plan.rare.recovery_s, plan.frequent.recovery_s)
    # An interrupted recovery starts again, with the longer one if they differ.
    next_s = np.where(usable_s < 0, np.maximum(next_s, runs.recovery_s), next_s)
    on = ~finished
    after = _Runs(
        runs.index[on], runs.work_s[on], runs.per_s[on], (runs.wall_s + gap_s)[on], done_s[on], next_s[on]
    )
    return after, runs.index[finished], (runs.wall_s + to_end_s)[finished]
