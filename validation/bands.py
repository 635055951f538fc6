"""Bands of the planner's predictions, learned from residuals of published runs by software that was left out.

Every row is judged three times, as three users of ``phalanx plan`` would meet it (the kinds of ``phalanx_plan.evidence``):

* ``here``: with the factor of the same software on the same generation, from other models, if one of them ran on this accelerator;
* ``elsewhere``: with the factor of the same software from other accelerators alone;
* ``never``: as software that the planner has not seen, the stack of its kind as it is, without habits, recipe or factor.

Residuals, measured over predicted time, are pooled over software, dense models and mixtures apart. Runs of one software are
no independent evidence of another: with an intraclass correlation r (Donner, International Statistical Review 54, 1986), n of them
count as n / (1 + (n - 1) r). A software with runs on the accelerator has a band of its own, of the residuals of its models and
of the pool, in which the pool counts as ``PRIOR`` models.

A band learned from few is too narrow for one more: of n independent runs, the k-th smallest is above the next one with probability
k / (n + 1), for any distribution (Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005; Lei et al., JASA
113, 2018). So a band's quantiles are taken at positions of n + 1, where n is the number of independent runs that a sample is worth.

The correction belongs to all three kinds, and to ``never`` before the others: the next run is one of one more software, and
software is exchangeable, not runs. Methods for such data promise coverage of a run of a new group, each group with one vote
(Dunn, Wasserman and Ramdas, JASA 118, 2023, arXiv 1809.07441: pooled distributions, which have no correction, cover in the limit of many
groups alone, and subsamples, one run of each of k groups, are corrected with k + 1; Lee, Barber and Willett, arXiv 2306.06342). These count
a software as one run even if its runs have little in common; with five programs such a band holds all runs. Worth by the intraclass
correlation lies between that and no correction. In programs drawn as many, as large and as correlated as those of the table it holds its
nominal share, and without the correction it does not (tests/validation/test_bands.py).

``coverage`` measures how honest a band is: for each software, bands are learned from all others (and, for ``here``, from its other models,
with factors fitted without the model), and the runs within them are counted.
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
    """A run predicted without anything learned from its software, or from its source."""

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
    """Return the logarithm of the factor for the row by ``software``, runs of its own software; ``None`` if no run gives one."""
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
class _Residual:
    """Residual of one run: logarithm of measured over predicted time with its factor."""

    row: Judged
    log: float


def _residuals(kind: Kind, rows: Sequence[Judged]) -> list[_Residual]:
    """Return the residual of each of ``rows``, predicted from the others of its software."""
    groups: dict[tuple[str, bool], list[Judged]] = {}
    for row in rows:
        groups.setdefault((row.software, row.mixture), []).append(row)
    residuals = []
    for members in groups.values():
        factors = {row.subject: _log_factor(kind, row, members) for row in members}
        for row in members:
            factor = factors[row.subject]
            if factor is not None:
                ratio = row.unseen_ratio if kind == "never" else row.ratio
                residuals.append(_Residual(row, math.log(ratio) - factor))
    return residuals


Weighted = list[tuple[float, float]]
"""Logarithms of ratios, each with its weight."""


@dataclass(frozen=True)
class Sample:
    """Weighted residuals of some runs."""

    values: Weighted
    """The weights sum to one."""
    worth: float
    """Number of independent runs with as much information."""


def _pooled(residuals: Sequence[_Residual]) -> Sample:
    """Weight runs so that each software counts as the number of independent runs by its intraclass correlation."""
    return _grouped([(residual.row.software, residual.log) for residual in residuals])


def _grouped(logs: Sequence[tuple[Hashable, float]]) -> Sample:
    """Weight logarithms by group, so that each group counts as the number of independent runs by its intraclass correlation."""
    sizes = Counter(group for group, _ in logs)
    correlation = intraclass([[log for group, log in logs if group == name] for name in sizes])
    weights = [1 / (1 + (sizes[group] - 1) * correlation) for group, _ in logs]
    total = sum(weights)
    return Sample([(log, weight / total) for (_, log), weight in zip(logs, weights, strict=True)], total)


def intraclass(groups: Sequence[Sequence[float]]) -> float:
    """Return the intraclass correlation by one-way analysis of variance, between 0 and 1; one half for one group only."""
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


def _with_own(pool: Sample, own: Sequence[_Residual]) -> Sample:
    """Join the pool, which counts as ``PRIOR`` models, and the residuals of a software's own models.

    The worth of unequal weights follows Kish (Survey Sampling, 1965): the square of their sum over the sum of their squares.
    """
    models = len({residual.row.subject for residual in own})
    share = models / (models + PRIOR)
    values = [
        *((log, weight * (1 - share)) for log, weight in pool.values),
        *((residual.log, share / len(own)) for residual in own),
    ]
    mine = _grouped([(residual.row.subject, residual.log) for residual in own])
    if not pool.values:
        return Sample(values, mine.worth)
    return Sample(values, 1 / ((1 - share) ** 2 / pool.worth + share**2 / mine.worth))


def quantile(values: Weighted, level: float) -> float:
    """Return a weighted quantile, linear between the middles of the weights."""
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
    """Return the quantile of a sample, counted in the middles of its runs, that one more run is below with probability ``level``.

    It is beyond 0 or 1 if the sample is too small: ``quantile`` then gives its least or largest value.
    """
    return (level * (worth + 1) - 0.5) / worth


def _band(sample: Sample, factor: float = 1.0) -> Band:
    logs = (quantile(sample.values, position(level, sample.worth)) for level in LEVELS)
    return Band(tuple(round(math.exp(log) / factor, 4) for log in logs))


def _factor(kind: Kind, sample: Sample) -> float:
    """Return the bias of unseen software, at least 1: none is credited with being faster than predicted."""
    return max(1.0, round(math.exp(quantile(sample.values, 0.5)), 4)) if kind == "never" else 1.0


def learn(rows: Sequence[Judged], table: Path = TABLE) -> Learned:
    """Return the table that ``phalanx plan`` uses, from all ``rows``, without ``coverage``."""
    software, kinds = [], []
    for mixture in sorted({row.mixture for row in rows}):
        these = [row for row in rows if row.mixture == mixture]
        residuals = {kind: _residuals(kind, these) for kind in KINDS}
        for kind in KINDS:
            pool = residuals[kind] or residuals["never"]
            values = _pooled(pool)
            factor = _factor(kind, values)
            raw = [row.unseen_ratio if kind == "never" else row.ratio for row in (x.row for x in pool)]
            kinds.append(
                KindRecord(
                    kind=kind,
                    mixture=mixture,
                    factor=factor,
                    runs=len(pool),
                    models=len({residual.row.subject for residual in pool}),
                    software=len({residual.row.software for residual in pool}),
                    left_out_error=_error(residual.log - math.log(factor) for residual in pool),
                    bias=round(median(1 / ratio - 1 for ratio in raw), 4),
                    covered_80=0.0,
                    covered_90=0.0,
                    ratios=_band(values, factor).ratios,
                )
            )
        for name in sorted({row.software for row in these}):
            software.append(_record(name, these, residuals["here"], residuals["elsewhere"]))
    best = _best(rows)
    digest = hashlib.sha256(table.read_bytes()).hexdigest() if table.is_file() else ""
    made_from = {"table": table.name, "sha256": digest, "rows": str(len(rows)), "command": COMMAND}
    return Learned(made_from, tuple(software), tuple(kinds), best)


def _record(
    name: str, rows: Sequence[Judged], residuals: Sequence[_Residual], elsewhere: Sequence[_Residual]
) -> SoftwareRecord:
    """Return the record of one software; ``rows`` and ``residuals`` are of dense models or of mixtures alone."""
    mine = [row for row in rows if row.software == name]
    own = [residual for residual in residuals if residual.row.software == name]
    pool = [residual for residual in residuals if residual.row.software != name]
    values = _with_own(_pooled(pool), own) if own else _pooled(pool or residuals or _residuals("never", rows))
    others = [residual for residual in elsewhere if residual.row.software != name]
    there = _pooled(others or elsewhere or pool or residuals)
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
        left_out_error=_error(residual.log for residual in own or residuals),
        ratios=_band(values).ratios,
        elsewhere_ratios=_band(_with_own(there, own) if own else there).ratios,
    )


def _error(logs: Iterable[float]) -> float:
    errors = [abs(math.exp(-log) - 1) for log in logs]
    return round(median(errors), 4) if errors else 0.0


def _best(rows: Sequence[Judged]) -> tuple[BestRun, ...]:
    keys = sorted({(row.accelerator, row.precision) for row in rows})
    best = []
    for key in keys:
        top = max((row for row in rows if (row.accelerator, row.precision) == key), key=lambda row: row.mfu)
        best.append(BestRun(*key, mfu=top.mfu, run=top.run))
    return tuple(best)


def left_out(rows: Sequence[Judged]) -> tuple[LeftOut, ...]:
    """Predict every run by every kind of evidence that applies to it, without anything learned from its software.

    For ``here``, its software's other models count; neither factors nor bands are learned from the run's model.
    """
    predictions: list[LeftOut] = []
    for mixture in (False, True):
        these = [row for row in rows if row.mixture == mixture]
        for kind in KINDS:
            residuals = _residuals(kind, these)
            for name in sorted({residual.row.software for residual in residuals}):
                pool = [residual for residual in residuals if residual.row.software != name]
                if pool:
                    mine = [residual for residual in residuals if residual.row.software == name]
                    software = [row for row in these if row.software == name]
                    predictions += _judge(kind, mine, _pooled(pool), software)
    return tuple(predictions)


def _judge(kind: Kind, mine: Sequence[_Residual], pool: Sample, software: Sequence[Judged]) -> list[LeftOut]:
    """Predict runs of one software, with a band from the ``pool`` of others and, unless it is ``never``, from its own models elsewhere."""
    if kind == "never":
        factor = _factor(kind, pool)
        band = _band(pool, factor)
        return [LeftOut(residual.row, kind, math.exp(residual.log) / factor, band) for residual in mine]
    predictions = []
    places = sorted({residual.row.subject for residual in mine})
    for place in places if kind == "here" else sorted({accelerator for _, accelerator in places}):

        def inside(row: Judged, place: str | tuple[str, str] = place) -> bool:
            return place in (row.subject, row.accelerator)

        own = _residuals("here", [row for row in software if not inside(row)])
        band = _band(_with_own(pool, own) if own else pool)
        predictions += [
            LeftOut(residual.row, kind, math.exp(residual.log), band)
            for residual in mine
            if inside(residual.row)
        ]
    return predictions


def coverage(predictions: Sequence[LeftOut], level: float) -> float:
    """Return the share of left-out runs within the central band that leaves ``level`` on each side."""
    return sum(run.band.holds(run.ratio, level) for run in predictions) / len(predictions)


def program_coverage(predictions: Sequence[LeftOut], level: float) -> float:
    """Return the mean of ``coverage`` over programs, dense models and mixtures apart: each program has one vote, as new software would."""
    programs: dict[tuple[str, bool], list[LeftOut]] = {}
    for run in predictions:
        programs.setdefault((run.judged.software, run.judged.mixture), []).append(run)
    return fmean(coverage(mine, level) for mine in programs.values())


def with_coverage(table: Learned, predictions: Sequence[LeftOut]) -> Learned:
    """Return the table with the share of left-out runs that bands of each kind hold."""

    def covered(record: KindRecord) -> KindRecord:
        mine = [x for x in predictions if (x.kind, x.judged.mixture) == (record.kind, record.mixture)]
        if not mine:
            return record
        return replace(
            record, covered_80=round(coverage(mine, 0.1), 3), covered_90=round(coverage(mine, 0.05), 3)
        )

    return replace(table, kinds=tuple(covered(record) for record in table.kinds))


def left_out_sources(rows: Sequence[Judged]) -> dict[str, tuple[LeftOut, ...]]:
    """Return by source its runs, predicted as a plan would without anything learned from the source."""
    predictions: dict[str, tuple[LeftOut, ...]] = {}
    for origin in sorted({row.origin for row in rows}):
        table = learn([row for row in rows if row.origin != origin])
        predictions[origin] = tuple(_without_source(row, table) for row in rows if row.origin == origin)
    return predictions


def _without_source(row: Judged, table: Learned) -> LeftOut:
    evidence = evidence_for(table, row.software, row.accelerator, mixture=row.mixture)
    assert evidence.kind != "calibrated", "no constants were fitted there"
    ratio = row.unseen_ratio if evidence.kind == "never" else row.ratio
    return LeftOut(row, evidence.kind, ratio / evidence.factor, evidence.band)
