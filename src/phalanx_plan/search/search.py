"""Looks at every layout: memory first, then time, then the best few by the exact schedule.

The space (``phalanx_plan.search.space``) is a product of axes, and so is every term of memory and time: each is computed over the few
axes it depends on, a chunk of geometries at a time so that it stays in the processor's cache, and only sums span the whole.
Arrays lie along the geometries, so that the innermost loops are long.
Geometries of which no variant fits are dropped before anything is timed. Nothing is sampled and nothing is guessed: what the
search returns is the best of all layouts by the closed form, re-timed exactly, with a count of what each rule excluded and, for
every family that lost, its best member and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from phalanx_plan.search.options import (
    LEAST_ROOM,
    Front,
    Options,
    Point,
    free_share,
    unbeaten,
    with_room_first,
)
from phalanx_plan.search.space import AXES, exclusions, finer_space, space
from phalanx_plan.step_cost.estimate import Estimate, Evaluation, estimated, prepare
from phalanx_plan.workload.candidates import (
    SCHEDULES,
    Bools,
    Candidates,
    Floats,
    Ints,
    PlannedLayout,
    candidates_of,
)
from phalanx_plan.workload.stacks import Job

_CHUNK_CELLS = 1 << 18
"""Layouts looked at together: an array of them fits a core's second cache."""
_CLOSE = 0.05
"""Relative distance from the quickest, by the closed form, within which the best of a family is timed exactly."""
_NEAR = 0.15
"""Relative distance from the best, by the closed form, within which a geometry is tried with every micro-batch and number of stages: what
lies between two sizes that were tried gains less than this."""
_MOST_NEAR = 4096
_LARGE = 8
"""Sequences of a micro-batch from which a geometry's least memory is looked at before its choices: most do not fit at all."""
_ROW_FAMILIES = ("tensor", "context", "pipeline", "expert", "micro_batch", "schedule")
_FREE_FAMILIES = ("recompute", "zero", "offload_activations", "offload_optimizer")
FAMILIES = (*_ROW_FAMILIES, *_FREE_FAMILIES)
"""Fields of a layout of which each value makes a family."""

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
    roomy: Estimate | None
    """The best by the objective that leaves room in memory (``phalanx_plan.search.options``)."""
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
    excluded = dict(everything.excluded)
    whole = prepare(job, everything.candidates).with_lasting()
    hopeful = _not_hopeless(whole, excluded)
    # Where nothing is left, all are looked at for the one that needs least.
    some = hopeful.candidates.shape[-1] > 0
    tally = _tallied(hopeful if some else whole, options, excluded if some else dict(everything.excluded))
    if not tally.valid:
        raise _failure(tally)
    tallies, looked_at = (
        [tally],
        int(np.prod(everything.candidates.shape)) + sum(everything.excluded.values()),
    )
    finer = finer_space(job, options, _near(tally))
    if finer is not None:
        looked_at += int(np.prod(finer.shape))
        near = _not_hopeless(prepare(job, finer).with_lasting(), excluded)
        if near.candidates.shape[-1]:
            tallies.append(_tallied(near, options, excluded))
    front = unbeaten([point for each in tallies for point in each.front.points(each.layout)])
    found, runners_up = _decide(job, tallies, options, front)
    return SearchResult(
        best=found[: options.top],
        front=front,
        runners_up=runners_up,
        roomy=next((one for one in found if free_share(one) >= LEAST_ROOM), None),
        looked_at=looked_at,
        valid=sum(each.valid for each in tallies),
        excluded=tally.excluded,
    )


def _tallied(whole: Evaluation, options: Options, excluded: dict[str, int]) -> _Tally:
    """All candidates of ``whole``, looked at chunk by chunk; adds to ``excluded``."""
    tally = _Tally(whole, options, excluded)
    for first, evaluation in _chunks(whole):
        tally.add(first, evaluation)
    return tally


def _not_hopeless(whole: Evaluation, excluded: dict[str, int]) -> Evaluation:
    """Without geometries of large micro-batches that do not fit whatever is recomputed, sharded and offloaded; these are counted."""
    sizes = whole.candidates.micro_batch.ravel()
    (large,) = np.nonzero(sizes >= _LARGE)
    if not len(large):
        return whole
    most = [evaluation.most_memory().ravel() for _, evaluation in _chunks(whole.rows(large).leanest())]
    hopeless = np.zeros(len(sizes), dtype=bool)
    hopeless[large] = np.concatenate(most) > whole.job.cluster.accelerator.memory_bytes.value
    each = int(np.prod(whole.candidates.shape[:-1]))
    excluded["memory"] = excluded.get("memory", 0) + each * int(np.count_nonzero(hopeless))
    return whole.rows(np.flatnonzero(~hopeless))


def _near(tally: _Tally) -> Candidates:
    """The geometries that come near the best, best first: what other sizes of a micro-batch could make the best."""
    keys = tally.quick.of_row
    order = np.argsort(keys, kind="stable")[:_MOST_NEAR]
    return tally.whole.candidates.rows(order[keys[order] <= (1 + _NEAR) * keys[order[0]]])


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
    front: Front = field(init=False)
    keys: Floats = field(default_factory=lambda: np.zeros(0))
    """Ranking keys of the best layouts so far, ascending; ``numbers`` are these layouts."""
    numbers: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        *choices, rows = self.whole.candidates.shape
        self.choices = int(np.prod(choices))
        self.quick, self.lean = _Best(self.choices, rows), _Best(self.choices, rows)
        self.front = Front(self.whole.job.cluster.accelerator.memory_bytes.value)

    def add(self, first: int, evaluation: Evaluation) -> None:
        """Looks at a chunk whose first geometry is number ``first``."""
        look = _look(evaluation, self.options, self.excluded)
        self.valid += look.valid
        self.lean.add(first + np.arange(look.bytes.shape[1]), look.bytes)
        if look.valid:
            self.quick.add(first + look.alive, look.key)
            self._rank(first + look.alive, look.key)
            ranks = evaluation.candidates.ranks.ravel()[look.alive]
            self.front.add(first, look.alive, look.seconds, look.bytes, ranks)

    def leaders(self) -> Iterator[tuple[float, int]]:
        """Ranking keys and numbers of the best layouts, best first."""
        return zip(self.keys.tolist(), self.numbers.tolist(), strict=True)

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


def _decide(
    job: Job, tallies: Sequence[_Tally], options: Options, front: Sequence[Point]
) -> tuple[tuple[Estimate, ...], tuple[RunnerUp, ...]]:
    """The best layouts by the exact schedule, and of every family that lost the best member.

    Finalists are the best by the closed form, the best with room in memory, and the best of each family that comes close to them:
    where closed form and schedule disagree, the winner may be among these.
    """
    hopeful = sorted(
        (key, place, number) for place, tally in enumerate(tallies) for key, number in tally.leaders()
    )
    leaders = [tallies[place].layout(number) for _, place, number in hopeful[: options.finalists]]
    most_bytes = (1 - LEAST_ROOM) * job.cluster.accelerator.memory_bytes.value
    roomy = [point for point in front if point.memory_bytes <= most_bytes]
    if roomy:
        leaders.append(
            min(roomy, key=lambda point: (ranking_key(point, options.objective), point.step_s)).layout
        )
    members: dict[str, list[PlannedLayout]] = {
        family: [tallies[0].layout(number)] for family, number in _families(job, tallies[0]).items()
    }
    for tally in tallies[1:]:
        for family, number in _families(job, tally).items():
            if family in members:  # the many other sizes of a micro-batch are no families of their own
                members[family].append(tally.layout(number))
    layouts = list(dict.fromkeys((*leaders, *(one for some in members.values() for one in some))))
    evaluation = prepare(job, candidates_of(layouts, job.modes))
    closed = dict(zip(layouts, estimated(evaluation, layouts, exact=False), strict=True))

    def rank(layout: PlannedLayout) -> tuple[bool, float]:
        found = closed[layout]
        return not found.fits, ranking_key(found, options.objective) if found.fits else found.memory_bytes

    families = {family: min(some, key=rank) for family, some in members.items()}
    fitting = {
        layout: ranking_key(closed[layout], options.objective)
        for layout in families.values()
        if closed[layout].fits
    }
    least = min(fitting.values())
    close = [layout for layout, key in fitting.items() if key <= (1 + _CLOSE) * least]
    chosen = list(dict.fromkeys((*leaders, *close)))
    places = np.array([layouts.index(layout) for layout in chosen])
    exact = dict(zip(chosen, estimated(evaluation.rows(places), chosen, exact=True), strict=True))
    by_key = sorted(exact.values(), key=lambda found: (ranking_key(found, options.objective), found.step_s))
    ranked = with_room_first(by_key, lambda found: ranking_key(found, options.objective))
    winner, same = ranked[0], closed[ranked[0].layout]
    runners = []
    for family, layout in families.items():
        name, _, value = family.partition("=")
        if value == _value_text(getattr(winner.layout, name)):
            continue
        # Like is compared with like: by the exact schedule if both were timed by it, else by the closed form.
        first, second = (winner, exact[layout]) if layout in exact else (same, closed[layout])
        slower = second.step_s / first.step_s - 1 if second.fits else float("inf")
        runners.append(RunnerUp(family, second.layout, why_slower(first, second), slower))
    return ranked, tuple(runners)


def ranking_key(found: Estimate | Point, objective: str) -> float:
    """What a search minimizes: seconds, accelerator-seconds, or accelerators."""
    by = {"time": found.step_s, "cost": found.step_s * found.ranks, "gpus": float(found.ranks)}
    return by[objective]


def _families(job: Job, tally: _Tally) -> dict[str, int]:
    """The number of the best layout for each value of each field: by the objective, or where nothing fits by memory."""
    best = {}
    candidates = tally.whole.candidates
    for name in FAMILIES:
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


def why_slower(winner: Estimate, loser: Estimate) -> str:
    """The memory that is not there, or the term that cost the loser most."""
    if not loser.fits:
        return f"{loser.memory_bytes / 1e9:.0f} GB > {loser.capacity_bytes / 1e9:.0f} GB"
    change = {term: loser.time.get(term, 0.0) - seconds for term, seconds in winner.time.items()}
    term = max(change, key=lambda name: change[name])
    return f"{change[term] / winner.step_s:+.1%} {term.replace('_', ' ')}"
