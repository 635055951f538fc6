"""When a run saves, and which of its checkpoints it keeps: pure rules over times and step numbers, without torch.

A save stalls training for ``delta`` seconds. A failure, one in ``M`` seconds on average, loses the work since the last save. Frequent saves
cost more of the first, rare saves more of the second. Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly
2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22.

The newest few checkpoints are kept for restarts, and every n-th step permanently, for inspection or branches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

RANK_HOURS_BETWEEN_FAILURES = 54 * 24 * 16_384 / 419
"""Accelerator hours between unexpected interruptions of a run: 419 in 54 days on 16,384 (Llama 3, arXiv 2407.21783, table 5)."""


def young_interval_s(mtti_s: float, stall_s: float) -> float:
    """Return the interval of Young 1974, "A first order approximation to the optimum checkpoint interval": sqrt(2 delta M)."""
    return math.sqrt(2 * stall_s * mtti_s)


def daly_interval_s(mtti_s: float, stall_s: float) -> float:
    """Return Daly's (2006) interval between checkpoints in seconds: three terms of the optimum's series, or
    ``mtti_s`` if a save stalls for at least twice that.

    ``mtti_s`` is the mean time between failures, ``stall_s`` the time for which a save delays training.
    """
    if stall_s >= 2 * mtti_s:
        return mtti_s
    half = stall_s / (2 * mtti_s)
    return young_interval_s(mtti_s, stall_s) * (1 + math.sqrt(half) / 3 + half / 9) - stall_s


def optimal_interval_s(mtti_s: float, stall_s: float) -> float:
    """Return the interval between checkpoints in seconds with the best goodput, exactly: the root of (1 - x) e^x =
    e^(-delta/M), x = tau/M, with M = ``mtti_s`` and delta = ``stall_s``.

    It does not depend on the recovery time. The root is 1 + W(-e^(-delta/M - 1)) with Lambert's W. Infinite without
    failures, 0 if saving costs nothing.
    """
    if math.isinf(mtti_s):
        return math.inf
    delta = stall_s / mtti_s
    if delta == 0:
        return 0.0
    # x + e^-(x + delta) - 1 is convex and positive at 1: Newton converges monotonically to the root.
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
    """Interval of a run that chooses it automatically, and the time of the next save. One rank has it, and sends its decisions to the others.

    The cost of a save is unknown before the first, so the first step is saved. The decision depends on time only, and no bit of the weights
    depends on it.
    """

    mtti_s: float
    """Mean time between failures of the full run."""
    stall_s: float | None = None
    """Seconds for which the last save stalled training; ``None`` before the first."""
    write_s: float = 0.0
    """Seconds until the last save was durable."""
    saved_at_s: float = 0.0
    """Time of the last save, on the caller's clock."""

    @property
    def seconds(self) -> float:
        """The interval: the optimum, but at least the time until a save is durable; 0 while the cost is unknown."""
        if self.stall_s is None:
            return 0.0
        return max(optimal_interval_s(self.mtti_s, self.stall_s), self.write_s)

    def due(self, now_s: float) -> bool:
        """Return True if a save now loses less than a later one."""
        return now_s - self.saved_at_s >= self.seconds

    def saved(self, now_s: float, stall_s: float) -> None:
        """Record a started save, and for how long it stalled training."""
        self.saved_at_s, self.stall_s = now_s, stall_s

    def failed(self, now_s: float) -> None:
        """Record a failed save: the next is due after a tenth of the interval."""
        self.saved_at_s = now_s - 0.9 * self.seconds

    def written(self, write_s: float) -> None:
        """Record how long a save took to be durable."""
        self.write_s = write_s


@dataclass(frozen=True, slots=True)
class Retention:
    """Rule that keeps the newest ``keep_last`` checkpoints, and permanently every step divisible by ``keep_every``.

    ``before``: for each of these steps the newest earlier checkpoint is kept too, so that a run can return to it.

    Raises ValueError if the rule would keep nothing.
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
        """Return the steps to delete, oldest first: all but the newest ``keep_last``, multiples of ``keep_every``, and
        the last before each of ``before``.
        """
        ordered = sorted(set(steps))
        newest = set(ordered[-self.keep_last :])
        permanent = {step for step in ordered if self.keep_every is not None and step % self.keep_every == 0}
        earlier = {
            max(candidates)
            for limit in self.before
            if (candidates := [step for step in ordered if step < limit])
        }
        return [step for step in ordered if step not in newest | permanent | earlier]


def is_copied(step: int, every_steps: int, last_step: int) -> bool:
    """Return True if ``step`` is copied to a store that takes steps divisible by ``every_steps`` (0: all). The last step always is."""
    return every_steps == 0 or step % every_steps == 0 or step == last_step
