"""Logged steps of a run in columns: decoded from their lines, stored in 77 bytes per step, and reduced to the columns
of a picture.

Every logged step has a row, in the order written, including steps that a restart computed again. Positions (step,
time, tokens) and the loss keep their precision; the other numbers are fp32, which exceeds any screen.

Each column of the picture has the minimum and maximum for the band, and one value for the line: the median, which
shows the trend of a noisy quantity. If an extreme stands out of the neighboring bands, the line has that extreme, so
a spike of one step in a hundred thousand is still drawn. Averages would show values that never occurred. Numbers that
are not finite count as missing.

A run of 100,000 steps has 100,000 such lines and a few thousand others. A line that the fast path does not parse
(another kind, an unusual type, a torn line) goes to ``phalanx.observe.events.decode``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from phalanx.observe.event_log import FINE, Row, StepLine, row_of

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

KEPT_WHOLE = ("step", "attempt", "offset", "t", "tokens", "loss")
LOGGED = (*FINE, "has_ledger")
LATER = ("eval_loss", "eval_bits_per_byte")
"""Columns that other events fill, at the step to which they belong."""
NAMES = ("loss", *(name for name in LOGGED if name != "has_ledger"), *LATER)
"""All possible curves, except memory by kind."""
ROW = (*KEPT_WHOLE, *LOGGED)
"""Order of numbers in a row (``phalanx.observe.event_log.Row``)."""
_TYPES: dict[str, npt.DTypeLike] = {
    **dict.fromkeys((*LOGGED, *LATER), np.float32),
    **dict.fromkeys(("t", "tokens", "loss"), np.float64),
    "step": np.int32,
    "attempt": np.int32,
    "offset": np.int64,
    "has_ledger": np.bool_,
}
_FIRST_ROWS = 256
_MOST_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Column:
    """A sparse column, such as memory of a kind: its rows and values."""

    rows: list[int]
    values: list[float]


class StepTable:
    """Growing columns of logged steps."""

    def __init__(self) -> None:
        """Begin without rows, with memory for ``_FIRST_ROWS``."""
        self.rows = 0
        self._columns: dict[str, npt.NDArray[np.generic]] = {
            name: np.empty(_FIRST_ROWS, dtype) for name, dtype in _TYPES.items()
        }
        self.sparse: dict[str, Column] = {}
        self._alive: Integers | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the columns."""
        return sum(column.nbytes for column in self._columns.values()) + 100 * sum(
            len(column.rows) for column in self.sparse.values()
        )

    def column(self, name: str) -> npt.NDArray[np.generic]:
        """Return the values of all rows. Raises ``KeyError`` for an unknown name."""
        return self._columns[name][: self.rows]

    def append(self, rows: Sequence[Sequence[float | str | None]]) -> None:
        """Add rows in the order of ``ROW``. ``None`` and the three words for numbers that are not finite are
        accepted.

        Raises ``ValueError`` for another word; then nothing is added.
        """
        if not rows:
            return
        values = np.array(rows, np.float64)
        self.append_columns({name: values[:, number] for number, name in enumerate(ROW)}, len(rows))

    def append_columns(self, columns: Mapping[str, npt.NDArray[np.generic]], rows: int) -> None:
        """Add ``rows`` rows by column: ``columns`` has those of ``ROW``; the columns set later begin as NaN."""
        end = self.rows + rows
        self.reserve(end)
        with np.errstate(over="ignore", invalid="ignore"):
            for name in ROW:
                self._columns[name][self.rows : end] = columns[name]
        for name in LATER:
            self._columns[name][self.rows : end] = np.nan
        self.rows, self._alive = end, None

    def reserve(self, rows: int) -> None:
        """Allocate memory for ``rows`` rows in total, and at least a quarter more than now; nothing if there is enough."""
        capacity = len(self._columns["step"])
        if rows <= capacity:
            return
        new_capacity = max(rows, capacity + capacity // 4)
        for name, column in self._columns.items():
            grown = np.empty(new_capacity, column.dtype)
            grown[: self.rows] = column[: self.rows]
            self._columns[name] = grown

    def set_at(self, step: int, name: str, value: float, before: int) -> None:
        """Set a number of ``step``, in the newest of the first ``before`` rows whose step is not later. A sparse column gets a new entry.

        Ignored if none of the newest 10,000 of these rows is of such a step.
        """
        row = self._newest_row(step, before)
        if row is None:
            return
        if name in LATER:
            self._columns[name][row] = (
                value if abs(value) <= _MOST_FLOAT32 else math.copysign(math.inf, value)
            )
        else:
            column = self.sparse.setdefault(name, Column([], []))
            column.rows.append(row)
            column.values.append(value)

    def _newest_row(self, step: int, before: int) -> int | None:
        """Return the newest of the first ``before`` rows whose step is at most ``step``; None if there is none within 10,000."""
        steps = self._columns["step"]
        row = before - 1
        # Evaluations follow their step, so the search is short except for damaged numbers.
        for back in range(min(before, 10_000)):
            if int(steps[row - back]) <= step:
                return row - back
        return None

    def alive(self) -> Integers:
        """Return the rows that no later one replaces, cached until rows are added; their steps ascend.

        The last computation of a step counts: a row is replaced by a later row of the same or an earlier step.
        """
        if self._alive is None:
            steps = self.column("step")
            least_after = np.minimum.accumulate(steps[::-1])[::-1]
            later = np.append(least_after[1:], np.int64(2**62)) if self.rows else least_after
            self._alive = np.flatnonzero(steps < later)
        return self._alive


# The line of a step, decoded straight into a row of numbers, ten times as fast as by the general decoder.


_STEP = b'"kind":"Step"'
LATEST_S = 1e10


_DECODER = msgspec.json.Decoder(StepLine)


def step_row(line: bytes, offset: int) -> Row | None:
    """Return the row of a logged step, in the order of ``ROW``; None if the line needs the general decoder."""
    if _STEP not in line:
        return None
    try:
        step = _DECODER.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if step.kind != "Step" or not 0 <= step.t < LATEST_S:
        return None
    return row_of(step, step.t, step.attempt, offset, len(step.ledger) > 2)


# Reduction to as many points as a picture has columns.


@dataclass(frozen=True)
class Columns:
    """Division of points, whose x ascends, into columns of equal width."""

    first: Integers
    """Index of each column's first point."""
    number: Integers
    """Column of each point, counted among those that have points."""

    def __len__(self) -> int:
        return len(self.first)


def columns_of(x: Floats, most: int) -> Columns:
    """Divide the range of ``x``, ascending and not empty, into at most ``most`` columns of equal width.

    Return, without empty columns, the index of the first point of each column, and the column of each point.
    """
    low, high = float(x[0]), float(x[-1])
    width = (high - low) / most or 1.0
    place = np.minimum((x - low) / width, most - 1).astype(np.int64)
    begins = np.empty(len(x), np.bool_)
    begins[0] = True
    np.not_equal(place[1:], place[:-1], out=begins[1:])
    return Columns(np.flatnonzero(begins), np.cumsum(begins) - 1)


@dataclass(frozen=True)
class Reduced:
    """One value per column for the line, and the extremes; NaN if a column has no finite value. All three are the values if there are few."""

    y: Floats
    lo: Floats
    hi: Floats


def reduce_series(y: Floats, columns: Columns) -> Reduced:
    """Return the reduced values of ``y``: least and largest of each column, and a line of medians and outliers.

    Values that are not finite are ignored; a column without others is NaN.
    """
    y = np.where(np.isfinite(y), y, np.nan)
    lo = np.fmin.reduceat(y, columns.first)
    hi = np.fmax.reduceat(y, columns.first)
    return Reduced(_line(y, lo, hi, columns), lo, hi)


def _line(y: Floats, lo: Floats, hi: Floats, columns: Columns) -> Floats:
    """Return each column's median, or the extreme that stands out by more than the height of the bands beside it.

    The last column has its newest finite value.
    """
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
    """Return the values rounded to ``digits`` significant digits; None for values that are not finite."""
    with np.errstate(all="ignore"):
        magnitude = np.floor(np.log10(np.abs(values)))
        scale = 10.0 ** (digits - 1 - magnitude)
        short = np.round(values * scale) / scale
        short = np.where(np.isfinite(short), short, values)
    return [value if value - value == 0 else None for value in short.tolist()]
