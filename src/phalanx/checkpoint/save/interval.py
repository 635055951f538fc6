"""When to save and what to delete: the interval that loses the least time to saves and failures, and the retention of older checkpoints.

A save holds training up for ``delta`` seconds; a failure, one in ``M`` seconds on average, loses the work since the last save. Saving
often costs the first, saving seldom the second. Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006,
"A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22. No I/O, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

RANK_HOURS_BETWEEN_FAILURES = 54 * 24 * 16_384 / 419
"""Hours of one accelerator between unexpected interruptions of a run: 419 in 54 days on 16,384 (Llama 3, arXiv 2407.21783, table 5)."""


def young_interval_s(mtti_s: float, stall_s: float) -> float:
    """Young 1974, "A first order approximation to the optimum checkpoint interval": sqrt(2 delta M)."""
    return math.sqrt(2 * stall_s * mtti_s)


def daly_interval_s(mtti_s: float, stall_s: float) -> float:
    """Daly 2006: three terms of the optimum's series, and M where that does not hold."""
    if stall_s >= 2 * mtti_s:
        return mtti_s
    half = stall_s / (2 * mtti_s)
    return young_interval_s(mtti_s, stall_s) * (1 + math.sqrt(half) / 3 + half / 9) - stall_s


def optimal_interval_s(mtti_s: float, stall_s: float) -> float:
    """The interval with the best goodput, exactly: the root of (1 - x) e^x = e^(-delta/M), x = tau/M.

    It does not depend on the recovery. The root is 1 + W(-e^(-delta/M - 1)) with Lambert's W.
    """
    if math.isinf(mtti_s):
        return math.inf
    delta = stall_s / mtti_s
    if delta == 0:
        return 0.0
    # x + e^-(x + delta) - 1 is convex and positive at 1: Newton falls monotonically onto the root.
    x = 1.0
    for _ in range(100):
        value = x + math.expm1(-(x + delta))
        step = value / -math.expm1(-(x + delta))
        x -= step
        if abs(step) <= 1e-15 * x:
            break
    return x * mtti_s


@dataclass
class SaveInterval:
    """The interval of a run that chooses it by itself, and when the next save is due; for one rank, which tells the others.

    What a save costs is not known before the first, so the first step is saved. Nothing else decides than time, so no bit of the weights
    depends on it.
    """

    mtti_s: float
    """Mean time between failures of the whole run."""
    stall_s: float | None = None
    """Seconds that the last save held training up; ``None`` before one."""
    write_s: float = 0.0
    """Seconds that the last save took to be durable."""
    saved_at_s: float = 0.0
    """Time of the last save, on the caller's clock."""

    @property
    def seconds(self) -> float:
        """The interval: the optimum, but no save before the one before it is durable; 0 as long as the cost is not known."""
        if self.stall_s is None:
            return 0.0
        return max(optimal_interval_s(self.mtti_s, self.stall_s), self.write_s)

    def due(self, now_s: float) -> bool:
        """True if a save now loses less than one later."""
        return now_s - self.saved_at_s >= self.seconds

    def saved(self, now_s: float, stall_s: float) -> None:
        """Takes in that a save was handed over, and for how long training was held up."""
        self.saved_at_s, self.stall_s = now_s, stall_s

    def failed(self, now_s: float) -> None:
        """Takes in that a save failed: the next comes after a tenth of the interval."""
        self.saved_at_s = now_s - 0.9 * self.seconds

    def written(self, write_s: float) -> None:
        """Takes in how long a save took to be durable."""
        self.write_s = write_s


# Retention: which checkpoints may be deleted, a pure rule over step numbers.
#
# The newest few are kept to restart from, and every so-many steps one for good, to look back at or branch from.


@dataclass(frozen=True, slots=True)
class Retention:
    """Keeps the newest ``keep_last`` checkpoints, and every step divisible by ``keep_every`` for good.

    ``before``: steps of which the newest checkpoint that comes earlier is kept as well, so that one can go back to it.

    Raises ValueError where the rule would keep nothing.
    """

    keep_last: int
    keep_every: int | None = None
    before: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep_last = {self.keep_last}: at least the newest checkpoint must be kept")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every = {self.keep_every}: must be at least 1, or left out")

    def expired(self, steps: Sequence[int]) -> list[int]:
        """The steps to delete, oldest first."""
        ordered = sorted(set(steps))
        newest = set(ordered[-self.keep_last :])
        for_good = {step for step in ordered if self.keep_every is not None and step % self.keep_every == 0}
        earlier = {max(found) for one in self.before if (found := [step for step in ordered if step < one])}
        return [step for step in ordered if step not in newest | for_good | earlier]


def is_copied(step: int, every_steps: int, last_step: int) -> bool:
    """True if a saved ``step`` is copied to a store that takes those divisible by ``every_steps`` (0: all); the run's last one always is."""
    return every_steps == 0 or step % every_steps == 0 or step == last_step
