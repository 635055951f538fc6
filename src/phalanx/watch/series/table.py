"""The logged steps of a run in columns: 77 bytes a step, so that a hundred thousand steps of forty runs fit into a server's memory.

Every logged step has a row, in the order written, with those that a restart had computed again. Numbers that tell where and when
(step, time, tokens) and the loss are kept as they were logged; the others in single precision, which is more than any screen shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.observe.lines.step_index import FINE

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

KEPT_WHOLE = ("step", "attempt", "offset", "t", "tokens", "loss")
LOGGED = (*FINE, "has_ledger")
LATER = ("eval_loss", "eval_bits_per_byte")
"""Columns of numbers that other events bring, at the step to which they belong."""
NAMES = ("loss", *(name for name in LOGGED if name != "has_ledger"), *LATER)
"""The curves that there may be, but for those of memory by kind."""
ROW = (*KEPT_WHOLE, *LOGGED)
"""The order of numbers in a row (``phalanx.observe.lines.step_index.Row``)."""
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
    """A column that not every run has, such as memory of a kind: its rows and values."""

    rows: list[int]
    values: list[float]


class StepTable:
    """Columns that grow by rows."""

    def __init__(self) -> None:
        self.rows = 0
        self._columns: dict[str, npt.NDArray[np.generic]] = {
            name: np.empty(_FIRST_ROWS, dtype) for name, dtype in _TYPES.items()
        }
        self.sparse: dict[str, Column] = {}
        self._alive: Integers | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the columns take."""
        return sum(column.nbytes for column in self._columns.values()) + 100 * sum(
            len(column.rows) for column in self.sparse.values()
        )

    def to_bytes(self) -> dict[str, bytes]:
        """The columns, as they are in memory."""
        return {name: self.column(name).tobytes() for name in self._columns}

    @staticmethod
    def from_bytes(rows: int, columns: dict[str, bytes]) -> StepTable:
        """The inverse of ``to_bytes``. Raises ``ValueError`` and ``KeyError`` if a column is missing or not of that length."""
        table = StepTable()
        for name, dtype in _TYPES.items():
            found = np.frombuffer(columns[name], dtype)
            if len(found) != rows:
                raise ValueError(f"the column {name} has {len(found)} rows, not {rows}")
            table._columns[name] = found.copy() if rows else np.empty(_FIRST_ROWS, dtype)
        table.rows = rows
        return table

    def column(self, name: str) -> npt.NDArray[np.generic]:
        """The values of all rows. Raises ``KeyError`` for a name that no table has."""
        return self._columns[name][: self.rows]

    def append(self, rows: Sequence[Sequence[float | str | None]]) -> None:
        """Adds rows in the order of ``ROW``; ``None`` and the three words for numbers that are not finite are numbers here.

        Raises ``ValueError`` if a word is none of these; nothing is added then.
        """
        if not rows:
            return
        values = np.array(rows, np.float64)
        self.append_columns({name: values[:, number] for number, name in enumerate(ROW)}, len(rows))

    def append_columns(self, columns: Mapping[str, npt.NDArray[np.generic]], rows: int) -> None:
        """Adds so many rows, a column at a time: ``columns`` has those of ``ROW``."""
        end = self.rows + rows
        self.reserve(end)
        with np.errstate(over="ignore", invalid="ignore"):
            for name in ROW:
                self._columns[name][self.rows : end] = columns[name]
        for name in LATER:
            self._columns[name][self.rows : end] = np.nan
        self.rows, self._alive = end, None

    def reserve(self, rows: int) -> None:
        """Makes room for so many rows in all."""
        held = len(self._columns["step"])
        if rows <= held:
            return
        wanted = max(rows, held + held // 4)
        for name, column in self._columns.items():
            grown = np.empty(wanted, column.dtype)
            grown[: self.rows] = column[: self.rows]
            self._columns[name] = grown

    def set_at(self, step: int, name: str, value: float, before: int) -> None:
        """Notes a number that belongs to ``step``, in the newest of the first ``before`` rows that is not after it; before the first step there is none."""
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
        steps = self._columns["step"]
        row = before - 1
        # Evaluations follow their step: the search is short, but for damaged numbers.
        for back in range(min(before, 10_000)):
            if int(steps[row - back]) <= step:
                return row - back
        return None

    def alive(self) -> Integers:
        """The rows that no later one has replaced, in order: their steps ascend. Steps computed again count as computed last."""
        if self._alive is None:
            steps = self.column("step")
            least_after = np.minimum.accumulate(steps[::-1])[::-1]
            later = np.append(least_after[1:], np.int64(2**62)) if self.rows else least_after
            self._alive = np.flatnonzero(steps < later)
        return self._alive
