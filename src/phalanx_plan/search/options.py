"""Choice among layouts: limits, objective and conditions of a search, memory that a plan leaves free, and the Pareto front.

A layout that fits by less than the error of the prediction may run out of memory on the first step, after the machines were paid for.
Where another layout with more room costs next to nothing it is taken instead, and where none does the plan says so.

No layout of the front is beaten by another in time, memory and accelerators at once.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from phalanx_plan.workload.candidates import (
    LAYOUT_FIELDS,
    SCHEDULES,
    Bools,
    Candidates,
    Floats,
    Ints,
    PlannedLayout,
    layout_field,
)
from phalanx_plan.workload.stacks import Job

# Options.


_OPERATORS: dict[str, Callable[[Ints, int], Bools]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}


@dataclass(frozen=True)
class Requirement:
    """A condition of the user's on one field: "tp<=8"."""

    text: str
    name: str
    compare: Callable[[Ints, int], Bools]
    value: int

    def holds(self, candidates: Candidates) -> Bools:
        """Returns the mask of the candidates that meet it, in the axes that its field has."""
        return self.compare(getattr(candidates, self.name), self.value)


def requirement(text: str, job: Job) -> Requirement:
    """Reads a condition. Raises ``ValueError`` that names what can be required."""
    match = re.fullmatch(r"\s*(\w+)\s*(<=|>=|!=|==|=|<|>)\s*([\w+-]+)\s*", text)
    if match is None:
        several = (
            "; of several conditions, each has a --require of its own"
            if len(re.findall("[<>=]=?", text)) > 1
            else ""
        )
        raise ValueError(
            f"{text!r} is no condition: write a field, a comparison and a value, as in tp<=8{several}"
        )
    word, sign, value = match.groups()
    known = layout_field(word)
    if known is not None and known.not_in_require:
        raise ValueError(f"{text!r}: {known.shown} cannot be required: {known.not_in_require}")
    words = {"schedule": SCHEDULES, "recompute": tuple(mode.name for mode in job.modes)}
    if known is not None and known.name in words:
        if value not in words[known.name] or sign not in ("=", "==", "!="):
            raise ValueError(f"{text!r}: {word} is one of {', '.join(words[known.name])}, with = or !=")
        return Requirement(text, known.name, _OPERATORS[sign], words[known.name].index(value))
    if known is None or not (value.isascii() and value.isdigit()):
        names = ", ".join(field.shown for field in LAYOUT_FIELDS if not field.not_in_require)
        raise ValueError(f"{text!r}: a whole number can be required of {names}")
    return Requirement(text, known.name, _OPERATORS[sign], int(value))


@dataclass(frozen=True)
class Options:
    """Limits and objective of a search. Empty tuples mean all that is legal."""

    gpus: tuple[int, ...] = ()
    """Numbers of accelerators to plan for; empty means all of the cluster's."""
    least_use: float = 0.9
    """Fraction of the accelerators that a layout must use; the rest are spares."""
    micro_batches: tuple[int, ...] = ()
    stages_per_rank: tuple[int, ...] = ()
    """Stages on each rank that interleaved schedules are tried with."""
    precision: str = "bf16"
    offload: bool = True
    require: tuple[str, ...] = ()
    objective: str = "time"
    """Rank by seconds of a step ("time"), accelerator-hours of a step ("cost"), or accelerators ("gpus")."""
    top: int = 10
    finalists: int = 16
    """Number of layouts that are timed by the exact schedule, of which the best ``top`` are returned."""


def is_required(options: Options, name: str) -> bool:
    """True if a condition is on the field ``name``."""
    words = {re.split(r"[<>=!]", text)[0].strip() for text in options.require}
    return any(known is not None and known.name == name for known in map(layout_field, words))


_MOST_SHOWN = 24


def nothing_left(need: Requirement, before: list[Requirement], candidates: Candidates, job: Job) -> str:
    """The message that no layout meets a condition, with the values that its field has in those that met the conditions before."""
    values = np.unique(getattr(candidates, need.name)).tolist()
    words = {"schedule": SCHEDULES, "recompute": tuple(mode.name for mode in job.modes)}.get(need.name)
    shown = [str(words[value]) if words else f"{value:,}" for value in values]
    if len(shown) > _MOST_SHOWN:
        shown = [*shown[: _MOST_SHOWN // 2], "...", *shown[-_MOST_SHOWN // 2 :]]
    given = f", together with {', '.join(one.text for one in before)}," if before else ""
    return f"the condition {need.text}{given} leaves no layout: relax it; what is left has {', '.join(shown)}"


# Free memory, beside the error of the predicted memory.


LEAST_ROOM = 0.04
"""Share of an accelerator's memory that a plan should leave free: more than the median error of predicted memory over the published runs
whose source says what it measured, which is 2.8 % (``docs/evidence/planner-accuracy.md``)."""
NO_ROOM = 0.006
"""Share below which nobody should go on as planned: the median error of the software whose memory is predicted best (torchtitan)."""
_FOR_ROOM = 0.03
"""The most that room may cost, as a share of the step and of what the search minimizes: the planner's choices are 2.1 % slower than
the best measured ones on average, and 4.2 % where it knows nothing of the software (``docs/evidence/planner-accuracy.md``), so what is as close cannot be
told apart."""


class Predicted(Protocol):
    """A layout's prediction, as far as a choice needs it: an ``Estimate`` is one."""

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


def free_share(found: Predicted) -> float:
    """Share of the accelerator's memory that the fullest rank leaves free; below zero where the layout does not fit."""
    return 1 - found.memory_bytes / found.capacity_bytes


Layout = TypeVar("Layout", bound=Predicted)


def with_room_first(ranked: Sequence[Layout], key: Callable[[Layout], float]) -> tuple[Layout, ...]:
    """The plans of ``ranked``, ascending by ``key``; but one with room goes first if step and key are at most 3 % above the best's."""
    best, most = ranked[0], 1 + _FOR_ROOM
    for place, found in enumerate(ranked):
        near = key(found) <= most * key(best) and found.step_s <= most * best.step_s
        if near and free_share(found) >= LEAST_ROOM:
            return (found, *ranked[:place], *ranked[place + 1 :])
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
