"""Log files of a run by process, and their lines read in blocks, forward or from the end back.

logs/attempt-000-rank-00003.jsonl           the lines that the process logs now
logs/attempt-000-rank-00003.r0007.jsonl     an older file of the same process, set aside when it was full
logs/attempt-000-rank-00003.out.jsonl       what it wrote past Python
logs/attempt-000-rank-00003.log             a process of an earlier version: text, whose time is that of the file

A line has a *key*: its time, but never before that of the line before it in its file. Clocks are set back and threads overtake each other by
microseconds; by its key a process's lines keep their order when they are merged with others'.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from msgspec import UNSET
from msgspec.structs import replace

from phalanx.observe.lines import MOST_LINE_BYTES, bisect_lines, blocks_from_the_end
from phalanx.observe.logs.assemble import Assembler
from phalanx.observe.logs.line import LogLine, decode, decode_lines
from phalanx.run.directory.files import leads_out, open_regular
from phalanx.run.directory.paths import RunDirectory

_NAME = re.compile(r"attempt-(\d{3,})-(.+?)(\.out)?(?:\.r(\d{4,}))?\.jsonl")
_RAW = re.compile(r"attempt-(\d{3,})-(.+)\.log")
_RANK = re.compile(r"rank-(\d+)")
_CURRENT = 1 << 62


@dataclass(frozen=True)
class Stream:
    """The files that one writer has written one after another."""

    attempt: int
    process: str
    files: tuple[Path, ...]
    raw: bool = False

    @property
    def rank(self) -> int | None:
        """The rank in the name of the process."""
        match = _RANK.fullmatch(self.process)
        return int(match[1]) if match else None

    @property
    def node(self) -> str | None:
        """The node in the name of an agent or worker; ``None`` for a rank or coordinator."""
        if self.rank is not None or self.process.startswith("coordinator"):
            return None
        worker = re.fullmatch(r"(.*\d)-\d+", self.process)
        return worker[1] if worker else self.process


def streams(directory: RunDirectory, attempt: int | None = None) -> list[Stream]:
    """Return all writers of a run's logs, or of one attempt, by attempt and process, each with its files oldest
    first.

    Empty without the folder, or if it is a link that leads out of the run.
    """
    files_of: dict[tuple[int, str, str], list[tuple[int, Path]]] = defaultdict(list)
    names: list[str] = []
    with suppress(OSError):
        names = [] if leads_out(directory.logs, directory.path) else os.listdir(directory.logs)
    for name in names:
        path = directory.logs / name
        if match := _NAME.fullmatch(name):
            number = int(match[4]) if match[4] else _CURRENT
            files_of[int(match[1]), match[2], match[3] or ""].append((number, path))
        elif match := _RAW.fullmatch(name):
            files_of[int(match[1]), match[2], "raw"].append((0, path))
    return [
        Stream(key[0], key[1], tuple(path for _, path in sorted(files)), key[2] == "raw")
        for key, files in sorted(files_of.items())
        if attempt is None or key[0] == attempt
    ]


# Blocks of one writer's lines.


BLOCK = 256 << 10
_LEVEL_STANDS = 96
_SKEW_S = 120.0
"""A node's clock may be off that of the file server by so much."""
_MOST_RAW = 32 << 20
_CLOCK = re.compile(r"(\d\d):(\d\d):(\d\d) ")


@dataclass(frozen=True)
class LineBlock:
    """Some lines of a writer, in the direction of reading, with their keys, and the key of the last line that was read for them."""

    keys: Sequence[float]
    lines: Sequence[LogLine]
    bound: float


@dataclass(frozen=True)
class LineBounds:
    """The lines that a reader wants; others may be left out unread."""

    since: float = 0.0
    until: float = float("inf")
    at_least: str = ""
    """Lines of information may be left out if it is ``warning`` or ``error``."""


def forward(stream: Stream, span: LineBounds, block_bytes: int = BLOCK) -> Iterator[LineBlock]:
    """Yield the writer's lines in blocks, oldest first, until one is later than ``span``; earlier lines may come
    too.

    Keys are times that never go back. Files that were last written before ``span``, or cannot be read, are
    skipped, but a raw text file that cannot be read raises ``OSError``.
    """
    key = 0.0
    for path in stream.files:
        if _is_older(path, span.since):
            continue
        if stream.raw:
            yield _block(raw_lines(stream, path))
            continue
        with suppress(OSError), open_regular(path) as file:
            file.seek(_first_of(file, span.since, block_bytes))
            for lines in _pieces(file, span, block_bytes):
                block = _block(lines, key)
                key = block.bound
                yield block
                if key > span.until:
                    return


def backward(stream: Stream, span: LineBounds, block_bytes: int = BLOCK) -> Iterator[LineBlock]:
    """Yield the writer's lines in blocks, newest first, until one is before ``span``; later lines come too.

    Keys are times that never go forward. Files that cannot be read are skipped; with a ``since``, one that
    cannot be examined ends the search.
    """
    key = float("inf")
    for path in reversed(stream.files):
        if _is_older(path, span.since):
            return
        with suppress(OSError):
            pieces = [raw_lines(stream, path)] if stream.raw else _pieces_back(path, span, block_bytes)
            for lines in pieces:
                lines = lines[::-1]
                keys = list(accumulate((line.t for line in lines), min, initial=key))[1:]
                key = keys[-1] if keys else key
                yield LineBlock(keys, lines, key)
                if key < span.since:
                    return


def joined(lines: Sequence[LogLine]) -> list[LogLine]:
    """Return the lines, each with those that continue it appended to its text."""
    whole_lines: list[LogLine] = []
    for line in lines:
        if line.goes_on is True and whole_lines:
            before = whole_lines[-1]
            whole_lines[-1] = replace(before, text=f"{before.text}\n{line.text}", goes_on=UNSET)
        else:
            whole_lines.append(line)
    return whole_lines


def raw_lines(stream: Stream, path: Path) -> list[LogLine]:
    """Return the records of the end of a text file, with tracebacks joined; at most ``_MOST_RAW`` bytes are read.

    Times at the beginning of lines are of the day of the file, or the day before; before the first it is the
    file's. Raises ``OSError``.
    """
    written = path.stat().st_mtime
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_RAW))
        text = file.read().decode(errors="backslashreplace")
    assembler, at, records = Assembler(), 0.0, []
    for line in text.split("\n"):
        if match := _CLOCK.match(line):
            at = _on_the_day(written, *map(int, match.groups()))
        records += [(at, record) for record in assembler.add(line + "\n")]
    records += [(at, record) for record in assembler.settle()]
    rank, node = stream.rank, stream.node
    lines = [
        LogLine(
            *(t or written, record.level, node, rank, None, stream.attempt, None, record.text),
            process=stream.process,
            goes_on=record.goes_on,
        )
        for t, record in records
    ]
    return joined(lines)


def _on_the_day(written: float, hours: int, minutes: int, seconds: int) -> float:
    day = time.localtime(written)
    at = time.mktime((day.tm_year, day.tm_mon, day.tm_mday, hours, minutes, seconds, 0, 0, -1))
    return at if at <= written + 1 else at - 86_400


def _block(lines: Sequence[LogLine], before: float = 0.0) -> LineBlock:
    keys = list(accumulate((line.t for line in lines), max, initial=before))
    return LineBlock(keys[1:], lines, keys[-1])


def _is_older(path: Path, since: float) -> bool:
    """Return True if a file was last written more than two minutes before ``since`` (Unix seconds), or cannot be
    examined.

    False for ``since`` 0.
    """
    if not since:
        return False
    try:
        return path.stat().st_mtime < since - _SKEW_S
    except OSError:
        return True


def _first_of(file: BinaryIO, since: float, near_bytes: int) -> int:
    """Return the offset of the beginning of a line before ``since``, by bisection, at most about ``near_bytes``
    before the first that is not.

    0 without ``since``. Assumes that lines are about in the order of time.
    """

    def is_before(raw: bytes) -> bool:
        line = decode(raw)
        return line is not None and line.t < since - 1.0

    low, _ = bisect_lines(file, is_before, near_bytes) if since else (0, 0)
    if low:
        file.seek(low)
        file.readline(MOST_LINE_BYTES)
        low = file.tell()
    return low


def _pieces(file: BinaryIO, span: LineBounds, block_bytes: int) -> Iterator[list[LogLine]]:
    """Yield the decoded lines of a file from its position, block by block, also a last one without its newline.

    Lines longer than ``MOST_LINE_BYTES`` are dropped.
    """
    rest, dropping = b"", False
    while piece := file.read(block_bytes):
        if dropping:
            _, newline, piece = piece.partition(b"\n")
            dropping = not newline
        complete, newline, rest = (rest + piece).rpartition(b"\n")
        if newline:
            yield _decoded(complete, span)
        if len(rest) > MOST_LINE_BYTES:
            rest, dropping = b"", True
    if rest:
        yield _decoded(rest, span)  # torn, or just being written


def _pieces_back(path: Path, span: LineBounds, block_bytes: int) -> Iterator[list[LogLine]]:
    """Yield the decoded lines of a file block by block from its end; each block's lines in the order of the file.

    Raises ``OSError``.
    """
    with open_regular(path) as file:
        yield from (_decoded(block, span) for block in blocks_from_the_end(file, block_bytes) if block)


def _decoded(block: bytes, span: LineBounds) -> list[LogLine]:
    """Return the lines of a block. If only warnings or errors are wanted, "info" lines are skipped undecoded, but
    the last.

    The last line shows how far in time the block goes.
    """
    if span.at_least not in ("warning", "error"):
        return _whole(block)
    *lines, last = block.rstrip(b"\n").split(b"\n")
    # The last one is kept at any level, because it marks the end of the block.
    kept = [raw for raw in lines if b'"level":"info"' not in raw[:_LEVEL_STANDS]]
    return _whole(b"\n".join([*kept, last]))


def _whole(block: bytes) -> list[LogLine]:
    lines = decode_lines(block)
    return joined(lines) if b'"goes_on":true' in block else lines
