"""Published runs from which bands are learned: measured over predicted time, with the facts of their software and without.

They are kept in a table (``validation/data/residuals.csv``), so that the bands can be checked without judging the runs again.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import msgspec

from phalanx_plan.search.ranking import free_share
from validation.compare import Outcome
from validation.factors import CalibrationPoint

RESIDUALS = Path(__file__).parent / "data" / "residuals.csv"
"""Ratios of every row that was judged, so that bands can be checked without judging the rows again."""


@dataclass(frozen=True)
class Judged:
    """One published run: measured over predicted time with the facts of its software and without, and its utilization."""

    run: str
    origin: str
    software: str
    accelerator: str
    model: str
    mixture: bool
    precision: str
    ratio: float
    """Measured over predicted time, with the facts of the software and no factor."""
    unseen_ratio: float
    """The same, predicted as if the planner had not seen the software."""
    unseen_free: float
    """Share of the accelerator's memory that the fullest rank leaves free, predicted likewise; below zero if it does not fit."""
    mfu: float
    """Measured model FLOP, attention causal, over the dense peak of the format."""

    @property
    def subject(self) -> tuple[str, str]:
        """Runs that share it are no independent evidence of each other."""
        return self.model, self.accelerator

    @cached_property
    def point(self) -> CalibrationPoint:
        """The run as a point for the fit of factors."""
        return CalibrationPoint(
            self.software, self.accelerator, self.model, self.run, self.ratio, self.mixture
        )


def judged_rows(outcomes: Sequence[Outcome], unseen: Sequence[Outcome]) -> tuple[Judged, ...]:
    """Return the rows that have a time, each as its software and as one that the planner has not seen."""
    return tuple(
        _judged(seen, other)
        for seen, other in zip(outcomes, unseen, strict=True)
        if seen.time and seen.estimate and other.time
    )


def _judged(seen: Outcome, other: Outcome) -> Judged:
    setup, time, point = seen.setup, seen.time, seen.point
    assert setup is not None, "a row with a time has a setup"
    assert time is not None, "the caller chose rows with a time"
    assert point is not None, "a row with a time is a point"
    assert seen.estimate is not None, "a row with a time has an estimate"
    assert other.time is not None, "the caller chose rows with a time"
    assert other.estimate is not None, "a row with a time has an estimate"
    precision = seen.estimate.layout.precision
    accelerator = setup.job.cluster.accelerator
    flops = setup.job.workload.counts.flops_per_token_causal * seen.estimate.tokens / seen.estimate.ranks
    return Judged(
        run=seen.run.id,
        origin=seen.run.origin,
        software=point.software,
        accelerator=accelerator.key,
        model=point.model,
        mixture=point.mixture,
        precision=precision,
        ratio=round(point.ratio, 5),
        unseen_ratio=round(other.time.measured_s / other.time.predicted_s, 5),
        unseen_free=round(free_share(other.estimate), 5),
        mfu=round(flops / time.measured_s / accelerator.flops[precision].value, 5),
    )


def write_judged(rows: Iterable[Judged], path: Path = RESIDUALS) -> None:
    """Write rows to a CSV file whose columns are the fields of ``Judged``."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(Judged))
        writer.writerows([getattr(row, field.name) for field in fields(Judged)] for row in rows)


def read_judged(path: Path = RESIDUALS) -> tuple[Judged, ...]:
    """Read the rows that ``write_judged`` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(msgspec.convert(cells, Judged, strict=False) for cells in csv.DictReader(file))
