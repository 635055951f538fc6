"""The file of a run's events: an append-only log that each attempt writes and every viewer reads.

A line is one ``write`` on a file opened for appending, so what was appended survives a kill of the
process. A kill in the middle of it leaves at most one torn line: the next writer closes that line
first, and readers report it and go on. Readers need no lock and may come while the run writes.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from phalanx.observe.events import Body, Event, Step, Torn, Unknown, decode, encode
from phalanx.observe.lines.appended import AppendedFile
from phalanx.observe.lines.step_index import StepIndexWriter, index_beside
from phalanx.observe.lines.tail import FileTail
from phalanx.run.directory.files import open_regular

MOST_LINE_BYTES = 16 << 20
"""A longer line is no event that a run writes: readers pass it over, and hold not more than that of it."""

_NO_EVENT = b"?"


class EventLogError(Exception):
    """The event file cannot be read or written; the message names it and says what to do."""


# --- writing ------------------------------------------------------------------------------------


class EventLog:
    """Appends the events of one attempt. One process of a run holds one; threads may share it.

    Nothing is buffered: what ``append`` returned from survives a kill of the process. It is not
    synced to the disk, so a power cut may cost the last seconds of events (never of weights).
    Where logged steps lie is noted beside the file (``lines/step_index.py``), for fast readers.
    """

    def __init__(self, path: Path, attempt: int, clock: Callable[[], float] = time.time) -> None:
        self.path, self.attempt, self._clock = path, attempt, clock
        try:
            self._file = AppendedFile(path)
        except OSError as error:
            raise EventLogError(
                f"cannot open {path} for appending: {error.strerror}; "
                "give the run a directory that exists and that you may write to"
            ) from error
        self._index = StepIndexWriter(index_beside(path), anew=not self._file.size_bytes)
        self._lock = threading.Lock()

    def append(self, body: Body) -> Event:
        """Write one event and return it, stamped with the time and the attempt.

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
                "Free space (or fix the mount) and start the run again: it goes on from its last checkpoint"
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
    """All events in the file, in the order written. An unfinished last line is left out.

    Raises EventLogError if there is no such file.
    """
    return follow(path, stop=lambda: True, poll_s=0.0)


def newest_event(path: Path, counts: Callable[[Event], bool], block_bytes: int = 1 << 16) -> Event | None:
    """The last event for which ``counts`` is true, or ``None``; torn lines are passed over.

    Reads from the end, so that it costs the same in a run's first hour and in its third month.
    Raises EventLogError if there is no such file.
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


def lines_from_the_end(
    file: BinaryIO, block_bytes: int, most_bytes: int | None = None, most_line_bytes: int = MOST_LINE_BYTES
) -> Iterator[bytes]:
    """The lines of a file that are not empty, the last one first, read in blocks: of a long file only as much as is asked for.

    Args:
        file: The file.
        block_bytes: Of a block.
        most_bytes: Nothing that lies farther from the end is read; ``None`` reads all that is asked for.
        most_line_bytes: A longer line is no event, and is left out: whatever the file holds, not more than that of it is kept.
    """
    position = file.seek(0, os.SEEK_END)
    lowest = 0 if most_bytes is None else max(0, position - most_bytes)
    pieces: list[bytes] = []  # of the line whose beginning is not read yet, the last one first
    kept = 0
    while position > lowest:
        start = max(lowest, position - block_bytes)
        file.seek(start)
        first, *lines = file.read(position - start).split(b"\n")
        if lines:
            *whole, last = lines
            yield from _line_of([*pieces, last], kept + len(last), most_line_bytes)
            yield from (line for line in reversed(whole) if line.strip() and len(line) <= most_line_bytes)
            pieces, kept = [], 0
        kept += len(first)
        pieces = [*pieces, first] if kept <= most_line_bytes else []
        position = start
    if not lowest:
        yield from _line_of(pieces, kept, most_line_bytes)


def _line_of(pieces: Sequence[bytes], nbytes: int, most_line_bytes: int) -> Iterator[bytes]:
    line = b"".join(reversed(pieces)) if nbytes <= most_line_bytes else b""
    if line.strip():
        yield line


def follow(path: Path, stop: Callable[[], bool], poll_s: float = 0.2) -> Iterator[Event]:
    """The events in the file, then those appended to it, until ``stop()`` and nothing new is there.

    The file may not exist yet: it is waited for. ``stop`` is asked before each look at the file, at most
    every ``poll_s`` seconds once all is read. Raises EventLogError if the file is missing at the end, or shrinks.
    """
    tail = FileTail(path, most_line_bytes=MOST_LINE_BYTES, instead_of_long=_NO_EVENT)
    number, last = 0, Event(0.0, 0, Unknown("", {}))
    while True:
        stopping = stop()  # asked before reading: what was written before it came true is not lost
        before = tail.read_bytes
        lines = _next_lines(tail, missing_is_error=stopping)
        over = tail.read_bytes == before
        if over and stopping:
            lines += _complete(tail.rest)
        for line in lines:
            number += 1
            last = _decode_or_torn(line, number, last)
            yield last
        if over:
            if stopping:
                return
            time.sleep(poll_s)


def _next_lines(tail: FileTail, *, missing_is_error: bool) -> list[bytes]:
    """What was appended since the last look."""
    known = tail.read_bytes
    try:
        batch = tail.next_batch()
    except OSError as error:
        raise EventLogError(f"cannot read {tail.path}: {error.strerror}") from error
    if batch.restarted and tail.found:
        raise EventLogError(
            f"{tail.path} shrank from {known} to {tail.size_bytes} bytes while being read, or is another file: it is "
            "only ever appended to, so something else wrote it; open it again"
        )
    if not tail.found and (missing_is_error or batch.restarted):
        raise EventLogError(
            f"there is no event file {tail.path}; is it the directory of a run that has started?"
        )
    return [line for _, line in batch.lines]


def _complete(rest: bytes) -> list[bytes]:
    """A last line without its newline counts if it is whole; a prefix of an object never parses."""
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
    """The number for the next attempt at the run whose events are in ``path``: 0 if there are none."""
    if not path.exists():
        return 0
    return max((event.attempt + 1 for event in read_events(path)), default=0)
