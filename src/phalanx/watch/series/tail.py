"""Reads a file of lines that other processes append to, a batch at a time, and remembers how far it has come.

The reader must hold out against whatever may lie under the file's name: a line that its writer was killed in (it is left until its end
comes), a line without end (dropped once it is longer than any event), a file that was cut or replaced by another one (reading starts
again, and says so), a pipe or a device (not opened). It takes no lock and never waits.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from phalanx.run.directory.regular_file import open_regular

MOST_LINE_BYTES = 1 << 20
"""A longer line is no event that a run writes: it is dropped, and counted."""
_BLOCK_BYTES = 1 << 22
_HEAD_BYTES = 512


@dataclass(frozen=True)
class Batch:
    """Lines that were not read before, without their ends, each with its offset in the file."""

    lines: tuple[tuple[int, bytes], ...]
    restarted: bool
    """The file is another one than before: what was read of it no longer counts. The lines are from its beginning."""
    more: bool
    """There is more to read now."""


@dataclass(frozen=True)
class Position:
    """The place up to which a file was read, and by what it is known again."""

    device: int
    inode: int
    head: bytes
    read_bytes: int
    """Offset of the first line that was not read yet."""
    dropped_lines: int


class FileTail:
    """The place in one file up to which it was read."""

    def __init__(
        self, path: Path, *, most_line_bytes: int = MOST_LINE_BYTES, block_bytes: int = _BLOCK_BYTES
    ) -> None:
        self.path = path
        self._most_line_bytes, self._block_bytes = most_line_bytes, block_bytes
        self._forget()
        self.size_bytes = 0
        """Size of the file when it was last looked at."""

    def _forget(self) -> None:
        self.read_bytes = 0
        """Offset of the first byte that was not looked at yet."""
        self.dropped_lines = 0
        """Lines that were too long."""
        self._file: tuple[int, int] | None = None
        self._head = b""
        self._rest = b""
        self._dropping = False

    def position(self) -> Position:
        """The place up to which the file was read, in whole lines."""
        device, inode = self._file or (0, 0)
        return Position(device, inode, self._head, self.read_bytes - len(self._rest), self.dropped_lines)

    def resume(self, position: Position) -> bool:
        """Goes on from a place; False, and from the beginning, if the file that lies there now is another one. Raises ``OSError``."""
        self._forget()
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            self._file, self._head = (position.device, position.inode), position.head
            self.read_bytes, self.dropped_lines = position.read_bytes, position.dropped_lines
            if stat.S_ISREG(found.st_mode) and not self._is_another(descriptor, found):
                return True
        finally:
            os.close(descriptor)
        self._forget()
        return False

    def next_batch(self) -> Batch:
        """Reads the next block of the file; of a file that is not there, nothing.

        Raises ``OSError`` if it is there and cannot be read, or is no file.
        """
        try:
            # A pipe under this name would wait for a writer.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return self._gone()
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(0, "it is no file", str(self.path))
            self.size_bytes = found.st_size
            restarted = self._is_another(descriptor, found)
            if restarted:
                self._forget()
            self._file = found.st_dev, found.st_ino
            if len(self._head) < _HEAD_BYTES:
                self._head = os.pread(descriptor, _HEAD_BYTES, 0)
            block = os.pread(descriptor, self._block_bytes, self.read_bytes)
        finally:
            os.close(descriptor)
        return Batch(tuple(self._lines(block)), restarted, self.read_bytes < self.size_bytes and bool(block))

    def _gone(self) -> Batch:
        known = self._file is not None
        self._forget()
        self.size_bytes = 0
        return Batch((), known, False)

    def _is_another(self, descriptor: int, found: os.stat_result) -> bool:
        if self._file is None:
            return False
        if self._file != (found.st_dev, found.st_ino) or found.st_size < self.read_bytes:
            return True
        return os.pread(descriptor, len(self._head), 0) != self._head  # cut, and written again

    def _lines(self, block: bytes) -> list[tuple[int, bytes]]:
        at = self.read_bytes - len(self._rest)
        self.read_bytes += len(block)
        *whole, rest = (self._rest + block).split(b"\n")
        found = []
        for line in whole:
            if self._dropping or len(line) > self._most_line_bytes:
                self.dropped_lines += 1
                self._dropping = False
            elif line.strip():
                found.append((at, line))
            at += len(line) + 1
        if self._dropping or len(rest) > self._most_line_bytes:
            self._dropping, rest = True, b""
        self._rest = rest
        return found


def read_lines_at(path: Path, offsets: list[int], most_line_bytes: int = MOST_LINE_BYTES) -> list[bytes]:
    """The lines that begin at ``offsets``, ascending, of a file of lines. Raises ``OSError``."""
    found = []
    with open_regular(path) as file:
        for offset in offsets:
            file.seek(offset)
            found.append(file.readline(most_line_bytes).rstrip(b"\n"))
    return found
