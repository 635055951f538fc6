"""The Pareto front of a search: layouts that nothing beats in time, memory and accelerators at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.plan.workload.candidates import Floats, Ints
from phalanx.plan.workload.planned_layout import PlannedLayout

_FRONT_STEPS = 128
"""Steps of memory that the front distinguishes."""


@dataclass(frozen=True)
class Point:
    """A layout on the Pareto front, by the closed form."""

    layout: PlannedLayout
    step_s: float
    memory_bytes: float
    ranks: int


class Front:
    """The layouts that nothing beats in time, memory and accelerators at once, memory in steps."""

    def __init__(self, capacity: float) -> None:
        self.step = capacity / _FRONT_STEPS
        self.best: dict[int, Floats] = {}
        """For each number of accelerators, the least seconds in at most so many steps of memory, shape (steps + 1,)."""
        self.found: dict[tuple[int, int], tuple[float, float, int]] = {}

    def add(self, first: int, alive: Ints, seconds: Floats, bytes_: Floats, ranks: Ints) -> None:
        """Looks at a chunk whose first geometry is number ``first``: ``alive`` are those of which something fits.

        ``seconds``, shape (choices, alive), and ``ranks``, shape (alive,), are of these; ``bytes_``, shape (choices, geometries), of all.
        """
        choices = len(seconds)
        quickest, least = seconds.min(axis=0), self._steps(bytes_.min(axis=0)[alive])
        for count in sorted(set(ranks.tolist())):
            best = self.best.setdefault(count, np.full(_FRONT_STEPS + 1, np.inf))
            # What is slower than the best that has no less memory cannot enter.
            (rows,) = np.nonzero((ranks == count) & (quickest < best[least]))
            if not len(rows):
                continue
            time, size = seconds[:, rows], bytes_[:, alive[rows]]
            steps = self._steps(size)
            # Of equal memory only the quickest can enter.
            least_s = best.copy()
            np.minimum.at(least_s, steps.ravel(), time.ravel())
            choice, place = np.nonzero((time < best[steps]) & (time == least_s[steps]))
            time, size, steps = time[choice, place], size[choice, place], steps[choice, place]
            numbers = (first + alive[rows[place]]) * choices + choice
            for one in np.lexsort((numbers, time)):
                step = int(steps[one])
                if time[one] < best[step]:
                    best[step:] = np.minimum(best[step:], time[one])
                    self.found[count, step] = (float(time[one]), float(size[one]), int(numbers[one]))

    def _steps(self, bytes_: Floats) -> Ints:
        return np.asarray(np.minimum(bytes_ / self.step, _FRONT_STEPS), dtype=np.int64)

    def points(self, layout: Callable[[int], PlannedLayout]) -> tuple[Point, ...]:
        """The front, quickest first; ``layout`` gives a layout by its number."""
        return unbeaten(
            [
                Point(layout(number), time, size, count)
                for (count, _), (time, size, number) in self.found.items()
            ]
        )


def unbeaten(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that no other beats in time, memory and ranks at once, quickest first."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda one: (one.step_s, one.memory_bytes, one.ranks)):
        if not any(one.ranks <= point.ranks and one.memory_bytes <= point.memory_bytes for one in kept):
            kept.append(point)
    return tuple(kept)
