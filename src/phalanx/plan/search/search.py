"""Looks at every layout: memory first, then time, then the best few by the exact schedule.

The space (``phalanx.plan.search.space``) is a product of axes, and so is every term of memory and time: each is computed over the few
axes it depends on, a chunk of geometries at a time so that it stays in the processor's cache, and only sums span the whole.
Arrays lie along the geometries, so that the innermost loops are long.
Geometries of which no variant fits are dropped before anything is timed. Nothing is sampled and nothing is guessed: what the
search returns is the best of all layouts by the closed form, re-timed exactly, with a count of what each rule excluded and, for
every family that lost, its best member and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from phalanx.plan.search.space import AXES, Options, exclusions, space
from phalanx.plan.step_cost.estimate import Estimate, Evaluation, estimated, prepare
from phalanx.plan.workload.candidates import SCHEDULES, Bools, Candidates, Floats, Ints
from phalanx.plan.workload.planned_layout import PlannedLayout
from phalanx.plan.workload.stacks import Job

_CHUNK_CELLS = 1 << 18
"""Layouts looked at together: an array of them fits a core's second cache."""
_FRONT_STEPS = 128
"""Steps of memory that the Pareto front distinguishes."""
_CLOSE = 0.05
"""Relative distance from the quickest, by the closed form, within which the best of a family is timed exactly."""
_ROW_FAMILIES = ("tensor", "context", "pipeline", "expert", "micro_batch", "schedule")
_FREE_FAMILIES = ("recompute", "zero", "offload_activations", "offload_optimizer")

Objective = Literal["time", "cost", "gpus"]


class NothingFitsError(ValueError):
    """Layouts are legal, but none of them fits an accelerator's memory."""

    def __init__(self, needed_bytes: float, capacity_bytes: float) -> None:
        self.needed_bytes = needed_bytes
        """Bytes on the worst rank of the legal layout that needs least."""
        self.capacity_bytes = capacity_bytes
        """Memory of one accelerator."""
        super().__init__(
            f"nothing fits: the leanest layout needs {needed_bytes / 1e9:.1f} GB of {capacity_bytes / 1e9:.1f} GB; take more "
            "accelerators, more memory, offload, or a smaller micro-batch"
        )


@dataclass(frozen=True)
class Point:
    """A layout on the Pareto front, by the closed form."""

    layout: PlannedLayout
    step_s: float
    memory_bytes: float
    ranks: int


@dataclass(frozen=True)
class RunnerUp:
    """The best layout of a family that lost, and to what it lost."""

    family: str
    """The field and value that its layouts share, such as "tensor=16"."""
    layout: PlannedLayout
    reason: str
    slower: float
    """Its step over the winner's, less one; infinite where nothing of the family fits."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: the ranked layouts, the Pareto front, the families that lost, and counts."""

    best: tuple[Estimate, ...]
    """Ranked by the objective, timed by the exact schedule."""
    front: tuple[Point, ...]
    """The Pareto front: none is beaten in time, memory and accelerators at once (memory in steps of 1/128 of the capacity)."""
    runners_up: tuple[RunnerUp, ...]
    looked_at: int
    """Layouts of the space, legal or not."""
    valid: int
    """Layouts that are legal and fit."""
    excluded: Mapping[str, int]
    """Number of layouts that each rule was the first to exclude; "memory" comes last."""


def search(job: Job, options: Options | None = None) -> SearchResult:
    """The best layouts of ``job``.

    Raises ``NothingFitsError`` if no legal layout fits, another ``ValueError`` if none is legal; both say what is in the way.
    """
    options = options or Options()
    if options.objective not in get_args(Objective):
        raise ValueError(f"objective {options.objective!r}: take one of {', '.join(get_args(Objective))}")
    everything = space(job, options)
    tally = _Tally(prepare(job, everything.candidates), options, dict(everything.excluded))
    for first, evaluation in _chunks(tally.whole):
        tally.add(first, evaluation)
    if not tally.valid:
        raise _failure(tally)
    found, runners_up = _decide(job, tally, options)
    return SearchResult(
        best=found[: options.top],
        front=tally.front.points(tally.layout),
        runners_up=runners_up,
        looked_at=int(np.prod(everything.candidates.shape)) + sum(everything.excluded.values()),
        valid=tally.valid,
        excluded=tally.excluded,
    )


def _chunks(whole: Evaluation) -> Iterator[tuple[int, Evaluation]]:
    """Consecutive geometries, each with the index of its first; tables are shared."""
    shape = whole.candidates.shape
    each = max(1, _CHUNK_CELLS // int(np.prod(shape[:-1])))
    for first in range(0, shape[-1], each):
        yield first, whole.rows(slice(first, first + each))


def _failure(tally: _Tally) -> ValueError:
    """The error of a search that found no layout: nothing is legal, or nothing fits."""
    needed_bytes = float(tally.lean.of_row.min())
    if np.isfinite(needed_bytes):
        return NothingFitsError(needed_bytes, tally.whole.job.cluster.accelerator.memory_bytes.value)
    worst = max(tally.excluded, key=lambda name: tally.excluded[name])
    return ValueError(
        f"no layout is legal: most ({tally.excluded[worst]:,}) fail by {worst!r}; change the batch or relax the conditions"
    )


@dataclass(frozen=True)
class _Look:
    """Memory and time of a chunk of geometries, shape (choices on the free axes, geometries)."""

    bytes: Floats
    """Infinite where a choice is not legal."""
    alive: Ints
    """Geometries of which a choice fits; what follows is of these."""
    seconds: Floats
    """Infinite where a choice does not fit."""
    key: Floats
    """The ranking key: seconds, accelerator-seconds, or seconds after the number of accelerators."""
    valid: int
    """Layouts that are legal and fit."""


def _look(evaluation: Evaluation, options: Options, excluded: dict[str, int]) -> _Look:
    """Memory of all, and time of what fits. Adds to ``excluded`` how many layouts each rule excludes."""
    job, candidates = evaluation.job, evaluation.candidates
    shape = candidates.shape

    def count(reason: str, mask: Bools) -> None:
        cells = int(np.count_nonzero(mask)) * (int(np.prod(shape)) // mask.size)
        excluded[reason] = excluded.get(reason, 0) + cells

    legal = np.ones((1,) * AXES, dtype=bool)
    for reason, mask in exclusions(job, candidates, options).items():
        count(reason, legal & mask)
        legal = legal & ~mask
    most = evaluation.most_memory(np.where(legal, 0.0, np.inf))
    bytes_ = np.broadcast_to(most, shape).reshape(-1, shape[-1])
    fits = bytes_ <= job.cluster.accelerator.memory_bytes.value
    valid = int(np.count_nonzero(fits))
    count("memory", legal)
    excluded["memory"] -= valid
    (alive,) = np.nonzero(fits.any(axis=0))
    seconds, ranks = np.zeros((len(fits), 0)), candidates.ranks.ravel()[alive]
    if len(alive):
        found = np.broadcast_to(evaluation.rows(alive).seconds(), (*shape[:-1], len(alive)))
        seconds = np.where(fits.take(alive, axis=1), found.reshape(len(fits), -1), np.inf)
    key = {"time": seconds, "cost": seconds * ranks, "gpus": seconds + 1e9 * ranks}[options.objective]
    return _Look(bytes_, alive, seconds, key, valid)


class _Best:
    """Running minima of each geometry, and of each choice on the free axes with the geometry."""

    def __init__(self, choices: int, rows: int) -> None:
        self.of_row = np.full(rows, np.inf)
        self.of_choice = np.full(choices, np.inf)
        self.row = np.zeros(choices, dtype=np.int64)

    def add(self, rows: Ints, values: Floats) -> None:
        self.of_row[rows] = values.min(axis=0)
        place = values.argmin(axis=1)
        least = values[np.arange(len(values)), place]
        better = least < self.of_choice
        self.of_choice = np.where(better, least, self.of_choice)
        self.row = np.where(better, rows[place], self.row)


@dataclass
class _Tally:
    """The running result of a pass over the space. A layout's number is ``geometry x choices + choice``."""

    whole: Evaluation
    options: Options
    excluded: dict[str, int]
    valid: int = 0
    quick: _Best = field(init=False)
    """Least ranking keys of layouts that fit."""
    lean: _Best = field(init=False)
    """Least memory of legal layouts."""
    front: _Front = field(init=False)
    keys: Floats = field(default_factory=lambda: np.zeros(0))
    """Ranking keys of the best layouts so far, ascending; ``numbers`` are these layouts."""
    numbers: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        *choices, rows = self.whole.candidates.shape
        self.choices = int(np.prod(choices))
        self.quick, self.lean = _Best(self.choices, rows), _Best(self.choices, rows)
        self.front = _Front(self.whole.job.cluster.accelerator.memory_bytes.value)

    def add(self, first: int, evaluation: Evaluation) -> None:
        """Looks at a chunk whose first geometry is number ``first``."""
        look = _look(evaluation, self.options, self.excluded)
        self.valid += look.valid
        self.lean.add(first + np.arange(look.bytes.shape[1]), look.bytes)
        if look.valid:
            self.quick.add(first + look.alive, look.key)
            self._rank(first + look.alive, look.key)
            self.front.add(first, look, evaluation.candidates.ranks.ravel()[look.alive])

    def choices_of(self, rows: list[int]) -> dict[int, int]:
        """The best choice on the free axes for some geometries: by the objective, or where nothing fits by memory."""
        if not rows:
            return {}
        look = _look(self.whole.rows(np.array(rows)), self.options, {})
        best = look.bytes.argmin(axis=0)
        if look.valid:
            best[look.alive] = look.key.argmin(axis=0)
        return dict(zip(rows, best.tolist(), strict=True))

    def layout(self, number: int) -> PlannedLayout:
        """The layout with this number."""
        row, choice = divmod(number, self.choices)
        candidates = self.whole.candidates
        return candidates.at(choice * candidates.shape[-1] + row, self.whole.job.modes)

    def _rank(self, rows: Ints, values: Floats) -> None:
        """Keeps the best by the objective, among equals the first."""
        keep = self.options.finalists
        limit = self.keys[-1] if len(self.keys) >= keep else np.inf
        quickest = self.quick.of_row[rows]
        if len(rows) > keep:
            limit = min(limit, np.partition(quickest, keep - 1)[keep - 1])
        (hopeful,) = np.nonzero(quickest <= limit)
        choice, place = np.nonzero((values[:, hopeful] <= limit) & np.isfinite(values[:, hopeful]))
        keys = np.concatenate((self.keys, values[choice, hopeful[place]]))
        numbers = np.concatenate((self.numbers, rows[hopeful[place]] * self.choices + choice))
        order = np.lexsort((numbers, keys))[:keep]
        self.keys, self.numbers = keys[order], numbers[order]


class _Front:
    """The layouts that nothing beats in time, memory and accelerators at once, memory in steps."""

    def __init__(self, capacity: float) -> None:
        self.step = capacity / _FRONT_STEPS
        self.best: dict[int, Floats] = {}
        """For each number of accelerators, the least seconds in at most so many steps of memory, shape (steps + 1,)."""
        self.found: dict[tuple[int, int], tuple[float, float, int]] = {}

    def add(self, first: int, look: _Look, ranks: Ints) -> None:
        """Looks at a chunk whose first geometry is number ``first``; ``ranks`` are those of each that is alive."""
        choices = len(look.seconds)
        quickest, least = look.seconds.min(axis=0), self._steps(look.bytes.min(axis=0)[look.alive])
        for count in sorted(set(ranks.tolist())):
            best = self.best.setdefault(count, np.full(_FRONT_STEPS + 1, np.inf))
            # What is slower than the best that has no less memory cannot enter.
            (rows,) = np.nonzero((ranks == count) & (quickest < best[least]))
            if not len(rows):
                continue
            time, size = look.seconds[:, rows], look.bytes[:, look.alive[rows]]
            steps = self._steps(size)
            # Of equal memory only the quickest can enter.
            least_s = best.copy()
            np.minimum.at(least_s, steps.ravel(), time.ravel())
            choice, place = np.nonzero((time < best[steps]) & (time == least_s[steps]))
            time, size, steps = time[choice, place], size[choice, place], steps[choice, place]
            numbers = (first + look.alive[rows[place]]) * choices + choice
            for one in np.lexsort((numbers, time)):
                step = int(steps[one])
                if time[one] < best[step]:
                    best[step:] = np.minimum(best[step:], time[one])
                    self.found[count, step] = (float(time[one]), float(size[one]), int(numbers[one]))

    def _steps(self, bytes_: Floats) -> Ints:
        return np.asarray(np.minimum(bytes_ / self.step, _FRONT_STEPS), dtype=np.int64)

    def points(self, layout: Callable[[int], PlannedLayout]) -> tuple[Point, ...]:
        """The front, quickest first; ``layout`` gives a layout by its number."""
        points: list[Point] = []
        for (count, _), (time, size, number) in sorted(self.found.items(), key=lambda item: item[1]):
            if not any(p.ranks <= count and p.memory_bytes <= size for p in points):
                points.append(Point(layout(number), time, size, count))
        return tuple(points)


def _decide(job: Job, tally: _Tally, options: Options) -> tuple[tuple[Estimate, ...], tuple[RunnerUp, ...]]:
    """The best layouts by the exact schedule, and of every family that lost the best member.

    Finalists are the best by the closed form, and the best of each family that comes close to them: where closed form and
    schedule disagree, the winner may be among these.
    """
    families, leaders = _families(job, tally), tally.numbers.tolist()
    numbers = list(dict.fromkeys((*leaders, *families.values())))
    layouts = [tally.layout(number) for number in numbers]
    evaluation = tally.whole.layouts(np.array(numbers) // tally.choices, layouts)
    closed = dict(zip(numbers, estimated(evaluation, layouts, exact=False), strict=True))
    fitting = {
        number: _key(closed[number], options.objective) for number in families.values() if closed[number].fits
    }
    least = min(fitting.values())
    close = [number for number, key in fitting.items() if key <= (1 + _CLOSE) * least]
    chosen = {number: numbers.index(number) for number in (*leaders, *close)}
    places = list(chosen.values())
    finalists = estimated(evaluation.rows(np.array(places)), [layouts[place] for place in places], exact=True)
    exact = dict(zip(chosen, finalists, strict=True))
    ranked = sorted(exact, key=lambda number: (_key(exact[number], options.objective), exact[number].step_s))
    winner, same = exact[ranked[0]], closed[ranked[0]]
    runners = []
    for family, number in families.items():
        name, _, value = family.partition("=")
        if value == _value_text(getattr(winner.layout, name)):
            continue
        # Like is compared with like: by the exact schedule if both were timed by it, else by the closed form.
        first, second = (winner, exact[number]) if number in exact else (same, closed[number])
        slower = second.step_s / first.step_s - 1 if second.fits else float("inf")
        runners.append(RunnerUp(family, second.layout, _why(first, second), slower))
    return tuple(exact[number] for number in ranked), tuple(runners)


def _key(found: Estimate, objective: str) -> float:
    by = {"time": found.step_s, "cost": found.step_s * found.ranks, "gpus": float(found.ranks)}
    return by[objective]


def _families(job: Job, tally: _Tally) -> dict[str, int]:
    """The number of the best layout for each value of each field: by the objective, or where nothing fits by memory."""
    best = {}
    candidates = tally.whole.candidates
    for name in (*_ROW_FAMILIES, *_FREE_FAMILIES):
        for value in np.flatnonzero(np.bincount(getattr(candidates, name).ravel())).tolist():
            found = _best_of(tally.quick, candidates, name, value)
            found = found or _best_of(tally.lean, candidates, name, value)
            if found is not None:
                best[f"{name}={_label(job, name, value)}"] = found
    choices = tally.choices_of(sorted({row for row, choice in best.values() if choice is None}))
    return {
        family: row * tally.choices + (choices[row] if choice is None else choice)
        for family, (row, choice) in best.items()
    }


def _label(job: Job, name: str, value: int) -> str:
    """The value of a family's field by its code."""
    if name == "schedule":
        return SCHEDULES[value]
    return job.modes[value].name if name == "recompute" else str(value)


def _value_text(value: int | str) -> str:
    return value if isinstance(value, str) else str(int(value))


def _best_of(best: _Best, candidates: Candidates, name: str, value: int) -> tuple[int, int | None] | None:
    """Geometry and choice of the best layout with this value of a field; the choice is open where the field is the geometry's."""
    mine = getattr(candidates, name) == value
    if name in _ROW_FAMILIES:
        keys = np.where(mine.ravel(), best.of_row, np.inf)
        row = int(keys.argmin())
        return (row, None) if np.isfinite(keys[row]) else None
    mine = np.broadcast_to(mine, (*candidates.shape[:-1], 1)).ravel()
    keys = np.where(mine, best.of_choice, np.inf)
    choice = int(keys.argmin())
    return (int(best.row[choice]), choice) if np.isfinite(keys[choice]) else None


def _why(winner: Estimate, loser: Estimate) -> str:
    """The memory that is not there, or the term that cost the loser most."""
    if not loser.fits:
        return f"{loser.memory_bytes / 1e9:.0f} GB > {loser.capacity_bytes / 1e9:.0f} GB"
    change = {term: loser.time.get(term, 0.0) - seconds for term, seconds in winner.time.items()}
    term = max(change, key=lambda name: change[name])
    return f"{change[term] / winner.step_s:+.1%} {term.replace('_', ' ')}"
