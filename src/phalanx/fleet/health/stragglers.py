"""Detects stragglers, ranks that compute slower than their peers, by robust statistics.

In a synchronous run every step takes as long as its slowest rank, so step time does not show the straggler.
Compute time, without waiting for others, does. In each window a rank's typical compute time is compared with
the median of the ranks that do the same work, in units of their median absolute deviation (a scale that a few
outliers cannot move; Hampel, "The Influence Curve and its Role in Robust Estimation", JASA 1974). One bad
window proves nothing: a rank is named when it stood out in most of the last few.

Pure functions without clock or socket. The caller starts with an empty ``History`` in every epoch, because
ranks may have moved. Ranks may have different numbers of slots: all times are those of one slot, not of a
step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.observe.rank_stream import RankFrame
from phalanx.observe.throughput import MAD_TO_DEVIATION
from phalanx.run.layout import Layout


@dataclass(frozen=True)
class StragglerRule:
    """When a rank counts as a straggler."""

    slowdown: float = 0.05
    """It must be slower than its peers by this fraction, so that replacing it is worth the pause."""
    deviations: float = 4.0
    """It must be slower by this many (robust) standard deviations of its peers: on a noisy machine every rank
    is late at times.
    """
    needed: int = 4
    """It must stand out in this many of the last ``windows`` windows."""
    windows: int = 5
    """The length of the history."""
    least_spread: float = 0.005
    """The least standard deviation, as a fraction: three ranks may be equal by chance."""

    def __post_init__(self) -> None:
        if not 1 <= self.needed <= self.windows:
            raise ValueError(
                f"needed = {self.needed} of windows = {self.windows}: it must be 1 to the number of windows"
            )


@dataclass(frozen=True)
class History:
    """The last windows: for each rank that stood out in any, one bit a window, the newest lowest."""

    flags: tuple[tuple[int, int], ...] = ()
    """(rank, bits), by rank."""


@dataclass(frozen=True)
class Straggler:
    """A slow rank, with the evidence."""

    rank: int
    slowdown: float
    """Its time over its peers' in the last window, less one."""
    deviations: float
    """The same in standard deviations of its peers."""
    windows: int
    """The number of the last windows in which it stood out."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} computes {self.slowdown:.1%} slower than its peers "
            f"({self.deviations:.1f} deviations, in {self.windows} of the last windows)"
        )


def roles(layout: Layout) -> tuple[int, ...]:
    """Return the kind of work of each rank: its pipeline stage, since ranks of one stage do the same work."""
    per_stage = layout.ranks // layout.pipeline
    return tuple(rank // per_stage for rank in range(layout.ranks))


def judge_window(
    history: History,
    times_s: Mapping[int, float],
    roles: Sequence[Hashable],
    rule: StragglerRule,
) -> tuple[History, tuple[Straggler, ...]]:
    """Return the history with one window added, and the stragglers, the slowest first.

    ``times_s`` is by rank its typical computing time; a rank without one is not accused, and leaves the history.
    ``roles`` is by rank its kind of work: only ranks of one role are compared. A straggler stands out now, and in
    ``rule.needed`` of the last ``rule.windows``.
    """
    peers: dict[Hashable, dict[int, float]] = {}
    for rank, time_s in times_s.items():
        peers.setdefault(roles[rank], {})[rank] = time_s
    outstanding = {rank: evidence for group in peers.values() for rank, evidence in _outstanding(group, rule)}
    flags, stragglers = {}, []
    for rank, bits in {**dict.fromkeys(outstanding, 0), **dict(history.flags)}.items():
        bits = (bits << 1 | (rank in outstanding)) & ((1 << rule.windows) - 1)
        if bits and rank in times_s:
            flags[rank] = bits
        if rank in outstanding and bits.bit_count() >= rule.needed:
            stragglers.append(Straggler(rank, *outstanding[rank], bits.bit_count()))
    stragglers.sort(key=lambda straggler: (-straggler.slowdown, straggler.rank))
    return History(tuple(sorted(flags.items()))), tuple(stragglers)


def lateness(
    times_s: NDArray[np.float64], rule: StragglerRule
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how much slower each rank is than its peers: the fraction, and the number of their deviations.

    ``times_s`` is ``(ranks,)``, of at least one rank, all with the same work; both results have its shape.
    """
    # The lower median: of two ranks, the faster one is the measure of the slower one.
    middle = (len(times_s) - 1) // 2
    typical_s = np.partition(times_s, middle)[middle]
    # With two ranks, the deviation is half their difference, so that neither would count as slow.
    off_s = np.median(np.abs(times_s - typical_s)) if len(times_s) > 2 else 0.0
    spread_s = max(MAD_TO_DEVIATION * off_s, rule.least_spread * typical_s)
    return times_s / typical_s - 1, (times_s - typical_s) / spread_s


def _outstanding(
    times_s: Mapping[int, float], rule: StragglerRule
) -> Iterator[tuple[int, tuple[float, float]]]:
    """Yield (rank, (slowdown, deviations)) of the ranks that reach both limits of ``rule``. All have the same
    work.
    """
    ranks = list(times_s)
    slowdown, deviations = lateness(np.fromiter(times_s.values(), np.float64, len(ranks)), rule)
    for place in np.flatnonzero((slowdown >= rule.slowdown) & (deviations >= rule.deviations)):
        yield ranks[place], (float(slowdown[place]), float(deviations[place]))


# Watch for stragglers during a run. All ranks get the same measurements of all ranks
# (``phalanx.train.step.meters``) and reach the same judgment; the straggler reports itself to its agent.


class StragglerWatch:
    """Watches the ranks of one epoch, from one of them.

    Args:
        layout: Of the epoch.
        window_steps: Steps after which the ranks are judged; 0 means never.
    """

    def __init__(self, layout: Layout, window_steps: int) -> None:
        self._roles, self._window_steps, self._rule = roles(layout), window_steps, StragglerRule()
        self._history = History()
        self._times_s: list[NDArray[np.float32]] = []

    def look(self, frame: RankFrame) -> tuple[Straggler, ...]:
        """Add the ranks' computing times of one step. At the end of a window return the stragglers, the same on all
        ranks.

        Empty within a window, or if none is set. A rank without slots is left out.
        """
        if not self._window_steps:
            return ()
        self._times_s.append(frame.columns["compute_s"])
        if frame.step % self._window_steps:
            return ()
        # A rank without slots has no times.
        window_s, self._times_s = np.median(self._times_s, axis=0), []
        times_s = {rank: time_s for rank, time_s in enumerate(window_s.tolist()) if time_s > 0}
        self._history, stragglers = judge_window(self._history, times_s, self._roles, self._rule)
        return stragglers
