"""Reader of logged steps from the index of an event stream, verified against the stream: a hundred thousand steps in
some milliseconds.

The index (``observe/event_log.py``) may be torn, old, or of another stream, and the stream is authoritative. Records
count only if their checksum is valid, they are contiguous in the stream, and a sample of each chunk equals its lines.
Lines without a record are returned as text, to be parsed normally. After the first invalid chunk, all lines are.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from phalanx.observe.event_log import (
    FINE,
    MIXERS,
    MOST_WHOLE,
    RECORD_BYTES,
    SEED,
    TITLE,
    encode_record,
)
from phalanx.run.directory.files import open_regular
from phalanx_watch.series.table import LATEST_S, step_row

CHUNK_RECORDS = 1 << 16
"""Records per read: 6 MiB."""
_MOST_ROWS_AHEAD = 1 << 17
"""Limit on rows that are reserved, since a file may claim any length."""
_MOST_GAP_BYTES = 1 << 20
"""Longest gap without records; after a longer one the rest is parsed. No line in a shorter gap can be too long for
an event.
"""
_MOST_GAPS_BYTES = 1 << 25
"""Most bytes without records in one chunk, whose lines are in memory at once."""
_HELD_AGAINST = 8
"""Records of a chunk that are compared with their lines."""
_PLACES = {"offset": "<u8", "t": "<f8", "length": "<u4", "step": "<i4", "has_ledger": "<u4", "attempt": "<i4"}
_RECORD = np.dtype(
    [*_PLACES.items(), ("tokens", "<f8"), ("loss", "<f8"), *((name, "<f4") for name in FINE), ("sum", "<u8")]
)
assert _RECORD.itemsize == RECORD_BYTES
_MIXERS = np.array([*MIXERS, 0], np.uint64)
Records = NDArray[np.void]


@dataclass(frozen=True)
class Stretch:
    """Part of a stream: lines without a record, each with its offset, and then steps, as records."""

    lines: tuple[tuple[int, bytes], ...]
    records: Records

    @property
    def may_hold_a_step(self) -> bool:
        """False if no line can be a step: a step's line contains the word, literally or escaped."""
        return any(b"Step" in line or b"\\u" in line for _, line in self.lines)


@dataclass(frozen=True)
class Chunk:
    """Result of one read of an index: contiguous parts, and the records of all of them."""

    stretches: tuple[Stretch, ...] = ()
    records: Records = field(default_factory=lambda: np.zeros(0, _RECORD))


class StepIndex:
    """Index of one stream, read once from its start to its end or to the first invalid chunk."""

    def __init__(
        self,
        path: Path,
        *,
        chunk_records: int = CHUNK_RECORDS,
        max_gap_bytes_in_chunk: int = _MOST_GAPS_BYTES,
    ) -> None:
        """Begin before the first record; nothing is read before ``next_chunk``.

        Args:
            path: The index.
            chunk_records: Records that are read at once.
            max_gap_bytes_in_chunk: Limit of the bytes without records in one chunk, whose lines are in memory at once.
        """
        self._chunk_records, self._max_gap_bytes_in_chunk = chunk_records, max_gap_bytes_in_chunk
        self.path = path
        self.over = False
        """True at the end of the index."""
        self.read_bytes = 0
        """Offset in the stream of the end of the returned parts."""
        self.rows_ahead = 0
        """Rows to reserve before the last chunk is taken, so that columns are not moved with every chunk."""
        self._at = len(TITLE)
        self._stream: tuple[int, int] | None = None

    def next_chunk(self, events: Path) -> Chunk:
        """Return the next part of the stream at ``events``. Sets ``over`` at the end, or if a file cannot be read."""
        try:
            with open_regular(self.path) as file, open_regular(events) as stream:
                return self._chunk(file, stream)
        except OSError:
            self.over = True
            return Chunk()

    def _chunk(self, file: BinaryIO, stream: BinaryIO) -> Chunk:
        """Return the next records and the lines between them.

        Nothing, and ``over``, if the index is of another stream or does not fit this one. Damaged records are left
        out, so their lines are parsed.
        """
        status = os.fstat(stream.fileno())
        before, self._stream = self._stream, (status.st_dev, status.st_ino)
        # A larger buffer than needed would cost ten times the read, because its memory is mapped and freed again.
        unread_bytes = max(0, os.fstat(file.fileno()).st_size - self._at)
        self.rows_ahead = min(unread_bytes // RECORD_BYTES, _MOST_ROWS_AHEAD)
        raw = os.pread(file.fileno(), min(self._chunk_records * RECORD_BYTES, unread_bytes), self._at)
        is_sound = before in (None, self._stream) and os.pread(file.fileno(), len(TITLE), 0) == TITLE
        records = _sound(raw) if is_sound else np.zeros(0, _RECORD)
        self._at += len(raw)
        self.over = len(raw) < self._chunk_records * RECORD_BYTES
        if not len(records):
            return Chunk()
        if not (self._in_order(records, status.st_size) and _agree(records, stream)):
            self.over = True
            return Chunk()
        stretches = tuple(self._stretches(records, stream))
        return Chunk(stretches, records[: sum(len(stretch.records) for stretch in stretches)])

    def _in_order(self, records: Records, size: int) -> bool:
        """Return True if the lines follow each other from the end of the last chunk, within a stream of ``size`` bytes.

        They may not overlap. The gaps between them are limited, each by ``_MOST_GAP_BYTES``, and together by the limit
        of a chunk.
        """
        starts, ends = _places(records)
        if ends.max() > size:
            return False
        gaps = starts - np.concatenate(([self.read_bytes], ends[:-1]))
        return bool(
            gaps.min() >= 0 and gaps.max() <= _MOST_GAP_BYTES and gaps.sum() <= self._max_gap_bytes_in_chunk
        )

    def _stretches(self, records: Records, stream: BinaryIO) -> Iterator[Stretch]:
        """Yield the records in contiguous parts, each with the lines before it. Ends at a gap that does not end with a line."""
        starts, ends = _places(records)
        before = np.concatenate(([self.read_bytes], ends[:-1]))
        begins = np.flatnonzero(starts != before)
        cuts = [*(begins.tolist() if len(begins) and begins[0] == 0 else [0, *begins.tolist()]), len(records)]
        for first, last in pairwise(cuts):
            gap = os.pread(stream.fileno(), int(starts[first] - before[first]), int(before[first]))
            if gap and not gap.endswith(b"\n"):  # a record that begins within a line
                self.over = True
                return
            yield Stretch(tuple(_lines(gap, int(before[first]))), records[first:last])
            self.read_bytes = int(ends[last - 1])


def _sound(raw: bytes) -> Records:
    """Return the records with a valid checksum and plausible numbers, as ``step_row`` requires for a line; a cut last one is dropped."""
    raw = raw[: len(raw) - len(raw) % RECORD_BYTES]
    words = np.frombuffer(raw, "<u8").reshape(-1, RECORD_BYTES // 8)
    sound = words @ _MIXERS + np.uint64(SEED) == words[:, -1]
    records = np.frombuffer(raw, _RECORD)
    t, tokens = records["t"], records["tokens"]
    sound &= (t >= 0) & (t < LATEST_S) & (tokens >= 0) & (tokens <= MOST_WHOLE) & (records["step"] >= 0)
    return records if sound.all() else records[sound]


def _places(records: Records) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the begin and end of each record's line."""
    starts = np.minimum(records["offset"], np.uint64(1 << 62)).astype(np.int64)
    return starts, starts + records["length"].astype(np.int64)


def _agree(records: Records, stream: BinaryIO) -> bool:
    """Return True if ``_HELD_AGAINST`` evenly spaced records, with the first and the last, equal their lines in the stream."""
    for number in np.unique(np.linspace(0, len(records) - 1, _HELD_AGAINST).astype(np.int64)).tolist():
        record = records[number]
        offset, length = int(record["offset"]), int(record["length"])
        line = os.pread(stream.fileno(), min(length, _MOST_GAP_BYTES), offset)
        row = step_row(line, offset) if line.endswith(b"\n") else None
        with suppress(ValueError, TypeError, OverflowError, struct.error):
            if row is not None and encode_record(row, length) == record.tobytes():
                continue
        return False
    return True


def _lines(gap: bytes, offset: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a gap that are not blank, each with its offset."""
    for line in gap.split(b"\n"):
        if line.strip():
            yield offset, line
        offset += len(line) + 1


def columns_of(records: Records) -> dict[str, NDArray[np.generic]]:
    """Return the columns of the records, as a table takes them."""
    return {name: records[name] for name in _RECORD.names or () if name not in ("length", "sum")}
