"""Curves of a run for a chart: values over steps, tokens, operations or time, reduced to the points that a picture can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from phalanx.watch.series.marks import Mark
from phalanx.watch.series.reduce import columns_of, reduce_series
from phalanx.watch.series.run_series import RunSeries
from phalanx.watch.series.table import NAMES, Floats, Integers

Axis = Literal["step", "tokens", "flops", "time"]
AXES: tuple[Axis, ...] = get_args(Axis)
MOST_POINTS = 5000
LEAST_POINTS = 10
MOST_MARKS = 1000
_RANK = {
    "spike": 0,
    "nonfinite": 0,
    "straggler": 1,
    "recovery": 1,
    "left": 1,
    "message": 2,
    "evaluation": 3,
    "checkpoint": 4,
}
"""What is left out last where there are too many marks, first."""


class NoSuchCurveError(ValueError):
    """A curve or an axis that no run has; the message lists those that there are."""


@dataclass(frozen=True)
class Curve:
    """The value of the line at each x, and the lowest and highest value near it."""

    y: Floats
    lo: Floats
    hi: Floats


@dataclass(frozen=True)
class PlacedMark:
    """A mark and its place on the axis; ``None`` if it has none, before the first step."""

    x: float | None
    mark: Mark


@dataclass(frozen=True)
class Curves:
    """Curves over one axis."""

    x: Floats
    series: dict[str, Curve]
    reduced: bool
    """There are more logged steps in the range than points."""
    total: int
    """Logged steps in the range."""
    marks: list[PlacedMark]
    marks_left_out: int


def curves(
    run: RunSeries,
    names: Sequence[str],
    x: Axis = "step",
    first: float | None = None,
    last: float | None = None,
    points: int = 1200,
    flops_per_token: float | None = None,
) -> Curves:
    """The curves ``names`` of a run over the axis ``x``, from ``first`` to ``last`` on it, in about ``points`` points.

    A step that was computed several times counts as it was computed last. ``time`` is in seconds since the run began, ``flops`` in
    operations of the model, by its operations a token. Raises ``NoSuchCurveError``.
    """
    points = min(max(points, LEAST_POINTS), MOST_POINTS)
    with run.lock:
        rows = run.table.alive()
        along = _axis(run, rows, x, flops_per_token)
        inside = _inside(along, first, last)
        rows, shown = rows[inside], along[inside]
        series: dict[str, Curve] = {}
        columns = columns_of(shown, points) if len(shown) > points else None
        for name in dict.fromkeys(names):
            values = _values(run, name, rows)
            if columns is None:
                series[name] = Curve(values, values, values)
            else:
                reduced = reduce_series(values, columns)
                series[name] = Curve(reduced.y, reduced.lo, reduced.hi)
        marks = _marks(run, along, first, last)
    return Curves(
        x=shown if columns is None else shown[columns.first],
        series=series,
        reduced=columns is not None,
        total=len(rows),
        marks=marks[0],
        marks_left_out=marks[1],
    )


def _axis(run: RunSeries, rows: Integers, x: Axis, flops_per_token: float | None) -> Floats:
    """The place of each row on the axis; it never goes back, whatever a clock that was set back or a damaged line says."""
    match x:
        case "step":
            return run.table.column("step")[rows].astype(np.float64)
        case "tokens" | "flops":
            if x == "flops" and not flops_per_token:
                raise NoSuchCurveError(
                    "x=flops: the operations of this run's model are not known; x=tokens is"
                )
            tokens = run.table.column("tokens")[rows].astype(np.float64)
            return np.maximum.accumulate(
                tokens * (flops_per_token if x == "flops" and flops_per_token else 1.0)
            )
        case "time":
            t = run.table.column("t")[rows].astype(np.float64)
            return np.maximum.accumulate(np.maximum(t - began(run), 0.0)) if len(t) else t
    raise NoSuchCurveError(f"x={x}: there is no such axis; there are {', '.join(AXES)}")


def began(run: RunSeries) -> float:
    """When the run began: its first start, or its first step, whichever is earlier."""
    known = [event.t for event in list(run.starts)[:1]]
    if run.table.rows:
        known.append(float(run.table.column("t")[0]))
    return min(known, default=0.0)


def _inside(along: Floats, first: float | None, last: float | None) -> slice:
    """The rows in the range, with one more on either side, so that the line leaves the picture where it should."""
    start = 0 if first is None else int(np.searchsorted(along, first, "left"))
    end = len(along) if last is None else int(np.searchsorted(along, last, "right"))
    return slice(max(0, start - (first is not None)), max(start, end + (last is not None)))


def _values(run: RunSeries, name: str, rows: Integers) -> Floats:
    if name in NAMES:
        return run.table.column(name)[rows].astype(np.float64)
    sparse = run.table.sparse.get(name)
    if sparse is None:
        if name.startswith("memory."):
            return np.full(len(rows), np.nan)
        listed = ", ".join((*NAMES, *sorted(run.table.sparse)))
        raise NoSuchCurveError(f"there is no curve {name[:100]!r}; there are {listed}")
    every = np.full(run.table.rows, np.nan)
    every[sparse.rows] = sparse.values
    return every[rows]


def _marks(
    run: RunSeries, along: Floats, first: float | None, last: float | None
) -> tuple[list[PlacedMark], int]:
    """The marks in the range, by x; of too many the weightiest are kept, and among equals the newest."""
    steps = run.table.column("step")[run.table.alive()]
    marks = list(run.marks)
    at = np.searchsorted(steps, [mark.step for mark in marks], "left")
    placed = []
    for mark, index in zip(marks, at.tolist(), strict=True):
        x = float(along[min(index, len(along) - 1)]) if len(along) else None
        if x is None or not ((first is not None and x < first) or (last is not None and x > last)):
            placed.append(PlacedMark(x, mark))
    if len(placed) <= MOST_MARKS:
        return placed, 0
    order = sorted(range(len(placed)), key=lambda n: (_RANK.get(placed[n].mark.kind, 2), -n))[:MOST_MARKS]
    return [placed[number] for number in sorted(order)], len(placed) - MOST_MARKS
