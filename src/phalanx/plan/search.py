"""Looks at every layout: memory first, then time, then the best few by the exact schedule.

The space (``phalanx.plan.space``) is a product of axes, and so is every term of memory and time: each is computed over the few
axes it depends on, a chunk of geometries at a time so that it stays in the processor's cache, and only sums span the whole.
Geometries of which no variant fits are dropped before anything is timed. Nothing is sampled and nothing is guessed: what the
search returns is the best of all layouts by the closed form, re-timed exactly, with a count of what each rule excluded and, for
every family that lost, its best member and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from phalanx.plan.candidates import SCHEDULES, Bools, Candidates, Floats, Ints
from phalanx.plan.estimate import Estimate, Evaluation, estimates, prepare
from phalanx.plan.memory import total
from phalanx.plan.space import Options, excluded, space
from phalanx.plan.stacks import Job

_CHUNK_CELLS = 1 << 17
"""Layouts looked at together: a few arrays of them fit a core's second cache."""
_FRONT_STEPS = 128
"""Steps of memory that the Pareto front distinguishes."""
_CLOSE = 0.05
"""How much worse by the closed form the best of a family may be, to be timed exactly."""
_ROW_FAMILIES = ("tensor", "context", "pipeline", "expert", "micro_batch", "schedule")
_FREE_FAMILIES = ("recompute", "zero", "offload_activations", "offload_optimizer")

Objective = Literal["time", "cost", "gpus"]


@dataclass(frozen=True)
class Point:
    """A layout on the Pareto front, by the closed form."""

    layout: Mapping[str, int]
    step_s: float
    memory_bytes: float
    ranks: int


@dataclass(frozen=True)
class RunnerUp:
    """The best layout of a family that lost, and to what it lost."""

    family: str
    """Such as "tensor=16"."""
    layout: Mapping[str, int]
    reason: str
    slower: float
    """Its step over the winner's, less one; infinite where nothing of the family fits."""


@dataclass(frozen=True)
class SearchResult:
    """What a search found. Layouts are fields of ``Candidates`` by name."""

    best: tuple[Estimate, ...]
    """Ranked by the objective, timed by the exact schedule."""
    front: tuple[Point, ...]
    """None of them is beaten in time, memory and accelerators at once (memory in steps of 1/128 of the capacity)."""
    runners_up: tuple[RunnerUp, ...]
    looked_at: int
    """Layouts of the space, legal or not."""
    valid: int
    """Layouts that are legal and fit."""
    killed: Mapping[str, int]
    """How many layouts each rule excluded that none before it did; "memory" comes last."""


def search(job: Job, options: Options | None = None) -> SearchResult:
    """The best layouts of ``job``. Raises ``ValueError`` if nothing is legal or nothing fits, saying what is in the way."""
    options = options or Options()
    if options.objective not in get_args(Objective):
        raise ValueError(f"objective {options.objective!r}: take one of {', '.join(get_args(Objective))}")
    everything = space(job, options)
    tally = _Tally(
        everything.candidates, options, job.cluster.accelerator.memory_bytes.value, dict(everything.killed)
    )
    for first, evaluation in _chunks(job, everything.candidates):
        tally.add(job, first, evaluation)
    if not tally.valid:
        raise ValueError(_nothing_fits(tally))
    found, runners_up = _decide(job, tally, options)
    return SearchResult(
        best=found[: options.top],
        front=tally.front.points(everything.candidates),
        runners_up=runners_up,
        looked_at=int(np.prod(everything.candidates.shape)) + sum(everything.killed.values()),
        valid=tally.valid,
        killed=tally.killed,
    )


def _chunks(job: Job, candidates: Candidates) -> Iterator[tuple[int, Evaluation]]:
    """Consecutive geometries, each with the index of its first; tables are shared."""
    rows = candidates.shape[0]
    each = max(1, _CHUNK_CELLS // int(np.prod(candidates.shape[1:])))
    whole = prepare(job, candidates)
    for first in range(0, rows, each):
        yield first, whole.rows(slice(first, first + each))


def _nothing_fits(tally: _Tally) -> str:
    least = float(tally.lean.best.min())
    if not np.isfinite(least):
        worst = max(tally.killed, key=lambda name: tally.killed[name])
        return f"no layout is legal: most ({tally.killed[worst]:,}) fail by {worst!r}; change the batch or relax the conditions"
    return (
        f"nothing fits: the leanest layout needs {least / 1e9:.1f} GB of {tally.capacity / 1e9:.1f} GB; take more accelerators, "
        "more memory, offload, or a smaller micro-batch"
    )


class _Best:
    """Running minima of each geometry and of each choice on the free axes, with where they are."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.best = np.full(shape[0], np.inf)
        self.where = np.zeros(shape[0], dtype=np.int64)
        self.free = np.full(int(np.prod(shape[1:])), np.inf)
        self.free_row = np.zeros_like(self.free, dtype=np.int64)

    def add(self, first: int, values: Floats) -> None:
        flat = values.reshape(values.shape[0], -1)
        rows = np.arange(len(flat))
        place = flat.argmin(axis=1)
        self.best[first : first + len(flat)] = flat[rows, place]
        self.where[first : first + len(flat)] = place
        row = flat.argmin(axis=0)
        least = flat[row, np.arange(flat.shape[1])]
        better = least < self.free
        self.free = np.where(better, least, self.free)
        self.free_row = np.where(better, row + first, self.free_row)


@dataclass
class _Tally:
    """What a pass over the space collects."""

    candidates: Candidates
    options: Options
    capacity: float
    killed: dict[str, int]
    valid: int = 0
    quick: _Best = field(init=False)
    """By the objective, of layouts that fit."""
    lean: _Best = field(init=False)
    """By memory, of legal layouts."""
    front: _Front = field(init=False)
    keys: Floats = field(default_factory=lambda: np.zeros(0))
    """Of the best layouts so far by the objective, with their flat indices."""
    indices: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        self.quick, self.lean = _Best(self.candidates.shape), _Best(self.candidates.shape)
        self.front = _Front(self.capacity)

    def add(self, job: Job, first: int, evaluation: Evaluation) -> None:
        """Looks at a chunk whose first geometry is number ``first``."""
        candidates = evaluation.candidates
        shape = candidates.shape
        legal = np.ones((1,) * 4, dtype=bool)
        for reason, mask in excluded(job, candidates, self.options).items():
            self._count(reason, legal & mask, shape)
            legal = legal & ~mask
        bytes_ = np.where(legal, evaluation.most_memory(), np.inf)
        fits = bytes_ <= self.capacity
        self._count("memory", np.isfinite(bytes_) & ~fits, shape)
        self.valid += int(np.count_nonzero(fits))
        self.lean.add(first, bytes_)
        alive: Bools = np.asarray(fits.reshape(len(fits), -1).any(axis=1))
        if not alive.any():
            return
        seconds = np.full(shape, np.inf)
        seconds[alive] = np.where(fits[alive], total(evaluation.rows(alive).time()), np.inf)
        ranks = candidates.ranks
        keys = {"time": seconds, "cost": seconds * ranks, "gpus": seconds + 1e9 * ranks}[
            self.options.objective
        ]
        self.quick.add(first, keys)
        self._rank(first, keys)
        self.front.add(first, seconds, bytes_, np.broadcast_to(ranks, shape))

    def leaders(self) -> list[dict[str, int]]:
        """The best layouts by the objective, in closed form."""
        return [self.candidates.at(int(flat)) for flat in self.indices]

    def _count(self, reason: str, mask: Bools, shape: tuple[int, ...]) -> None:
        cells = int(np.count_nonzero(mask)) * (int(np.prod(shape)) // mask.size)
        self.killed[reason] = self.killed.get(reason, 0) + cells

    def _rank(self, first: int, values: Floats) -> None:
        """Keeps the best by the objective."""
        keys = values.ravel()
        keep = self.options.finalists
        limit = self.keys[-1] if len(self.keys) >= keep else np.inf
        better = np.flatnonzero(keys < limit)
        if not len(better):
            return
        keys = np.concatenate((self.keys, keys[better]))
        indices = np.concatenate((self.indices, better + first * (values.size // len(values))))
        order = np.argsort(keys, kind="stable")[:keep]
        self.keys, self.indices = keys[order], indices[order]


class _Front:
    """The layouts that nothing beats in time, memory and accelerators at once, memory in steps."""

    def __init__(self, capacity: float) -> None:
        self.step = capacity / _FRONT_STEPS
        self.best: dict[int, Floats] = {}
        """By number of accelerators, the least time at most so many steps of memory."""
        self.found: dict[tuple[int, int], tuple[float, float, int]] = {}

    def add(self, first: int, seconds: Floats, bytes_: Floats, ranks: Ints) -> None:
        per_row = seconds.size // len(seconds)
        for count in np.unique(ranks[:, 0, 0, 0]):
            rows = np.flatnonzero(ranks[:, 0, 0, 0] == count)
            best = self.best.setdefault(int(count), np.full(_FRONT_STEPS + 1, np.inf))
            time, size = seconds[rows].ravel(), bytes_[rows].ravel()
            # What is slower than the best of any memory up to here cannot enter.
            hopeful = np.flatnonzero(time < best[0])
            steps = np.minimum(size[hopeful] / self.step, _FRONT_STEPS).astype(np.int64)
            enters = time[hopeful] < best[steps]
            hopeful, steps = hopeful[enters], steps[enters]
            for place in np.argsort(time[hopeful], kind="stable"):
                step, cell = int(steps[place]), int(hopeful[place])
                if time[cell] < best[step]:
                    best[step:] = np.minimum(best[step:], time[cell])
                    row, free = divmod(cell, per_row)
                    flat = (first + int(rows[row])) * per_row + free
                    self.found[int(count), step] = (float(time[cell]), float(size[cell]), flat)

    def points(self, candidates: Candidates) -> tuple[Point, ...]:
        """The front, quickest first."""
        points: list[Point] = []
        for (count, _), (time, size, flat) in sorted(self.found.items(), key=lambda item: item[1]):
            if not any(p.ranks <= count and p.memory_bytes <= size for p in points):
                points.append(Point(candidates.at(flat), time, size, count))
        return tuple(points)


def _decide(job: Job, tally: _Tally, options: Options) -> tuple[tuple[Estimate, ...], tuple[RunnerUp, ...]]:
    """The best layouts by the exact schedule, and of every family that lost the best member.

    Finalists are the best by the closed form, and the best of each family that comes close to them: where closed form and
    schedule disagree, the winner may be among these.
    """
    families = dict(_families(job, tally))
    closed = dict(zip(families, estimates(job, list(families.values()), exact=False), strict=True))
    least = min(_key(found, options.objective) for found in closed.values() if found.fits)
    close = [
        found.layout
        for found in closed.values()
        if found.fits and _key(found, options.objective) <= (1 + _CLOSE) * least
    ]
    chosen = {tuple(layout.items()): layout for layout in (*tally.leaders(), *close)}
    exact = estimates(job, list(chosen.values()))
    found = tuple(sorted(exact, key=lambda each: (_key(each, options.objective), each.step_s)))
    retimed = {tuple(each.layout.items()): each for each in exact}
    winner = found[0]
    same = estimates(job, [winner.layout], exact=False)[0]
    runners = []
    for family, loser in closed.items():
        name, _, value = family.partition("=")
        if value == _label(job, name, winner.layout[name]):
            continue
        # Like is compared with like: by the exact schedule if both were timed by it, else by the closed form.
        again = retimed.get(tuple(loser.layout.items()))
        first, second = (winner, again) if again else (same, loser)
        slower = second.step_s / first.step_s - 1 if second.fits else float("inf")
        runners.append(RunnerUp(family, second.layout, _why(first, second), slower))
    return found, tuple(runners)


def _key(found: Estimate, objective: str) -> float:
    by = {"time": found.step_s, "cost": found.step_s * found.ranks, "gpus": float(found.ranks)}
    return by[objective]


def _families(job: Job, tally: _Tally) -> Iterator[tuple[str, Mapping[str, int]]]:
    """The best layout for each value of each field: by the objective, or where nothing fits by memory."""
    for name in (*_ROW_FAMILIES, *_FREE_FAMILIES):
        for value in np.unique(getattr(tally.candidates, name)):
            flat = _best_of(tally.quick, tally.candidates, name, int(value))
            if flat is None:
                flat = _best_of(tally.lean, tally.candidates, name, int(value))
            if flat is not None:
                yield f"{name}={_label(job, name, int(value))}", tally.candidates.at(flat)


def _label(job: Job, name: str, value: int) -> str:
    if name == "schedule":
        return SCHEDULES[value]
    return job.modes[value].name if name == "recompute" else str(value)


def _best_of(best: _Best, candidates: Candidates, name: str, value: int) -> int | None:
    """The flat index of the best layout with this value of a field, if there is one."""
    per_row = len(best.free)
    column = getattr(candidates, name)
    if name in _ROW_FAMILIES:
        keys = np.where(column.ravel() == value, best.best, np.inf)
        row = int(keys.argmin())
        return row * per_row + int(best.where[row]) if np.isfinite(keys[row]) else None
    mask = np.broadcast_to(column == value, (1, *candidates.shape[1:])).ravel()
    keys = np.where(mask, best.free, np.inf)
    place = int(keys.argmin())
    return int(best.free_row[place]) * per_row + place if np.isfinite(keys[place]) else None


def _why(winner: Estimate, loser: Estimate) -> str:
    """The memory that is not there, or the term that cost the loser most."""
    if not loser.fits:
        return f"{loser.memory_bytes / 1e9:.0f} GB > {loser.capacity_bytes / 1e9:.0f} GB"
    change = {term: loser.time.get(term, 0.0) - seconds for term, seconds in winner.time.items()}
    term = max(change, key=lambda name: change[name])
    return f"{change[term] / winner.step_s:+.1%} {term.replace('_', ' ')}"
