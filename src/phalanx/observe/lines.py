"""Files of lines that one process appends to while others read them, a batch at a time.

The reader must hold out against whatever may lie under the file's name: a line that its writer was killed in (it is left until its end
comes), a line without end (dropped once it is longer than any event), a file that was cut or replaced by another one (reading starts
again, and reports it), a pipe or a device (not opened). It takes no lock and never waits.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from phalanx.run.directory.files import open_regular

MOST_LINE_BYTES = 1 << 20
"""A longer line is no event that a run writes: it is dropped, and counted."""
_BLOCK_BYTES = 1 << 22
_HEAD_BYTES = 512


@dataclass(frozen=True)
class LineBatch:
    """Lines that were not read before and are not blank, without their ends, each with its offset in the file."""

    lines: tuple[tuple[int, bytes], ...]
    restarted: bool
    """The file is another one than before: what was read of it no longer counts. The lines are from its beginning."""
    more: bool
    """There is more to read now."""


class FileTail:
    """The place in one file up to which it was read."""

    def __init__(
        self,
        path: Path,
        *,
        most_line_bytes: int = MOST_LINE_BYTES,
        block_bytes: int = _BLOCK_BYTES,
        instead_of_long: bytes | None = None,
    ) -> None:
        """Set up a tail from the start of ``path``, which need not exist yet; nothing is opened.

        A line longer than ``most_line_bytes`` is dropped and counted, and if ``instead_of_long`` is given,
        replaced by that. ``block_bytes`` are read at a time.
        """
        self.path = path
        self._most_line_bytes, self._block_bytes = most_line_bytes, block_bytes
        self._instead = instead_of_long
        self._forget()
        self.size_bytes = 0
        """Size of the file when it was last looked at."""

    def _forget(self) -> None:
        """Reset the position, counts and remembered file, so that reading begins again."""
        self.dropped_lines = 0
        """Lines that were too long."""
        self._file: tuple[int, int] | None = None
        self._head = b""
        self._begin_at(0)

    def _begin_at(self, offset: int) -> None:
        """Read on from the line that begins at ``offset``."""
        self.read_bytes = offset
        """Offset of the first byte that was not looked at yet."""
        self._line_at, self._rest, self._dropping = offset, b"", False

    @property
    def has_file(self) -> bool:
        """True if the file existed at the last call."""
        return self._file is not None

    @property
    def rest(self) -> bytes:
        """The beginning of a line whose end is not there yet."""
        return self._rest

    def skip_to(self, offset: int) -> None:
        """Continue from the line that begins at ``offset``, up to which another reader has read the present file.

        The counts are kept unless the file is another one. Raises ``OSError``.
        """
        with open_regular(self.path) as file:
            stat = os.fstat(file.fileno())
            if self._file != (stat.st_dev, stat.st_ino):
                self._forget()
            self._file, self._head = (stat.st_dev, stat.st_ino), os.pread(file.fileno(), _HEAD_BYTES, 0)
            self._begin_at(offset)
            self.size_bytes = stat.st_size

    def next_batch(self) -> LineBatch:
        """Read the next block of the file and return its complete lines. Of a missing file the batch is empty.

        Another file of that name is read from its start, and the batch is marked as restarted. Raises ``OSError``
        if it exists and cannot be read, or is no regular file.
        """
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return self._gone()
        with file:
            descriptor = file.fileno()
            stat = os.fstat(descriptor)
            self.size_bytes = stat.st_size
            restarted = self._is_another(descriptor, stat)
            if restarted:
                self._forget()
            self._file = stat.st_dev, stat.st_ino
            if len(self._head) < _HEAD_BYTES:
                self._head = os.pread(descriptor, _HEAD_BYTES, 0)
            block = os.pread(descriptor, self._block_bytes, self.read_bytes)
        return LineBatch(
            tuple(self._lines(block)), restarted, self.read_bytes < self.size_bytes and bool(block)
        )

    def _gone(self) -> LineBatch:
        """Reset, and return an empty batch, marked as restarted if a file was open before."""
        was_open = self._file is not None
        self._forget()
        self.size_bytes = 0
        return LineBatch((), was_open, False)

    def _is_another(self, descriptor: int, stat: os.stat_result) -> bool:
        """Return True if the file is not the one read before: another inode, shorter, or with another beginning."""
        if self._file is None:
            return False
        if self._file != (stat.st_dev, stat.st_ino) or stat.st_size < self.read_bytes:
            return True
        return os.pread(descriptor, len(self._head), 0) != self._head  # cut, and written again

    def _lines(self, block: bytes) -> list[tuple[int, bytes]]:
        """Return the lines that ``block`` completes, each with its offset; keep the rest for the next block.

        Blank lines are left out; long ones are counted, and replaced if there is a replacement.
        """
        next_at = self.read_bytes - len(self._rest)  # a dropped line has only its end here
        self.read_bytes += len(block)
        *complete, rest = (self._rest + block).split(b"\n")
        lines = []
        for line in complete:
            if self._dropping or len(line) > self._most_line_bytes:
                self.dropped_lines += 1
                self._dropping = False
                if self._instead is not None:
                    lines.append((self._line_at, self._instead))
            elif line.strip():
                lines.append((self._line_at, line))
            next_at += len(line) + 1
            self._line_at = next_at
        if self._dropping or len(rest) > self._most_line_bytes:
            self._dropping, rest = True, b""
        self._rest = rest
        return lines


def read_lines_at(path: Path, offsets: list[int], most_line_bytes: int = MOST_LINE_BYTES) -> list[bytes]:
    """Return the lines that begin at ``offsets``, without newlines, cut at ``most_line_bytes``. Raises ``OSError``."""
    lines = []
    with open_regular(path) as file:
        for offset in offsets:
            file.seek(offset)
            lines.append(file.readline(most_line_bytes).rstrip(b"\n"))
    return lines


def blocks_from_the_end(
    file: BinaryIO, block_bytes: int, most_bytes: int | None = None, most_line_bytes: int = MOST_LINE_BYTES
) -> Iterator[bytes]:
    """Yield the lines of a file in blocks of about ``block_bytes``, the last block first, each line as a whole and the lines of a
    block in the order of the file. Reads as needed.

    Nothing farther from the end than ``most_bytes`` is read; ``None`` sets no limit. Of a line that spans blocks at most
    ``most_line_bytes`` are in memory; a longer one is left out.
    """
    position = file.seek(0, os.SEEK_END)
    lowest = 0 if most_bytes is None else max(0, position - most_bytes)
    pieces: list[bytes] = []  # the line whose beginning is not read yet, its last piece first
    line_bytes = 0
    while position > lowest:
        start = max(lowest, position - block_bytes)
        file.seek(start)
        block, position = file.read(position - start), start
        first, newline, block = block.partition(b"\n") if start else (b"", b"\n", block)
        if newline:
            begin = block.rfind(b"\n") + 1  # begin of the line that ends in the pieces
            is_too_long = line_bytes + len(block) - begin > most_line_bytes
            yield block[:begin] if is_too_long else b"".join((block, *reversed(pieces)))
            pieces, line_bytes = [], 0
        line_bytes += len(first)
        pieces = [*pieces, first] if line_bytes <= most_line_bytes else []


def bisect_lines(file: BinaryIO, is_before: Callable[[bytes], bool], near_bytes: int) -> tuple[int, int]:
    """Return two offsets at most ``near_bytes`` apart, by bisection: the first line that is not ``is_before`` begins after the first
    offset, and at or about the second. Assumes that lines are about in order.
    """
    low, high = 0, file.seek(0, os.SEEK_END)
    while high - low > near_bytes:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline(MOST_LINE_BYTES)
        low, high = (middle, high) if is_before(file.readline(MOST_LINE_BYTES)) else (low, middle)
    return low, high


# Append complete lines to a file that other processes read meanwhile.
#
# Each line is one unbuffered ``write`` to a file opened for appending, so a kill of the process loses no appended line. A kill
# or a full disk during the write leaves at most one torn line. The next append ends it with a newline first, so that it damages
# no other line.


class AppendedFile:
    """A file opened for appending lines. Not for several threads at once.

    Raises ``OSError`` from every method but ``close``; after it, what was written before is intact and the file may be written on.
    """

    def __init__(self, path: Path) -> None:
        """Open the file for appending, making it if it is missing. Raises ``OSError``."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self.size_bytes = os.fstat(self._descriptor).st_size
            """The size of the file as far as this writer knows: others may append to it too."""
            self._torn = self._ends_torn()
        except OSError:
            self.close()
            raise

    def append(self, line: bytes) -> int:
        """Write a line, which ends in a newline, and return the offset at which it begins. After a torn line, write
        a newline first.

        Raises ``OSError`` if not all of it could be written. The offset is right while all writers of the file
        append, on a file system that appends atomically; over NFS it may not be.
        """
        block = b"\n" + line if self._torn and self._ends_torn() else line
        self._torn = True  # until all of it is written; after an error, _ends_torn reads the file's last byte
        written = os.write(self._descriptor, block)
        self.size_bytes = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        self._torn = written < len(block)
        if self._torn:
            raise OSError(
                errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({written} of {len(block)} bytes were written)"
            )
        return self.size_bytes - len(line)

    def _ends_torn(self) -> bool:
        size = os.fstat(self._descriptor).st_size
        return size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
