"""The file of a run's events: an append-only log that each attempt writes and every viewer reads.

A line is one ``write`` on a file opened for appending, so what was appended survives a kill of the
process. A kill in the middle of it leaves at most one torn line: the next writer closes that line
first, and readers report it and continue. Readers need no lock and may come while the run writes.

The last section is the index of logged steps beside it, ``steps.bin``.
"""

from __future__ import annotations

import math
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from phalanx.observe.events import Body, Event, Step, Torn, Unknown, decode, encode
from phalanx.observe.lines import AppendedFile, FileTail, blocks_from_the_end
from phalanx.run.directory.files import open_regular

MOST_LINE_BYTES = 16 << 20
"""A longer line is no event that a run writes: readers pass it over, and hold not more than that of it."""

_NO_EVENT = b"?"


class EventLogError(Exception):
    """The event file cannot be read or written; the message names it and the remedy."""


# --- writing ------------------------------------------------------------------------------------


class EventLog:
    """Writer of the events of one attempt. One process of a run holds one; threads may share it.

    Nothing is buffered: what ``append`` returned from survives a kill of the process. It is not
    synced to the disk, so a power cut may cost the last seconds of events (never of weights).
    Where logged steps lie is noted beside the file (``steps.bin``), for fast readers.
    """

    def __init__(self, path: Path, attempt: int, clock: Callable[[], float] = time.time) -> None:
        """Open the file at ``path`` for appending, with its index of steps beside it. Raises EventLogError."""
        self.path, self.attempt, self._clock = path, attempt, clock
        try:
            self._file = AppendedFile(path)
        except OSError as error:
            raise EventLogError(
                f"cannot open {path} for appending: {error.strerror}; "
                "give the run a directory that exists and that you may write to"
            ) from error
        self._index = StepIndexWriter(index_beside(path), is_empty=not self._file.size_bytes)
        self._lock = threading.Lock()

    def append(self, body: Body) -> Event:
        """Write one event and return it, stamped with the time and the attempt; a step also goes to the index.

        Raises EventLogError if it cannot be written whole, as on a full disk; the file stays readable.
        """
        event = Event(self._clock(), self.attempt, body)
        line = encode(event)
        try:
            with self._lock:
                offset = self._file.append(line)
                if isinstance(body, Step):
                    self._index.add(body, event.t, event.attempt, offset, len(line))
        except OSError as error:
            raise EventLogError(
                f"cannot append to {self.path}: {error.strerror}; what was written before is intact. "
                "Free space (or fix the mount) and start the run again: it resumes from its last checkpoint"
            ) from error
        return event

    def close(self) -> None:
        with self._lock:
            self._index.close()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# --- reading ------------------------------------------------------------------------------------


def read_events(path: Path) -> Iterator[Event]:
    """Yield all events in the file, in the order written. An unfinished last line counts only if it is a complete
    object.

    Raises EventLogError if there is no such file, or it shrinks meanwhile.
    """
    return follow(path, stop=lambda: True, poll_s=0.0)


def newest_event(path: Path, counts: Callable[[Event], bool], block_bytes: int = 1 << 16) -> Event | None:
    """Return the last event for which ``counts`` is true, or ``None``; torn lines are skipped.

    Reads from the end, so that it costs the same in a run's first hour and in its third month.
    Raises EventLogError if the file cannot be read.
    """
    try:
        with open_regular(path) as file:
            for line in lines_from_the_end(file, block_bytes):
                with suppress(ValueError, RecursionError):
                    if counts(event := decode(line)):
                        return event
    except OSError as error:
        raise EventLogError(f"cannot read {path}: {error.strerror}") from error
    return None


def lines_from_the_end(file: BinaryIO, block_bytes: int, most_bytes: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a file that are not empty, the last one first, as ``blocks_from_the_end`` reads them; lines longer than
    ``MOST_LINE_BYTES`` are left out.
    """
    for block in blocks_from_the_end(file, block_bytes, most_bytes, MOST_LINE_BYTES):
        yield from (
            line for line in reversed(block.split(b"\n")) if line.strip() and len(line) <= MOST_LINE_BYTES
        )


def follow(path: Path, stop: Callable[[], bool], poll_s: float = 0.2) -> Iterator[Event]:
    """Yield the events in the file, then those appended to it, until ``stop()`` and nothing new is there.

    The file is awaited if it does not exist. ``stop`` is called before each look at the file, ``poll_s`` seconds
    apart once all is read. Unreadable lines become ``Torn``. Raises EventLogError if the file is missing at the
    end, or shrinks.
    """
    tail = FileTail(path, most_line_bytes=MOST_LINE_BYTES, instead_of_long=_NO_EVENT)
    number, last = 0, Event(0.0, 0, Unknown("", {}))
    while True:
        stopping = stop()  # read before the file, so that no event that was written before the stop is lost
        before = tail.read_bytes
        lines = _next_lines(tail, missing_is_error=stopping)
        over = tail.read_bytes == before
        if over and stopping:
            lines += _last_event_line(tail.rest)
        for line in lines:
            number += 1
            last = _decode_or_torn(line, number, last)
            yield last
        if over:
            if stopping:
                return
            time.sleep(poll_s)


def _next_lines(tail: FileTail, *, missing_is_error: bool) -> list[bytes]:
    """Return the complete lines of the next block; of a file that never existed, none.

    Call again while ``tail.read_bytes`` grows, also after an empty list: a block may contain no end of a line.
    Raises EventLogError if the file is unreadable, shrank, was replaced or removed; with ``missing_is_error`` also
    if it never existed.
    """
    block = tail.read_bytes
    try:
        batch = tail.next_batch()
    except OSError as error:
        raise EventLogError(f"cannot read {tail.path}: {error.strerror}") from error
    if batch.restarted and tail.has_file:
        raise EventLogError(
            f"{tail.path} shrank from {block} to {tail.size_bytes} bytes while being read, or is another file: it is "
            "only ever appended to, so something else wrote it; open it again"
        )
    if not tail.has_file and (missing_is_error or batch.restarted):
        raise EventLogError(
            f"there is no event file {tail.path}; is it the directory of a run that has started?"
        )
    return [line for _, line in batch.lines]


def _last_event_line(rest: bytes) -> list[bytes]:
    """Return ``rest``, a last line without its newline, in a list if it is an event, else nothing.

    A prefix of an object never parses.
    """
    try:
        decode(rest)
    except ValueError:
        return []
    return [rest]


def _decode_or_torn(line: bytes, number: int, last: Event) -> Event:
    try:
        return decode(line)
    except (ValueError, RecursionError):
        return Event(last.t, last.attempt, Torn(number, line[:200].decode(errors="replace")))


def next_attempt(path: Path) -> int:
    """The number for the next attempt at the run whose events are in ``path``: 0 if there are none. Raises as
    ``read_events`` does.
    """
    if not path.exists():
        return 0
    return max((event.attempt + 1 for event in read_events(path)), default=0)


# ``steps.bin``: an index of the logged steps beside the event stream, so that a curve can be drawn without parsing the stream.
#
# A step's line in the event stream has 0.7 kB and takes some microseconds to parse; forty runs of 100,000 steps are 3 GB. The
# index has a record of 96 bytes for each such line: its offset, its length, and the numbers that are drawn. It is only a cache
# of the stream. A reader compares records with their lines (``phalanx_watch/series/indexed.py``) and parses lines without a
# record. The file may be deleted at any time.
#
# Records have one size, and each has a checksum over its own words. They are written in groups, when the newest group is full
# and at the end. A kill loses the group, whose lines are then parsed. Write errors are ignored: the index never stops or slows
# a run.
#
#     0   u8  offset of the line in events.jsonl        28  i4  attempt
#     8   f8  t, unix seconds                           32  f8  tokens
#     16  u4  length of the line, its newline included  40  f8  loss
#     20  i4  step                                      48  f4  ten numbers in the order of ``FINE``
#     24  u4  1 if the line has a ledger                88  u8  checksum


Number = float | str | None
"""As JSON carries it: numbers that are not finite are words."""
Row = tuple[Number, ...]
"""A logged step: step, attempt, offset of its line, time, tokens, loss, the numbers of ``FINE``, and 1 if it has a ledger."""

FINE = (
    *("grad_norm", "lr", "tokens_per_s", "step_s", "mfu", "bits_per_byte", "goodput"),
    *("peak_memory_bytes", "balance", "data_wait_share"),
)
"""Columns in single precision, which is more than any screen shows."""
MOST_STEP = 2**31 - 1
MOST_WHOLE = 2**53
"""Larger whole numbers are not exact in double precision; no run counts so far."""
TITLE = b"phalanx steps 1: see observe/lines/step_index.py\n"
TITLE += b"\0" * (96 - len(TITLE))
RECORD_BYTES = 96
GROUP = 64
"""Records that are written at once: 6 kB."""
_FIELDS = struct.Struct("<QdIiIidd10f")
_WORDS = struct.Struct("<11Q")
_SUM = struct.Struct("<Q")
_MASK = (1 << 64) - 1
MIXERS = tuple((0x9E3779B97F4A7C15 * (2 * place + 1) ** 3) & _MASK | 1 for place in range(11))
"""The checksum is the sum of a record's words, each times its own odd number, modulo 2^64: a changed word always changes it."""
SEED = 0x5048414C414E5821
_MOST_SINGLE = 3.4028234e38


def index_beside(events: Path) -> Path:
    """The index of the event stream at ``events``."""
    return events.with_name("steps.bin")


class StepLine(msgspec.Struct):
    """The line of a ``Step``, with the fields that are drawn; decoded so, it costs a tenth of an event."""

    kind: str
    t: float
    attempt: int
    step: int
    loss: float | str
    grad_norm: float | str
    lr: float | str
    tokens: int
    tokens_per_s: float | str
    step_s: float | str
    mfu: Number = None
    bits_per_byte: Number = None
    goodput: Number = None
    peak_memory_bytes: int | None = None
    balance: Number = None
    logged_s: float | str = 0.0
    data_wait_s: float | str = 0.0
    ledger: msgspec.Raw = msgspec.Raw(b"{}")


def row_of(step: Step | StepLine, t: float, attempt: int, offset: int, has_ledger: bool) -> Row | None:
    """Return the row of a logged step at byte ``offset`` of the file; ``None`` if its numbers cannot be those of a
    run.
    """
    if not (0 <= step.step <= MOST_STEP and abs(attempt) <= MOST_STEP and 0 <= step.tokens <= MOST_WHOLE):
        return None
    memory = step.peak_memory_bytes
    return (
        *(step.step, attempt, offset, t, step.tokens, step.loss, step.grad_norm, step.lr),
        *(step.tokens_per_s, step.step_s, step.mfu, step.bits_per_byte, step.goodput),
        *(None if memory is None or abs(memory) > MOST_WHOLE else memory, step.balance),
        *(_share(step.data_wait_s, step.logged_s), float(has_ledger)),
    )


def _share(part: float | str, total: float | str) -> float | None:
    if isinstance(part, str) or isinstance(total, str) or not total > 0:
        return None
    return part / total


def encode_record(row: Row, length: int) -> bytes:
    """Return the index record of a row whose line has ``length`` bytes, with a checksum.

    Raises ``ValueError``, ``TypeError`` or ``struct.error`` for what is no number.
    """
    step, attempt, offset, t, tokens, loss, *fine, has_ledger = row
    fields = _FIELDS.pack(
        *(offset, t, length, step, int(float(has_ledger or 0)), attempt, tokens, _number(loss or 0.0)),
        *map(_single, fine),
    )
    return fields + _SUM.pack(checksum(fields))


def _single(value: Number) -> float:
    """Return a number as single precision can store it: NaN for ``None``, infinite if it is too large."""
    if value is None:
        return math.nan
    value = _number(value)
    return math.copysign(math.inf, value) if abs(value) > _MOST_SINGLE else value


def _number(value: float | str) -> float:
    """The number, or the one NaN that a line can hold: processors make NaN with a sign too."""
    value = float(value)
    return math.nan if math.isnan(value) else value


def checksum(fields: bytes) -> int:
    """The checksum of a record without it."""
    return (SEED + sum(map(int.__mul__, _WORDS.unpack(fields), MIXERS))) & _MASK


class StepIndexWriter:
    """Writer of records to an index; it is opened at the first group. Nothing raises: after a failure the index is left as it is."""

    def __init__(self, path: Path, *, is_empty: bool = False) -> None:
        """Set up the writer; the file is opened at the first write. ``is_empty``: the stream is empty, so an
        existing index is emptied.
        """
        self.path = path
        self._is_empty = is_empty
        self._waiting = bytearray()
        self._descriptor = -1
        self._given_up = False

    def add(self, body: Step, t: float, attempt: int, offset: int, length: int) -> None:
        """Queue the row of a step's line, of ``length`` bytes at ``offset``; write once a group is full.

        Steps with impossible numbers are left out. Does nothing after the index was given up.
        """
        if self._given_up:
            return
        with suppress(TypeError, ValueError, OverflowError, struct.error):
            row = row_of(body, t, attempt, offset, bool(body.ledger))
            self._waiting += encode_record(row, length) if row else b""
        if len(self._waiting) >= GROUP * RECORD_BYTES:
            self._write()

    def close(self) -> None:
        """Write what is waiting, and close the file."""
        if self._waiting and not self._given_up:
            self._write()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self) -> None:
        """Append what is queued, behind the file's title or padding to whole records.

        After a failure or a short write the index is given up, without an error: it can be made again.
        """
        try:
            if self._descriptor < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
                self._descriptor = os.open(self.path, flags | (os.O_TRUNC if self._is_empty else 0), 0o644)
                self._is_empty = False
            size = os.fstat(self._descriptor).st_size
            before = b"\0" * (-size % RECORD_BYTES) if size else TITLE
            entries = before + self._waiting
            self._given_up = os.write(self._descriptor, entries) < len(entries)
        except OSError:
            self._given_up = True
        self._waiting.clear()
