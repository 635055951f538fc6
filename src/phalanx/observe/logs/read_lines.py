"""Log lines of all processes of a run, merged in the order of time, filtered, grouped and followed.

Files are read in blocks, and only as far as needed: the last 500 lines of a run cost one block of each process that wrote lately. The
merge takes whole runs of lines from each process, up to the time to which all of them have been read, and sorts those; so a line costs no
heap operation, and memory is a block for each process.

Lines that differ only in numbers (ranks, ports, addresses, times, identifiers) form one group, so a fleet of 12,500 nodes that each cannot
reach one server gives one line. A file that is followed is known by its inode: after it is set aside under another name, it is read on.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from phalanx.observe.event_log import EventLogError, newest_event
from phalanx.observe.events import Step
from phalanx.observe.logs.line import FirstFailure, LogLine, decode_lines, first_failure, severity
from phalanx.observe.logs.read_blocks import (
    BLOCK,
    LineBlock,
    LineBounds,
    Stream,
    backward,
    forward,
    joined,
    raw_lines,
    streams,
)
from phalanx.run.directory.paths import RunDirectory

_VARYING = re.compile(
    r"0x[0-9a-fA-F]+"
    r"|\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"
    r"|\b(?=[a-f]*\d)[0-9a-f]{12,}\b"
    r"|[-+]?\d[\d.,:_]*(?:[eE][-+]?\d+)?"
)


@dataclass
class LogGroup:
    """Lines of one text."""

    example: LogLine
    """The first of them."""
    count: int = 0
    first: float = float("inf")
    last: float = 0.0
    ranks: set[int] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)

    @property
    def place(self) -> str:
        """The processes that wrote it, such as ``ranks 0-7 on 2 nodes``; without rank and node the example's
        process.
        """
        parts = []
        if self.ranks:
            parts.append(f"rank{'s' if len(self.ranks) > 1 else ''} {ranges(self.ranks)}")
        if self.nodes:
            parts.append(next(iter(self.nodes)) if len(self.nodes) == 1 else f"{len(self.nodes):,} nodes")
        return " on ".join(parts) or self.example.process

    def add(self, line: LogLine) -> None:
        """Count a line of this group, and widen its time range, ranks and nodes by it."""
        self.count += 1
        self.first, self.last = min(self.first, line.t), max(self.last, line.t)
        if line.rank is not None:
            self.ranks.add(line.rank)
        if line.node is not None:
            self.nodes.add(line.node)


def normalized(text: str) -> str:
    """Return a text with "#" in place of each number and identifier, by which repeated texts differ."""
    return _VARYING.sub("#", text)


def grouped(lines: Iterable[LogLine]) -> list[LogGroup]:
    """Group lines of one level whose texts are equal apart from numbers and identifiers, in the order of their
    first lines.
    """
    groups: dict[tuple[str, str], LogGroup] = {}
    for line in lines:
        key = (line.level, normalized(line.text))
        group = groups.get(key)
        if group is None:
            group = groups[key] = LogGroup(line)
        group.add(line)
    return list(groups.values())


def ranges(numbers: Iterable[int], most: int = 6) -> str:
    """Format numbers as ``0-7, 9``, sorted; beyond ``most`` ranges, add how many more there are."""
    spans: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


# Reading and merging.


__all__ = [
    "LogGroup",
    "LogLine",
    "LogQuery",
    "LogQueryError",
    "first_logged_failure",
    "grouped",
    "read_lines",
    "recovered_step",
]

_MANY = 256
_SMALL_BLOCK = 16 << 10
_RECOVERED_S = 5.0
"""After a failure the ranks that it leaves behind may still end a step."""


class LogQueryError(ValueError):
    """A question about logs that cannot be answered; the message names the part."""


@dataclass(frozen=True)
class LogQuery:
    """Which lines are wanted; what is left empty does not matter."""

    ranks: tuple[range, ...] = ()
    nodes: frozenset[str] = frozenset()
    level: str = "debug"
    """The least serious level."""
    since: float | None = None
    """Unix seconds."""
    until: float | None = None
    grep: str = ""
    """A regular expression that is found in the text, in upper or lower case."""
    attempt: int | None = None
    _pattern: re.Pattern[str] | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        """Compile ``grep``, which ignores case. Raises ``LogQueryError`` if it is no regular expression."""
        if self.grep:
            try:
                object.__setattr__(self, "_pattern", re.compile(self.grep, re.IGNORECASE))
            except re.error as error:
                raise LogQueryError(f"{self.grep!r} is no regular expression: {error}") from error

    @property
    def span(self) -> LineBounds:
        """The bounds within which files have to be read."""
        return LineBounds(
            self.since or 0.0, self.until if self.until is not None else float("inf"), self.level
        )

    def selects(self, line: LogLine) -> bool:
        """Return True if the line has at least the level, and matches each of ranks, nodes, times and pattern that
        is given.
        """
        return (
            severity(line.level) >= severity(self.level)
            and (
                not self.ranks or (line.rank is not None and any(line.rank in ranks for ranks in self.ranks))
            )
            and (not self.nodes or line.node in self.nodes)
            and (self.since is None or line.t >= self.since)
            and (self.until is None or line.t <= self.until)
            and (self._pattern is None or self._pattern.search(line.text) is not None)
        )

    @property
    def everything(self) -> bool:
        """True if every line is wanted."""
        return self == LogQuery(attempt=self.attempt)


def read_lines(
    directory: RunDirectory,
    query: LogQuery = LogQuery(),
    last: int | None = 500,
    *,
    block_bytes: int = BLOCK,
) -> list[LogLine]:
    """Return the newest ``last`` lines that ``query`` selects (``None``: all), oldest first; empty if the run has
    no logs.
    """
    if last is None:
        return list(all_lines(directory, query, block_bytes))
    return list(islice(newest_lines(directory, query, block_bytes), last))[::-1] if last > 0 else []


def all_lines(
    directory: RunDirectory, query: LogQuery = LogQuery(), block_bytes: int = BLOCK
) -> Iterator[LogLine]:
    """Yield the lines that ``query`` selects, of all processes, oldest first; ``block_bytes`` of a file are read at
    once.
    """
    span, selected = query.span, streams(directory, query.attempt)
    return _merged([forward(stream, span, block_bytes) for stream in selected], query, sign=1)


def newest_lines(
    directory: RunDirectory, query: LogQuery = LogQuery(), block_bytes: int = BLOCK
) -> Iterator[LogLine]:
    """Yield the lines that ``query`` selects, of all processes, newest first.

    ``block_bytes`` of a file are read at once, but at most 16 KiB with 256 writers or more.
    """
    span, selected = query.span, streams(directory, query.attempt)
    block_bytes = block_bytes if len(selected) < _MANY else min(block_bytes, _SMALL_BLOCK)
    return _merged([backward(stream, span, block_bytes) for stream in selected], query, sign=-1)


class _Buffer:
    """The selected lines of one process that were read and not yet handed out."""

    def __init__(self, blocks: Iterator[LineBlock], query: LogQuery, sign: int) -> None:
        """Read the first block. ``sign`` is 1 for reading forward, -1 for backward."""
        self._blocks, self._query, self._sign = blocks, query, sign
        self._keys: Sequence[float] = ()
        self._lines: Sequence[LogLine] = ()
        self._at = 0
        self.bound = float("-inf")
        """All lines up to this key have been read; keys grow in the direction of reading."""
        self.read()

    def read(self) -> None:
        """Read a block and keep its selected lines; after the last one the bound is infinite."""
        block = next(self._blocks, None)
        if block is None:
            self.bound = float("inf")
            return
        keys: Sequence[float] = block.keys if self._sign > 0 else [-key for key in block.keys]
        lines: Sequence[LogLine] = block.lines
        self.bound = max(self.bound, self._sign * block.bound)
        if not self._query.everything:
            selected = [number for number, line in enumerate(lines) if self._query.selects(line)]
            keys, lines = [keys[number] for number in selected], [lines[number] for number in selected]
        self._keys, self._lines = [*self._keys[self._at :], *keys], [*self._lines[self._at :], *lines]
        self._at = 0

    def take(self, bound: float) -> tuple[Sequence[float], Sequence[LogLine]]:
        """Return and remove the lines up to ``bound``."""
        begin, self._at = self._at, bisect_right(self._keys, bound, self._at)
        return self._keys[begin : self._at], self._lines[begin : self._at]


def _merged(processes: Iterable[Iterator[LineBlock]], query: LogQuery, sign: int) -> Iterator[LogLine]:
    """Yield the selected lines of all processes, merged by time: forward (``sign`` 1) or backward (-1).

    Of each process only as many blocks are read as are needed.
    """
    buffers = deque(_Buffer(blocks, query, sign) for blocks in processes)
    while buffers:
        bound = min(buffer.bound for buffer in buffers)
        keys: list[float] = []
        lines: list[LogLine] = []
        for buffer in buffers:
            some_keys, some_lines = buffer.take(bound)
            keys += some_keys
            lines += some_lines
        # The sort is stable and finds the runs: lines of one process stay in their order.
        for number in sorted(range(len(lines)), key=keys.__getitem__):
            yield lines[number]
        if bound == float("inf"):
            return
        for buffer in buffers:
            if buffer.bound <= bound:
                buffer.read()


def first_logged_failure(directory: RunDirectory) -> FirstFailure | None:
    """Return the first failure in the logs of the newest attempt, with its evidence and what failed because of it.

    ``None`` if no log has an error near its end.
    """
    logs = streams(directory)
    newest = max((stream.attempt for stream in logs), default=0)
    errors: list[LogLine] = []
    for stream in logs:
        if stream.attempt == newest:
            errors += (line for line in _end_of(stream) if line.level == "error")
    return first_failure(errors)


def recovered_step(directory: RunDirectory, failure: LogLine) -> int | None:
    """Return the newest logged step if it ended at least ``_RECOVERED_S`` after a failure: the run has recovered.

    Otherwise ``None``, also if the events cannot be read.
    """
    try:
        newest = newest_event(directory.events, lambda event: isinstance(event.body, Step))
    except EventLogError:
        return None
    if newest is None or not isinstance(newest.body, Step) or newest.t < failure.t + _RECOVERED_S:
        return None
    return newest.body.step


def _end_of(stream: Stream, most: int = 400) -> list[LogLine]:
    """Return at most ``most`` lines from the end of a writer's logs; empty if it cannot be read.

    Of a raw log they are oldest first. Else they are of the last block, newest first, without lines of level
    "info" but its last line.
    """
    try:
        if stream.raw:
            return raw_lines(stream, stream.files[-1])[-most:]
        last = next(backward(stream, LineBounds(at_least="error"), 64 << 10), None)
    except OSError:
        return []
    return list(last.lines[:most]) if last is not None else []


# Following a run that is still training.


_MOST = 4 << 20
"""Bytes of a file that a look takes in; what is left comes with the next one."""


class Follower:
    """The new lines in the logs of a run at each look."""

    def __init__(self, directory: RunDirectory, query: LogQuery) -> None:
        """Remember the present sizes of the logs: lines that exist now do not count as new."""
        self._directory, self._query = directory, query
        self._read: dict[tuple[int, int], int] = {}
        for path in self._paths():
            with suppress(OSError), open(path, "rb") as file:
                stat = os.fstat(file.fileno())
                self._read[stat.st_dev, stat.st_ino] = stat.st_size

    def _paths(self) -> list[str]:
        logs = streams(self._directory, self._query.attempt)
        return [str(path) for stream in logs if not stream.raw for path in stream.files]

    def look(self) -> list[LogLine]:
        """Return the selected lines that were appended since the last look, by time, also of new files.

        Lines that have not ended wait for the next look. At most ``_MOST`` bytes of a file are read at once.
        """
        lines: list[LogLine] = []
        for path in self._paths():
            with suppress(OSError), open(path, "rb") as file:
                there = os.fstat(file.fileno())
                key = (there.st_dev, there.st_ino)
                begin = self._read.get(key, 0)
                if there.st_size < begin:
                    begin = 0  # another file, with the inode of the oldest, which was removed just before
                if there.st_size == begin:
                    continue
                file.seek(begin)
                piece = file.read(_MOST)
                complete, newline, _ = piece.rpartition(b"\n")
                if newline:
                    self._read[key] = begin + len(complete) + 1
                    lines += joined(decode_lines(complete))
                elif len(piece) == _MOST:
                    self._read[key] = begin + len(piece)  # no log of ours
        return sorted((line for line in lines if self._query.selects(line)), key=lambda line: line.t)
