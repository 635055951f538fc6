"""Exhaustive search of all layouts: memory first, then time, then the best few by the exact schedule.

The space (``phalanx_plan.search.space``) is a product of axes, and so is every term of memory and time. Each is computed over the few
axes it depends on, a chunk of geometries at a time so that it stays in the processor's cache; only sums span all axes.
Arrays are contiguous along the geometries, so that the innermost loops are long.
Geometries without a fitting variant are dropped before anything is timed. Nothing is sampled or guessed. The
search returns the best of all layouts by the closed form, timed again exactly, with a count of layouts excluded by each rule and, for
every losing family, its best member and the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from phalanx_plan.search.options import Options
from phalanx_plan.search.ranking import LEAST_ROOM, Front, Point, free_share, unbeaten, with_room_first
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
from phalanx_plan.workload.stacks import TrainingJob

_CHUNK_CELLS = 1 << 18
"""Layouts of a chunk: an array of them fits a core's second-level cache."""
_CLOSE = 0.05
"""Relative distance from the quickest, by the closed form, within which the best of a family is timed exactly."""
_NEAR = 0.15
"""Relative distance from the best, by the closed form, within which a geometry is tried with every micro-batch and number of stages. A size
between two tried sizes gains less than this.
"""
_MOST_NEAR = 4096
_LARGE = 8
"""Sequences of a micro-batch from which a geometry's least memory is checked before its choices: most do not fit at all."""
_ROW_FAMILIES = ("tensor", "context", "pipeline", "expert", "micro_batch", "schedule")
_FREE_FAMILIES = ("recompute", "zero", "offload_activations", "offload_optimizer")
FAMILIES = (*_ROW_FAMILIES, *_FREE_FAMILIES)
"""Fields of a layout; each value of a field is a family."""

Objective = Literal["time", "cost", "gpus"]


class NothingFitsError(ValueError):
    """Layouts are legal, but none of them fits an accelerator's memory."""

    def __init__(self, needed_bytes: float, capacity_bytes: float) -> None:
        """Write the message with both sizes and the remedies."""
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
    """The best layout of a losing family, and the reason why it is slower."""

    family: str
    """The field and value that its layouts share, such as "tensor=16"."""
    layout: PlannedLayout
    reason: str
    slower: float
    """Its step over the winner's, less one; infinite if nothing of the family fits."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: ranked layouts, Pareto front, losing families, and counts."""

    best: tuple[Estimate, ...]
    """Layouts ranked by the objective, timed by the exact schedule."""
    front: tuple[Point, ...]
    """The Pareto front of time, memory (in steps of 1/128 of the capacity) and accelerators."""
    runners_up: tuple[RunnerUp, ...]
    roomy: Estimate | None
    """The best by the objective that leaves room in memory (``phalanx_plan.search.ranking``)."""
    looked_at: int
    """Layouts of the space, legal or not."""
    valid: int
    """Layouts that are legal and fit."""
    excluded: Mapping[str, int]
    """Number of layouts that each rule was the first to exclude; "memory" comes last."""


def search(job: TrainingJob, options: Options | None = None) -> SearchResult:
    """Return the best layouts of ``job``, the runners-up of other families, and the Pareto front.

    All layouts are evaluated in closed form, then finer micro-batches and stages near the best, then finalists by
    their exact schedule. Raises ``NothingFitsError`` if no legal layout fits, another ``ValueError`` if none is legal
    or the objective is unknown.
    """
    options = options or Options()
    if options.objective not in get_args(Objective):
        raise ValueError(f"objective {options.objective!r}: take one of {', '.join(get_args(Objective))}")
    everything = space(job, options)
    excluded = dict(everything.excluded)
    full_evaluation = prepare(job, everything.candidates).with_lasting()
    hopeful = _not_hopeless(full_evaluation, excluded)
    # If no geometry remains, evaluate all of them for the one that needs least memory.
    some = hopeful.candidates.shape[-1] > 0
    tally = _tallied(
        hopeful if some else full_evaluation, options, excluded if some else dict(everything.excluded)
    )
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
    ranked, runners_up = _decide(job, tallies, options, front)
    return SearchResult(
        best=ranked[: options.top],
        front=front,
        runners_up=runners_up,
        roomy=next((estimate for estimate in ranked if free_share(estimate) >= LEAST_ROOM), None),
        looked_at=looked_at,
        valid=sum(each.valid for each in tallies),
        excluded=tally.excluded,
    )


def _tallied(full_evaluation: Evaluation, options: Options, excluded: dict[str, int]) -> _Tally:
    """Evaluate all candidates chunk by chunk into a tally. Adds to the counts in ``excluded``."""
    tally = _Tally(full_evaluation, options, excluded)
    for first, evaluation in _chunks(full_evaluation):
        tally.add(first, evaluation)
    return tally


def _not_hopeless(full_evaluation: Evaluation, excluded: dict[str, int]) -> Evaluation:
    """Drop geometries of large micro-batches that do not fit even with all recomputation, sharding and offload.

    Adds their layouts to ``excluded["memory"]``.
    """
    sizes = full_evaluation.candidates.micro_batch.ravel()
    (large,) = np.nonzero(sizes >= _LARGE)
    if not len(large):
        return full_evaluation
    most = [
        evaluation.most_memory().ravel() for _, evaluation in _chunks(full_evaluation.rows(large).leanest())
    ]
    hopeless = np.zeros(len(sizes), dtype=bool)
    hopeless[large] = np.concatenate(most) > full_evaluation.job.cluster.accelerator.memory_bytes.value
    each = int(np.prod(full_evaluation.candidates.shape[:-1]))
    excluded["memory"] = excluded.get("memory", 0) + each * int(np.count_nonzero(hopeless))
    return full_evaluation.rows(np.flatnonzero(~hopeless))


def _near(tally: _Tally) -> Candidates:
    """Return the geometries within ``_NEAR`` of the best, at most ``_MOST_NEAR``, best first.

    Another micro-batch size could make one of them the best.
    """
    keys = tally.quick.of_row
    order = np.argsort(keys, kind="stable")[:_MOST_NEAR]
    return tally.full_evaluation.candidates.rows(order[keys[order] <= (1 + _NEAR) * keys[order[0]]])


def _chunks(full_evaluation: Evaluation) -> Iterator[tuple[int, Evaluation]]:
    """Yield consecutive geometries, each chunk with the index of its first; tables are shared."""
    shape = full_evaluation.candidates.shape
    each = max(1, _CHUNK_CELLS // int(np.prod(shape[:-1])))
    for first in range(0, shape[-1], each):
        yield first, full_evaluation.rows(slice(first, first + each))


def _failure(tally: _Tally) -> ValueError:
    """Return the error of a search without a layout: ``NothingFitsError``, or the rule that excludes most if none is legal."""
    needed_bytes = float(tally.lean.of_row.min())
    if np.isfinite(needed_bytes):
        return NothingFitsError(
            needed_bytes, tally.full_evaluation.job.cluster.accelerator.memory_bytes.value
        )
    worst = max(tally.excluded, key=lambda name: tally.excluded[name])
    return ValueError(
        f"no layout is legal: most ({tally.excluded[worst]:,}) fail by {worst!r}; change the batch or relax the conditions"
    )


@dataclass(frozen=True)
class _Look:
    """Memory and time of a chunk of geometries, shape (choices on the free axes, geometries)."""

    bytes: Floats
    """Infinite for choices that are not legal."""
    alive: Ints
    """Geometries with a choice that fits; the arrays below have only these."""
    seconds: Floats
    """Infinite for choices that do not fit."""
    key: Floats
    """The ranking key: seconds, accelerator-seconds, or seconds after the number of accelerators."""
    valid: int
    """Layouts that are legal and fit."""


def _look(evaluation: Evaluation, options: Options, excluded: dict[str, int]) -> _Look:
    """Compute the memory of all layouts, and the seconds and objective of those that fit; infinite for the others.

    Adds to ``excluded`` the layouts that each rule is the first to exclude.
    """
    job, candidates = evaluation.job, evaluation.candidates
    shape = candidates.shape

    def count(reason: str, mask: Bools) -> None:
        """Add the layouts that a broadcast ``mask`` marks to ``excluded[reason]``."""
        cells = int(np.count_nonzero(mask)) * (int(np.prod(shape)) // mask.size)
        excluded[reason] = excluded.get(reason, 0) + cells

    legal = np.ones((1,) * AXES, dtype=bool)
    for reason, mask in exclusions(job, candidates, options).items():
        count(reason, legal & mask)
        legal = legal & ~mask
    most = evaluation.most_memory(np.where(legal, 0.0, np.inf))
    bytes_ = np.broadcast_to(most, shape).reshape(-1, shape[-1])  # (choices, geometries)
    fits = bytes_ <= job.cluster.accelerator.memory_bytes.value
    valid = int(np.count_nonzero(fits))
    count("memory", legal)
    excluded["memory"] -= valid
    (alive,) = np.nonzero(fits.any(axis=0))
    seconds, ranks = np.zeros((len(fits), 0)), candidates.ranks.ravel()[alive]
    if len(alive):
        step_s = np.broadcast_to(evaluation.rows(alive).seconds(), (*shape[:-1], len(alive)))
        seconds = np.where(fits.take(alive, axis=1), step_s.reshape(len(fits), -1), np.inf)
    key = {"time": seconds, "cost": seconds * ranks, "gpus": seconds + 1e9 * ranks}[options.objective]
    return _Look(bytes_, alive, seconds, key, valid)


class _Best:
    """Running minima of each geometry, and of each choice on the free axes with its geometry."""

    def __init__(self, choices: int, rows: int) -> None:
        """Begin with infinite minima of ``rows`` geometries and ``choices`` free choices."""
        self.of_row = np.full(rows, np.inf)
        self.of_choice = np.full(choices, np.inf)
        self.row = np.zeros(choices, dtype=np.int64)

    def add(self, rows: Ints, values: Floats) -> None:
        """Update the least value of each row and of each choice with ``values`` (choices, geometries) of geometries
        ``rows``.

        The first among equals stays.
        """
        self.of_row[rows] = values.min(axis=0)
        place = values.argmin(axis=1)
        least = values[np.arange(len(values)), place]
        better = least < self.of_choice
        self.of_choice = np.where(better, least, self.of_choice)
        self.row = np.where(better, rows[place], self.row)


@dataclass
class _Tally:
    """The running result of a pass over the space. A layout's number is ``geometry x choices + choice``."""

    full_evaluation: Evaluation
    options: Options
    excluded: dict[str, int]
    valid: int = 0
    quick: _Best = field(init=False)
    """Least ranking keys of layouts that fit."""
    lean: _Best = field(init=False)
    """Least memory of legal layouts."""
    front: Front = field(init=False)
    keys: Floats = field(default_factory=lambda: np.zeros(0))
    """Ranking keys of the best layouts so far, ascending; ``numbers`` identifies the layouts."""
    numbers: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        """Begin an empty tally of the candidates' geometries and free choices."""
        *choices, rows = self.full_evaluation.candidates.shape
        self.choices = int(np.prod(choices))
        self.quick, self.lean = _Best(self.choices, rows), _Best(self.choices, rows)
        self.front = Front(self.full_evaluation.job.cluster.accelerator.memory_bytes.value)

    def add(self, first: int, evaluation: Evaluation) -> None:
        """Add a chunk whose first geometry is number ``first``.

        Updates the counts of what fits and of what each rule excludes, the best ones and the front.
        """
        look = _look(evaluation, self.options, self.excluded)
        self.valid += look.valid
        self.lean.add(first + np.arange(look.bytes.shape[1]), look.bytes)
        if look.valid:
            self.quick.add(first + look.alive, look.key)
            self._rank(first + look.alive, look.key)
            ranks = evaluation.candidates.ranks.ravel()[look.alive]
            self.front.add(first, look.alive, look.seconds, look.bytes, ranks)

    def leaders(self) -> Iterator[tuple[float, int]]:
        """Yield ranking keys and numbers of the best layouts, best first."""
        return zip(self.keys.tolist(), self.numbers.tolist(), strict=True)

    def choices_of(self, rows: list[int]) -> dict[int, int]:
        """Return, by row, the best choice on the free axes: by the objective, or by memory if nothing of the row fits."""
        if not rows:
            return {}
        look = _look(self.full_evaluation.rows(np.array(rows)), self.options, {})
        best = look.bytes.argmin(axis=0)
        if look.valid:
            best[look.alive] = look.key.argmin(axis=0)
        return dict(zip(rows, best.tolist(), strict=True))

    def layout(self, number: int) -> PlannedLayout:
        """Return the layout with this number."""
        row, choice = divmod(number, self.choices)
        candidates = self.full_evaluation.candidates
        return candidates.at(choice * candidates.shape[-1] + row, self.full_evaluation.job.modes)

    def _rank(self, rows: Ints, values: Floats) -> None:
        """Merge these layouts into the ``finalists`` best keys and their numbers; the lowest number among equals is first."""
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
    job: TrainingJob, tallies: Sequence[_Tally], options: Options, front: Sequence[Point]
) -> tuple[tuple[Estimate, ...], tuple[RunnerUp, ...]]:
    """Return the best layouts by the exact schedule, and the best member of every losing family.

    Finalists are the best by the closed form, the best with room in memory, and the best of each family that comes
    close to them. The order of closed form and schedule may differ, so the winner may be any of these. A family whose
    best does not fit is infinitely slower. Some layout must fit.
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
            if family in members:  # other micro-batch sizes are not families of their own
                members[family].append(tally.layout(number))
    layouts = list(dict.fromkeys((*leaders, *(layout for some in members.values() for layout in some))))
    evaluation = prepare(job, candidates_of(layouts, job.modes))
    closed = dict(zip(layouts, estimated(evaluation, layouts, exact=False), strict=True))

    def rank(layout: PlannedLayout) -> tuple[bool, float]:
        """Return the sort key of a layout: the objective; those that do not fit come last, by memory."""
        estimate = closed[layout]
        return not estimate.fits, ranking_key(
            estimate, options.objective
        ) if estimate.fits else estimate.memory_bytes

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
    by_key = sorted(
        exact.values(), key=lambda estimate: (ranking_key(estimate, options.objective), estimate.step_s)
    )
    ranked = with_room_first(by_key, lambda estimate: ranking_key(estimate, options.objective))
    winner, same = ranked[0], closed[ranked[0].layout]
    runners = []
    for family, layout in families.items():
        name, _, value = family.partition("=")
        if value == _value_text(getattr(winner.layout, name)):
            continue
        # Compare by the exact schedule if both were timed by it, else by the closed form.
        first, second = (winner, exact[layout]) if layout in exact else (same, closed[layout])
        slower = second.step_s / first.step_s - 1 if second.fits else float("inf")
        runners.append(RunnerUp(family, second.layout, why_slower(first, second), slower))
    return ranked, tuple(runners)


def ranking_key(prediction: Estimate | Point, objective: str) -> float:
    """Return the objective that a search minimizes: seconds, accelerator-seconds, or accelerators."""
    by = {
        "time": prediction.step_s,
        "cost": prediction.step_s * prediction.ranks,
        "gpus": float(prediction.ranks),
    }
    return by[objective]


def _families(job: TrainingJob, tally: _Tally) -> dict[str, int]:
    """Return the number of the best layout for each ``field=value``: by the objective, or by memory if none with this value fits."""
    best = {}
    candidates = tally.full_evaluation.candidates
    for name in FAMILIES:
        for value in np.flatnonzero(np.bincount(getattr(candidates, name).ravel())).tolist():
            winner = _best_of(tally.quick, candidates, name, value)
            winner = winner or _best_of(tally.lean, candidates, name, value)
            if winner is not None:
                best[f"{name}={_label(job, name, value)}"] = winner
    choices = tally.choices_of(sorted({row for row, choice in best.values() if choice is None}))
    return {
        family: row * tally.choices + (choices[row] if choice is None else choice)
        for family, (row, choice) in best.items()
    }


def _label(job: TrainingJob, name: str, value: int) -> str:
    """Return the value of a family's field by its code."""
    if name == "schedule":
        return SCHEDULES[value]
    return job.modes[value].name if name == "recompute" else str(value)


def _value_text(value: int | str) -> str:
    return value if isinstance(value, str) else str(int(value))


def _best_of(best: _Best, candidates: Candidates, name: str, value: int) -> tuple[int, int | None] | None:
    """Return (geometry, choice) of the best layout with this value of a field, or None if no value is finite.

    The choice is None for fields of the geometry.
    """
    has_value = getattr(candidates, name) == value
    if name in _ROW_FAMILIES:
        keys = np.where(has_value.ravel(), best.of_row, np.inf)
        row = int(keys.argmin())
        return (row, None) if np.isfinite(keys[row]) else None
    has_value = np.broadcast_to(has_value, (*candidates.shape[:-1], 1)).ravel()
    keys = np.where(has_value, best.of_choice, np.inf)
    choice = int(keys.argmin())
    return (int(best.row[choice]), choice) if np.isfinite(keys[choice]) else None


def why_slower(winner: Estimate, loser: Estimate) -> str:
    """Describe the memory that the loser lacks, else which of the winner's terms grows most, as a share of the winner's step."""
    if not loser.fits:
        return f"{loser.memory_bytes / 1e9:.0f} GB > {loser.capacity_bytes / 1e9:.0f} GB"
    change = {term: loser.time.get(term, 0.0) - seconds for term, seconds in winner.time.items()}
    term = max(change, key=lambda name: change[name])
    return f"{change[term] / winner.step_s:+.1%} {term.replace('_', ' ')}"
