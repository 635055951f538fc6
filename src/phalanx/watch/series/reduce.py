"""Reduces a long series to as many points as a picture has columns, without hiding its peaks.

Each column of the picture keeps the lowest and the highest value in it, for the band, and one value for the line: its median, so that the
trend of a noisy quantity is seen. Where an extreme stands out of the bands beside it, the line has that extreme: a spike of one step in a hundred
thousand is still drawn. Averages would show a run that never was. Numbers that are not finite count as missing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.watch.series.table import Floats, Integers


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


def reduce_series(y: Floats, columns: Columns) -> Reduced:
    """Return the reduced values of ``y``."""
    y = np.where(np.isfinite(y), y, np.nan)
    lo = np.fmin.reduceat(y, columns.first)
    hi = np.fmax.reduceat(y, columns.first)
    return Reduced(_line(y, lo, hi, columns), lo, hi)


def _line(y: Floats, lo: Floats, hi: Floats, columns: Columns) -> Floats:
    """Return each column's median, or the extreme that stands out by more than the height of the bands beside it."""
    # NaN is sorted behind all numbers of its column.
    ascending = y[np.lexsort((y, columns.number))]
    counts = np.add.reduceat(np.isfinite(y).astype(np.int64), columns.first)
    line = ascending[columns.first + np.maximum(counts - 1, 0) // 2]
    # The line ends with the newest value, which is also shown as a number.
    newest = y[columns.first[-1] :]
    line[-1] = next((value for value in newest[::-1] if np.isfinite(value)), np.nan)
    lowest, highest = _beside(lo, np.fmin), _beside(hi, np.fmax)
    up, down = hi - highest, lowest - lo
    with np.errstate(invalid="ignore"):
        stands_out = np.fmax(up, down) > highest - lowest
        stands_out[-1] = False
        return np.where(stands_out, np.where(up > down, hi, lo), line)


def _beside(values: Floats, extreme: np.ufunc) -> Floats:
    """Return the extreme of the values before and after each; that of a lone value is its own."""
    padded = np.pad(values, 1, mode="reflect") if len(values) > 1 else np.repeat(values, 3)
    beside: Floats = extreme(padded[:-2], padded[2:])
    return beside


def rounded(values: Floats, digits: int = 7) -> list[float | None]:
    """The values in so many significant digits, for text; ``None`` for what is not finite."""
    with np.errstate(all="ignore"):
        magnitude = np.floor(np.log10(np.abs(values)))
        scale = 10.0 ** (digits - 1 - magnitude)
        short = np.round(values * scale) / scale
        short = np.where(np.isfinite(short), short, values)
    return [value if value - value == 0 else None for value in short.tolist()]
