"""Reduces a long series to as many points as a picture has columns, without hiding its peaks.

Each column of the picture keeps the lowest and the highest value in it, so that a spike of one step in a hundred thousand is still
drawn, and one point for the line, chosen by largest triangles among the column's extremes and ends ("MinMaxLTTB: Leveraging MinMax-Preselection
to Scale LTTB", arXiv:2305.00332; LTTB: Steinarsson, "Downsampling Time Series for Visual Representation", 2013). Averages would show
a run that never was. Numbers that are not finite count as missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.watch.series.table import Floats, Integers

Point = tuple[float, float]


@dataclass(frozen=True)
class Columns:
    """The division of points, whose x ascends, into columns of equal width: where each column that has points begins."""

    first: Integers
    """Index of each column's first point."""
    number: Integers
    """The column of each point, counted among those that have points."""

    def __len__(self) -> int:
        return len(self.first)


def columns_of(x: Floats, most: int) -> Columns:
    """Divides the range of ``x``, ascending and not empty, into at most ``most`` columns of equal width."""
    low, high = float(x[0]), float(x[-1])
    width = (high - low) / most or 1.0
    place = np.minimum((x - low) / width, most - 1).astype(np.int64)
    begins = np.empty(len(x), np.bool_)
    begins[0] = True
    np.not_equal(place[1:], place[:-1], out=begins[1:])
    return Columns(np.flatnonzero(begins), np.cumsum(begins) - 1)


@dataclass(frozen=True)
class Reduced:
    """One value a column for the line, and the extremes; NaN where a column has no finite value."""

    y: Floats
    lo: Floats
    hi: Floats


def reduce_series(x: Floats, y: Floats, columns: Columns) -> Reduced:
    """The reduced values of ``y`` at ``x``."""
    y = np.where(np.isfinite(y), y, np.nan)
    lo = np.fmin.reduceat(y, columns.first)
    hi = np.fmax.reduceat(y, columns.first)
    return Reduced(_line(x, y, lo, hi, columns), lo, hi)


def _line(x: Floats, y: Floats, lo: Floats, hi: Floats, columns: Columns) -> Floats:
    """The candidate of each column that spans the largest triangle with the point chosen before and the mean of the next column."""
    ends = np.append(columns.first[1:], len(x)) - 1
    candidates = np.stack(
        (columns.first, _first_equal(y, lo, columns), _first_equal(y, hi, columns), ends), axis=1
    )
    cx, cy = x[candidates], y[candidates]
    finite = np.isfinite(cy)
    mean_x = (x[columns.first] + x[ends]) / 2
    mean_y = np.where(np.isfinite(lo), (lo + hi) / 2, 0.0)
    chosen = np.full(len(columns), np.nan)
    before: Point | None = None
    rows = zip(cx.tolist(), cy.tolist(), finite.tolist(), strict=True)
    nexts = list(zip(mean_x[1:].tolist(), mean_y[1:].tolist(), strict=True))
    for number, (xs, ys, good) in enumerate(rows):
        points = [(a, b) for a, b, ok in zip(xs, ys, good, strict=True) if ok]
        if not points:
            continue
        if before is None:
            best = points[0]
        elif number == len(nexts):
            best = points[-1]
        else:
            best = _largest(before, points, nexts[number])
        chosen[number], before = best[1], best
    return chosen


def _largest(a: Point, points: Sequence[Point], c: Point) -> Point:
    """The point that spans the largest triangle with ``a`` and ``c``, the first of equal ones; an area that overflows to NaN never wins."""
    best, most = points[0], -1.0
    ax, ay = a
    wide, high = ax - c[0], c[1] - ay
    for point in points:
        area = abs(wide * (point[1] - ay) - (ax - point[0]) * high)  # twice its area
        if area > most:
            best, most = point, area
    return best


def _first_equal(y: Floats, wanted: Floats, columns: Columns) -> Integers:
    """Index of each column's first point whose value is ``wanted`` of the column; its first point where that is NaN."""
    equal = np.flatnonzero(y == wanted[columns.number])
    of = columns.number[equal]
    found = columns.first.copy()
    # Written backward, so that the first of a column is written last.
    found[of[::-1]] = equal[::-1]
    return found


def rounded(values: Floats, digits: int = 7) -> list[float | None]:
    """The values in so many significant digits, for text; ``None`` for what is not finite."""
    with np.errstate(all="ignore"):
        magnitude = np.floor(np.log10(np.abs(values)))
        scale = 10.0 ** (digits - 1 - magnitude)
        short = np.round(values * scale) / scale
        short = np.where(np.isfinite(short), short, values)
    return [value if value - value == 0 else None for value in short.tolist()]
