"""Bands of the planner's predictions, learned from what was left over of published runs by software that was left out.

Every row is judged three times, as three users of ``phalanx plan`` would meet it (the kinds of ``phalanx_plan.evidence``):

* ``here``: with the factor of the same software on the same generation, from other models, where one of them ran on this accelerator;
* ``elsewhere``: with the factor of the same software from other accelerators alone;
* ``never``: as software that the planner has not seen, the stack of its kind as it is, without habits, recipe or factor.

What is left over, measured over predicted time, is pooled over software, dense models and mixtures apart. Runs of one software are
no independent evidence of another: with an intraclass correlation r (Donner, International Statistical Review 54, 1986), n of them
count as n / (1 + (n - 1) r). A software with runs on the accelerator has a band of its own, of what was left over of its models and
of the pool, in which the pool counts as ``PRIOR`` models.

A band learned from few is too narrow for one more: of n independent runs, the k-th smallest is above the next one with probability
k / (n + 1), whatever their distribution (Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005; Lei et al., JASA
113, 2018). So a band's quantiles are taken at positions of n + 1, where n is the number of independent runs that a sample is worth.

The correction belongs to all three kinds, and to ``never`` before the others: what comes next is one run of one more software, and it is
software that is exchangeable, not runs. Methods for such data promise coverage of a run of a new group, each group with one vote
(Dunn, Wasserman and Ramdas, JASA 118, 2023, arXiv 1809.07441: pooled distributions, which have no correction, cover in the limit of many
groups alone, and subsamples, one run of each of k groups, are corrected with k + 1; Lee, Barber and Willett, arXiv 2306.06342). These count
a software as one run however little its runs have in common; with five programs such a band holds all there is. Worth by the intraclass
correlation lies between that and no correction. In drawn programs as many, as large and as correlated as those of the table it holds what it
should, and without the correction it does not (tests/validation/test_bands.py).

How honest a band is, ``coverage`` tells: for each software, bands are learned from all others (and, for ``here``, from its other models,
with factors that do not know the model), and its runs are counted that they hold.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from phalanx_plan.evidence import (
    LEVELS,
    Band,
    BestRun,
    Kind,
    KindRecord,
    Learned,
    RunCounts,
    SoftwareRecord,
    evidence_for,
)
from validation.factors import PRIOR, fitted
from validation.judged import Judged
from validation.runs import TABLE

COMMAND = "python -m validation --learn"
KINDS: tuple[Kind, ...] = ("here", "elsewhere", "never")


@dataclass(frozen=True)
class LeftOut:
    """One run as it was predicted with all that was learned from its software, or from its source, left out."""

    judged: Judged
    kind: Kind
    ratio: float
    """Measured over predicted time."""
    band: Band

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return 1 / self.ratio - 1


def _log_factor(kind: Kind, row: Judged, software: Sequence[Judged]) -> float | None:
    """Logarithm of the factor that ``software``, runs of the row's own, says of its model there; ``None`` if it says nothing."""
    if kind == "never":
        return 0.0
    if kind == "here":
        others = [other for other in software if other.subject != row.subject]
        if not any(other.accelerator == row.accelerator for other in others):
            return None
    else:
        others = [other for other in software if other.accelerator != row.accelerator]
    points, generation = [other.point for other in others], row.point.generation
    near = [point for point in points if point.generation == generation]
    return math.log(fitted(near or points, "stack").value) if points else None


@dataclass(frozen=True)
class _Left:
    """What is left over of one run."""

    row: Judged
    log: float


def _left(kind: Kind, rows: Sequence[Judged]) -> list[_Left]:
    """What is left over of each of ``rows``, predicted from the others of its software."""
    groups: dict[tuple[str, bool], list[Judged]] = {}
    for row in rows:
        groups.setdefault((row.software, row.mixture), []).append(row)
    found = []
    for members in groups.values():
        factors = {row.subject: _log_factor(kind, row, members) for row in members}
        for row in members:
            factor = factors[row.subject]
            if factor is not None:
                ratio = row.unseen_ratio if kind == "never" else row.ratio
                found.append(_Left(row, math.log(ratio) - factor))
    return found


Weighted = list[tuple[float, float]]
"""Logarithms of ratios, each with its weight."""


@dataclass(frozen=True)
class Sample:
    """What is left over of some runs, weighted."""

    values: Weighted
    """The weights sum to one."""
    worth: float
    """Number of independent runs that say as much."""


def _pooled(left: Sequence[_Left]) -> Sample:
    """Runs weighted so that each software counts as as many as its intraclass correlation leaves."""
    return _grouped([(one.row.software, one.log) for one in left])


def _grouped(left: Sequence[tuple[Hashable, float]]) -> Sample:
    """Logarithms by group, weighted so that each group counts as as many runs as its intraclass correlation leaves."""
    sizes = Counter(group for group, _ in left)
    correlation = intraclass([[log for group, log in left if group == name] for name in sizes])
    weights = [1 / (1 + (sizes[group] - 1) * correlation) for group, _ in left]
    total = sum(weights)
    return Sample([(log, weight / total) for (_, log), weight in zip(left, weights, strict=True)], total)


def intraclass(groups: Sequence[Sequence[float]]) -> float:
    """Intraclass correlation by one-way analysis of variance, between 0 and 1; one half where there is one group only."""
    number, total = len(groups), sum(map(len, groups))
    if number < 2 or total == number:
        return 0.5
    means = [sum(group) / len(group) for group in groups]
    grand = sum(map(sum, groups)) / total
    between = sum(len(g) * (mean - grand) ** 2 for g, mean in zip(groups, means, strict=True)) / (number - 1)
    squares = sum((value - mean) ** 2 for g, mean in zip(groups, means, strict=True) for value in g)
    within = squares / (total - number)
    size = (total - sum(len(group) ** 2 for group in groups) / total) / (number - 1)
    spread = between + (size - 1) * within
    return min(1.0, max(0.0, (between - within) / spread)) if spread else 0.0


def _with_own(pool: Sample, own: Sequence[_Left]) -> Sample:
    """The pool, which counts as ``PRIOR`` models, and what is left over of a software's own models.

    Worth of unequal weights as Kish has it (Survey Sampling, 1965): the square of their sum over the sum of their squares.
    """
    models = len({one.row.subject for one in own})
    share = models / (models + PRIOR)
    values = [
        *((log, weight * (1 - share)) for log, weight in pool.values),
        *((one.log, share / len(own)) for one in own),
    ]
    mine = _grouped([(one.row.subject, one.log) for one in own])
    if not pool.values:
        return Sample(values, mine.worth)
    return Sample(values, 1 / ((1 - share) ** 2 / pool.worth + share**2 / mine.worth))


def quantile(values: Weighted, level: float) -> float:
    """Weighted quantile, linear between the middles of the weights."""
    ordered = sorted(values)
    below, total = 0.0, sum(weight for _, weight in ordered)
    last_value, last_level = ordered[0][0], 0.0
    for value, weight in ordered:
        middle = (below + weight / 2) / total
        if level <= middle:
            share = (level - last_level) / (middle - last_level) if middle > last_level else 1.0
            return last_value + share * (value - last_value)
        last_value, last_level, below = value, middle, below + weight
    return last_value


def position(level: float, worth: float) -> float:
    """Quantile of a sample, counted in the middles of its runs, that one more run is below with probability ``level``.

    It is beyond 0 or 1 where the sample is too small to say: there its least or largest value stands.
    """
    return (level * (worth + 1) - 0.5) / worth


def _band(sample: Sample, factor: float = 1.0) -> Band:
    found = (quantile(sample.values, position(level, sample.worth)) for level in LEVELS)
    return Band(tuple(round(math.exp(log) / factor, 4) for log in found))


def _factor(kind: Kind, sample: Sample) -> float:
    """The bias of unseen software is applied, but none is credited with being faster than predicted."""
    return max(1.0, round(math.exp(quantile(sample.values, 0.5)), 4)) if kind == "never" else 1.0


def learn(rows: Sequence[Judged], table: Path = TABLE) -> Learned:
    """Everything that ``phalanx plan`` looks up, from all ``rows``, without ``coverage``."""
    software, kinds = [], []
    for mixture in sorted({row.mixture for row in rows}):
        these = [row for row in rows if row.mixture == mixture]
        left = {kind: _left(kind, these) for kind in KINDS}
        for kind in KINDS:
            pool = left[kind] or left["never"]
            values = _pooled(pool)
            factor = _factor(kind, values)
            raw = [row.unseen_ratio if kind == "never" else row.ratio for row in (x.row for x in pool)]
            kinds.append(
                KindRecord(
                    kind=kind,
                    mixture=mixture,
                    factor=factor,
                    runs=len(pool),
                    models=len({one.row.subject for one in pool}),
                    software=len({one.row.software for one in pool}),
                    left_out_error=_error(one.log - math.log(factor) for one in pool),
                    bias=round(median(1 / ratio - 1 for ratio in raw), 4),
                    covered_80=0.0,
                    covered_90=0.0,
                    ratios=_band(values, factor).ratios,
                )
            )
        for name in sorted({row.software for row in these}):
            software.append(_record(name, these, left["here"], left["elsewhere"]))
    best = _best(rows)
    digest = hashlib.sha256(table.read_bytes()).hexdigest() if table.is_file() else ""
    made_from = {"table": table.name, "sha256": digest, "rows": str(len(rows)), "command": COMMAND}
    return Learned(made_from, tuple(software), tuple(kinds), best)


def _record(
    name: str, rows: Sequence[Judged], left: Sequence[_Left], elsewhere: Sequence[_Left]
) -> SoftwareRecord:
    """What the runs of one software say; ``rows`` and what is ``left`` over are of dense models or of mixtures alone."""
    mine = [row for row in rows if row.software == name]
    own = [one for one in left if one.row.software == name]
    pool = [one for one in left if one.row.software != name]
    values = _with_own(_pooled(pool), own) if own else _pooled(pool or left or _left("never", rows))
    there = _pooled([one for one in elsewhere if one.row.software != name] or elsewhere or pool or left)
    points = [row.point for row in mine]
    by_generation = {
        point.generation: [p for p in points if p.generation == point.generation] for point in points
    }
    on = {row.accelerator: [r for r in mine if r.accelerator == row.accelerator] for row in mine}
    return SoftwareRecord(
        software=name,
        mixture=mine[0].mixture,
        accelerators={
            key: RunCounts(len(on[key]), len({row.model for row in on[key]})) for key in sorted(on)
        },
        factors={key: round(fitted(by_generation[key], "stack").value, 4) for key in sorted(by_generation)},
        factor=round(fitted(points, "stack").value, 4),
        left_out_error=_error(one.log for one in own or left),
        ratios=_band(values).ratios,
        elsewhere_ratios=_band(_with_own(there, own) if own else there).ratios,
    )


def _error(logs: Iterable[float]) -> float:
    found = [abs(math.exp(-log) - 1) for log in logs]
    return round(median(found), 4) if found else 0.0


def _best(rows: Sequence[Judged]) -> tuple[BestRun, ...]:
    keys = sorted({(row.accelerator, row.precision) for row in rows})
    found = []
    for key in keys:
        top = max((row for row in rows if (row.accelerator, row.precision) == key), key=lambda row: row.mfu)
        found.append(BestRun(*key, mfu=top.mfu, run=top.run))
    return tuple(found)


def left_out(rows: Sequence[Judged]) -> tuple[LeftOut, ...]:
    """Every run for every kind of evidence that there is of it, with what was learned from its software left out.

    Of ``here``, its software's other models are known, as they would be; neither factors nor bands know the run's model.
    """
    found: list[LeftOut] = []
    for mixture in (False, True):
        these = [row for row in rows if row.mixture == mixture]
        for kind in KINDS:
            left = _left(kind, these)
            for name in sorted({one.row.software for one in left}):
                pool = [one for one in left if one.row.software != name]
                if pool:
                    mine = [one for one in left if one.row.software == name]
                    found += _judge(kind, mine, _pooled(pool), [row for row in these if row.software == name])
    return tuple(found)


def _judge(kind: Kind, mine: Sequence[_Left], pool: Sample, software: Sequence[Judged]) -> list[LeftOut]:
    """Runs of one software, with a band from the ``pool`` of others and, unless it is ``never``, from its own models elsewhere."""
    if kind == "never":
        factor = _factor(kind, pool)
        band = _band(pool, factor)
        return [LeftOut(one.row, kind, math.exp(one.log) / factor, band) for one in mine]
    found = []
    places = sorted({one.row.subject for one in mine})
    for place in places if kind == "here" else sorted({accelerator for _, accelerator in places}):

        def inside(row: Judged, place: str | tuple[str, str] = place) -> bool:
            return place in (row.subject, row.accelerator)

        own = _left("here", [row for row in software if not inside(row)])
        band = _band(_with_own(pool, own) if own else pool)
        found += [LeftOut(one.row, kind, math.exp(one.log), band) for one in mine if inside(one.row)]
    return found


def coverage(found: Sequence[LeftOut], level: float) -> float:
    """Share of left-out runs within the central band that leaves ``level`` on each side."""
    return sum(one.band.holds(one.ratio, level) for one in found) / len(found)


def program_coverage(found: Sequence[LeftOut], level: float) -> float:
    """The mean of ``coverage`` over programs, dense models and mixtures apart: what new software may expect, whoever published most."""
    programs: dict[tuple[str, bool], list[LeftOut]] = {}
    for one in found:
        programs.setdefault((one.judged.software, one.judged.mixture), []).append(one)
    return fmean(coverage(mine, level) for mine in programs.values())


def with_coverage(table: Learned, found: Sequence[LeftOut]) -> Learned:
    """The table with the share of left-out runs that bands of each kind hold."""

    def covered(record: KindRecord) -> KindRecord:
        mine = [x for x in found if (x.kind, x.judged.mixture) == (record.kind, record.mixture)]
        if not mine:
            return record
        return replace(
            record, covered_80=round(coverage(mine, 0.1), 3), covered_90=round(coverage(mine, 0.05), 3)
        )

    return replace(table, kinds=tuple(covered(record) for record in table.kinds))


def left_out_sources(rows: Sequence[Judged]) -> dict[str, tuple[LeftOut, ...]]:
    """By source: its runs as a plan would have predicted them with everything that was learned from it left out."""
    found: dict[str, tuple[LeftOut, ...]] = {}
    for origin in sorted({row.origin for row in rows}):
        table = learn([row for row in rows if row.origin != origin])
        found[origin] = tuple(_without_source(row, table) for row in rows if row.origin == origin)
    return found


def _without_source(row: Judged, table: Learned) -> LeftOut:
    known = evidence_for(table, row.software, row.accelerator, mixture=row.mixture)
    assert known.kind != "calibrated", "nothing says that constants were fitted there"
    ratio = row.unseen_ratio if known.kind == "never" else row.ratio
    return LeftOut(row, known.kind, ratio / known.factor, known.band)
