"""Ranking of layouts: memory that a plan leaves free, and the Pareto front.

A layout that fits by less than the error of the prediction may run out of memory on the first step, after the machines were paid for.
If a layout with more room costs almost nothing more, it is chosen instead; if none does, the plan has a caveat.

No layout of the front is beaten by another in time, memory and accelerators at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from phalanx_plan.workload.candidates import Floats, Ints, PlannedLayout

# Free memory, and the error of the predicted memory.


LEAST_ROOM = 0.04
"""Share of an accelerator's memory that a plan should leave free. It exceeds the median error of predicted memory, 2.8 % over the published
runs whose source defines the measurement (``docs/evidence/planner-accuracy.md``).
"""
NO_ROOM = 0.006
"""Free share below which a plan is not safe to run: the median error of the software whose memory is predicted best (torchtitan)."""
_FOR_ROOM = 0.03
"""Highest cost of room, as a share of the step and of the objective. The planner's choices are 2.1 % slower than the best measured ones on
average, and 4.2 % for unknown software (``docs/evidence/planner-accuracy.md``), so it cannot distinguish layouts that are closer.
"""


class Predicted(Protocol):
    """Predicted time and memory of a layout; ``Estimate`` implements it."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        ...

    @property
    def memory_bytes(self) -> float:
        """Bytes of the fullest rank."""
        ...

    @property
    def capacity_bytes(self) -> float:
        """Memory of one accelerator."""
        ...


def free_share(prediction: Predicted) -> float:
    """Share of the accelerator's memory that is free on the fullest rank; below zero if the layout does not fit."""
    return 1 - prediction.memory_bytes / prediction.capacity_bytes


Layout = TypeVar("Layout", bound=Predicted)


def with_room_first(ranked: Sequence[Layout], key: Callable[[Layout], float]) -> tuple[Layout, ...]:
    """Return ``ranked``, ascending by ``key``, with the first plan with room in memory moved to the front.

    Only if its step and key are at most the share ``_FOR_ROOM`` above the best's; else unchanged.
    """
    best, most = ranked[0], 1 + _FOR_ROOM
    for index, candidate in enumerate(ranked):
        near = key(candidate) <= most * key(best) and candidate.step_s <= most * best.step_s
        if near and free_share(candidate) >= LEAST_ROOM:
            return (candidate, *ranked[:index], *ranked[index + 1 :])
    return tuple(ranked)


# The Pareto front.


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
    """The Pareto front of time, memory and accelerators, with memory in steps."""

    def __init__(self, capacity: float) -> None:
        """Begin an empty front, with memory up to ``capacity`` in ``_FRONT_STEPS`` steps."""
        self.step = capacity / _FRONT_STEPS
        self.best: dict[int, Floats] = {}
        """Number of accelerators -> least seconds within each number of memory steps, shape (steps + 1,)."""
        self.members: dict[tuple[int, int], tuple[float, float, int]] = {}

    def add(self, first: int, alive: Ints, seconds: Floats, bytes_: Floats, ranks: Ints) -> None:
        """Add a chunk whose first geometry is number ``first``. ``alive`` are its geometries with a fitting layout.

        ``seconds``, shape (choices, alive), and ``ranks``, shape (alive,), are of these; ``bytes_``, shape (choices,
        geometries), of all. Keeps, for each number of ranks, those quicker than all before that take no more memory;
        memory counts in ``_FRONT_STEPS`` steps.
        """
        choices = len(seconds)
        quickest, least = seconds.min(axis=0), self._steps(bytes_.min(axis=0)[alive])
        for count in sorted(set(ranks.tolist())):
            best = self.best.setdefault(count, np.full(_FRONT_STEPS + 1, np.inf))
            # A layout cannot enter if it is slower than the best with no more memory.
            (rows,) = np.nonzero((ranks == count) & (quickest < best[least]))
            if not len(rows):
                continue
            time, size = seconds[:, rows], bytes_[:, alive[rows]]
            steps = self._steps(size)
            # Among layouts of equal memory only the quickest can enter.
            least_s = best.copy()
            np.minimum.at(least_s, steps.ravel(), time.ravel())
            choice, place = np.nonzero((time < best[steps]) & (time == least_s[steps]))
            time, size, steps = time[choice, place], size[choice, place], steps[choice, place]
            numbers = (first + alive[rows[place]]) * choices + choice
            for candidate in np.lexsort((numbers, time)):
                step = int(steps[candidate])
                if time[candidate] < best[step]:
                    best[step:] = np.minimum(best[step:], time[candidate])
                    self.members[count, step] = (
                        float(time[candidate]),
                        float(size[candidate]),
                        int(numbers[candidate]),
                    )

    def _steps(self, bytes_: Floats) -> Ints:
        """Return the number of whole memory steps in ``bytes_``, at most ``_FRONT_STEPS``."""
        return np.asarray(np.minimum(bytes_ / self.step, _FRONT_STEPS), dtype=np.int64)

    def points(self, layout: Callable[[int], PlannedLayout]) -> tuple[Point, ...]:
        """Return the front, quickest first; ``layout`` maps a number to its layout. Memory is compared exactly here, not in steps."""
        return unbeaten(
            [
                Point(layout(number), time, size, count)
                for (count, _), (time, size, number) in self.members.items()
            ]
        )


def unbeaten(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points that no other point beats in time, memory and ranks at once, quickest first."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.step_s, point.memory_bytes, point.ranks)):
        if not any(other.ranks <= point.ranks and other.memory_bytes <= point.memory_bytes for other in kept):
            kept.append(point)
    return tuple(kept)
