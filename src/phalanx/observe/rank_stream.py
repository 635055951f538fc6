"""Measurements of every rank of a run over time, read from ``ranks.bin`` also while it is written.

In a synchronous run all ranks take equally long for a step, and the slow one communicates least, since nobody lets it wait. So the stream
keeps what is a rank's own: its computing, its waiting for samples, its memory, its temperature (``RankFrame``). A frame stands for a window of
steps, of ``observe.ranks_every_steps``; the format is ``rank_file.py``'s. A stream of 100,000 ranks over days is too large to
hold and too large to draw, so a ``heat_map`` is reduced while it is read: each cell is the largest value of its ranks and frames, and one
slow rank among a thousand still shows.

Frames are in the order in which they were written. Steps that were lost in a failure are computed again, and then stand there twice: both were
really computed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from phalanx.observe.rank_file import (
    RANK_COLUMNS,
    UNKNOWN,
    Codes,
    FrameHead,
    FrameIndex,
    RankFrame,
    RankStreamError,
    decode_column,
    open_for_reading,
)
from phalanx.observe.rank_writer import RankStreamWriter

__all__ = ("RANK_COLUMNS", "HeatMap", "RankFrame", "RankStream", "RankStreamError", "RankStreamWriter")


_MEDIAN_OF = 2000


@dataclass(frozen=True)
class HeatMap:
    """One column of the stream as a picture: ranks downward, time to the right."""

    values: NDArray[np.float32]
    """``(rows, columns)``: the largest value of the cell's ranks and frames; NaN where none is known."""
    rows: tuple[range, ...]
    """The places of each row's ranks among those that were ``drawn``."""
    drawn: NDArray[np.int64]
    """The ranks that are drawn, in their order."""
    column_steps: NDArray[np.int64]
    """``(columns,)``: the last step of each column."""
    column_times: NDArray[np.float64]
    """``(columns,)``: the unix time of that step."""
    usual: NDArray[np.float32]
    """``(columns,)``: the median of rows of so many ranks, those that are not drawn among them; NaN where none is known."""
    reduced: bool
    """True if a cell stands for more than one number."""

    @property
    def row_ranks(self) -> NDArray[np.int64]:
        """``(rows,)``: the first rank of each row."""
        return self.drawn[[places.start for places in self.rows]]

    @property
    def ranks(self) -> int:
        """Ranks of all rows."""
        return len(self.drawn)


class RankStream:
    """A reader of one file. Not for several threads at once. A missing file is an empty stream.

    Numbers whose checksum is wrong are not known (NaN); frames that may be damage are passed over. Every method that reads raises
    ``RankStreamError`` if the file is something else, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, if there is one, and index it. Raises ``RankStreamError``."""
        self.path = path
        self._descriptor = -1
        self._index: FrameIndex | None = None
        self._verified: set[tuple[int, int]] = set()
        self.steps = np.zeros(0, np.int64)
        """``(frames,)``: the last step of each frame's window."""
        self._times = np.zeros(0, np.float64)
        self.refresh()

    def refresh(self) -> bool:
        """Index what was written since the last call. Return True if frames came or went, or a file was opened.

        Another file of that name, also a coarsened one, is indexed from its start; a missing one is empty.
        Raises ``RankStreamError``.
        """
        before, descriptor = len(self), open_for_reading(self.path)
        if descriptor is None or not self._same_file(descriptor):
            self.close()
        if descriptor is None:
            return before > 0
        if self._index is None:
            self._descriptor, self._index = descriptor, FrameIndex(self.path, descriptor)
            before = -1
        else:
            os.close(descriptor)
        indexed = len(self._index.heads)
        with self._reading():
            self._index.extend()
        new = self._index.heads[indexed:]
        self.steps = np.append(self.steps, np.array([head.step for head in new], np.int64))
        self._times = np.append(self._times, np.array([head.t for head in new], np.float64))
        return len(self) != before

    def _same_file(self, descriptor: int) -> bool:
        if self._index is None:
            return False
        ours, theirs = os.fstat(self._descriptor), os.fstat(descriptor)
        return os.path.samestat(ours, theirs) and theirs.st_size >= self._index.position

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def ranks(self) -> int:
        """The number of ranks of the newest frame; 0 of an empty stream."""
        return self._index.heads[-1].ranks if self._index is not None and self._index.heads else 0

    def head(self, number: int) -> FrameHead:
        """Attempt, step, time and ranks of the frame at index ``number``; negative ones count from the end. Raises ``IndexError``."""
        return self._opened().heads[number]

    def column(self, number: int, column: str) -> NDArray[np.float32]:
        """One column of the frame at index ``number``, ``(ranks,)``. Raises ``IndexError``."""
        codes = self._codes(range(len(self))[number], RANK_COLUMNS.index(column))
        unknown = np.full(self.head(number).ranks, UNKNOWN, np.int16)
        return decode_column(column, unknown if codes is None else codes)

    def frame(self, number: int) -> RankFrame:
        """The frame at index ``number``; negative ones count from the end. Raises ``IndexError`` beyond it."""
        head = self.head(number)
        columns = {name: self.column(number, name) for name in RANK_COLUMNS}
        return RankFrame(head.step, head.t, head.attempt, head.ranks, columns, head.steps)

    def heat_map(
        self,
        column: str,
        first: int | None = None,
        last: int | None = None,
        most_columns: int = 800,
        most_rows: int = 400,
        order: NDArray[np.int64] | None = None,
        part: slice = slice(None),
    ) -> HeatMap:
        """Return the heat map of the frames of steps ``first`` to ``last`` (None: unlimited), in at most so many
        columns and rows.

        A cell has the largest value of its ranks and frames; damaged frames are left out. ``order`` has all ranks
        in the order in which they are drawn, by default by number, and ``part`` selects places of it. Frames are
        read one at a time.
        """
        chosen, place = self._between(first, last), RANK_COLUMNS.index(column)
        ranks = max((self._opened().heads[number].ranks for number in chosen), default=0)
        order = np.arange(ranks) if order is None else order[order < ranks]
        drawn = order[part]
        frame_groups, rank_groups = _groups(len(chosen), most_columns), _groups(len(drawn), most_rows)
        values = np.full((len(rank_groups), len(frame_groups)), UNKNOWN, np.int16)
        usual = np.full(len(frame_groups), UNKNOWN, np.int16)
        others = _some_rows(order, len(rank_groups[0])) if len(drawn) < len(order) and rank_groups else None
        ends = [chosen[group[-1]] for group in frame_groups]
        for number, group in enumerate(frame_groups):
            most = np.full(ranks, UNKNOWN, np.int16)
            for codes in self._undamaged_columns([chosen[position] for position in group], place):
                np.maximum(most[: len(codes)], codes, out=most[: len(codes)])
            if rank_groups:
                values[:, number] = np.maximum.reduceat(most[drawn], [rows.start for rows in rank_groups])
                usual[number] = _middle(values[:, number] if others is None else most[others].max(axis=1))
        return HeatMap(
            values=decode_column(column, values),
            rows=tuple(rank_groups),
            drawn=drawn,
            column_steps=self.steps[ends],
            column_times=self._times[ends],
            usual=decode_column(column, usual),
            reduced=len(rank_groups) < len(drawn) or len(frame_groups) < len(chosen),
        )

    def rank(
        self, column: str, rank: int, first: int | None = None, last: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the history of one rank between steps ``first`` and ``last``: steps and values, both
        ``(frames,)``.

        Frames without the rank are left out; a damaged value is NaN.
        """
        place = RANK_COLUMNS.index(column)
        chosen = [
            number for number in self._between(first, last) if 0 <= rank < self._opened().heads[number].ranks
        ]
        readings = (self._code_of_rank(number, place, rank) for number in chosen)
        codes = np.fromiter(readings, np.int16, len(chosen))
        return self.steps[chosen], decode_column(column, codes)

    def close(self) -> None:
        """Close the file, and drop its index."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._index = -1, None
        self._verified.clear()
        self.steps, self._times = self.steps[:0], self._times[:0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _opened(self) -> FrameIndex:
        if self._index is None:
            raise IndexError(f"there is no frame in {self.path}")
        return self._index

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Context in which an ``OSError`` becomes a ``RankStreamError`` with the file's name."""
        try:
            yield
        except OSError as error:
            raise RankStreamError(f"cannot read {self.path}: {error.strerror}") from error

    def _between(self, first: int | None, last: int | None) -> list[int]:
        """The numbers of the frames of the steps from ``first`` to ``last``."""
        lowest, highest = -1 if first is None else first, np.inf if last is None else last
        numbers: list[int] = np.flatnonzero((self.steps >= lowest) & (self.steps <= highest)).tolist()
        return numbers

    def _undamaged_columns(self, numbers: list[int], place: int) -> Iterator[Codes]:
        """Yield one column of each of these frames that is not damaged. Raises ``RankStreamError``."""
        for number in numbers:
            codes = self._codes(number, place)
            if codes is not None:
                yield codes

    def _codes(self, number: int, place: int) -> Codes | None:
        """Return one column of a frame as it is in the file; ``None`` if it is damaged. Raises ``RankStreamError``."""
        key = number, place
        with self._reading():
            codes = self._opened().codes(number, place, verified=key in self._verified)
        if codes is not None:
            self._verified.add(key)
        return codes

    def _code_of_rank(self, number: int, place: int, rank: int) -> int:
        """Return one number's code as it is in the file, ``UNKNOWN`` if it is damaged.

        The column around it is read only the first time, to be verified. Raises ``RankStreamError``.
        """
        if (number, place) not in self._verified:
            codes = self._codes(number, place)
            return UNKNOWN if codes is None else int(codes[rank])
        index = self._opened()
        offset = index.offsets[number] + index.heads[number].column_at(place) + 2 * rank
        with self._reading():
            block = os.pread(self._descriptor, 2, offset)
        return int.from_bytes(block, "little", signed=True) if len(block) == 2 else UNKNOWN


def _some_rows(order: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Ranks in rows of ``size`` neighbors, ``(rows, size)``: at most so many rows, spread over the whole order, as a median needs."""
    rows = order[: len(order) - len(order) % size].reshape(-1, size)
    return rows[:: max(1, len(rows) // _MEDIAN_OF)]


def _middle(codes: Codes) -> int:
    """The median of what is known."""
    measured = np.sort(codes[codes >= 0])
    return int(measured[len(measured) // 2]) if len(measured) else UNKNOWN


def _groups(count: int, most: int) -> list[range]:
    """``count`` things in at most ``most`` groups of neighbors, as even as can be."""
    parts = min(count, max(1, most))
    bounds = [part * count // parts for part in range(parts + 1)] if parts else []
    return [range(start, stop) for start, stop in pairwise(bounds)]
