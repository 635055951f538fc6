"""The journal: the coordinator's write-ahead log of all events, synced to disk before any command that follows is sent.

The coordinator's state is a function of the events it has seen, so a restarted one replays this file and is where the
killed one was (write-ahead logging; Gray and Reuter, "Transaction Processing", 1992, chapter 9). A line holds one batch
of events and its checksum. Since it is synced before its commands are sent, a crash can only damage the end of the file,
which nobody has acted on: it is dropped. A damaged line with good ones after it means that the disk lost what it had
promised to keep, and the journal refuses to guess. When the file has grown large, ``begin_anew`` replaces it by one that
starts with the state.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import xxhash

from phalanx.fleet.core.replay import JournalError
from phalanx.run.durable import sync, write_atomically

_DIGITS = 16


class Journal:
    """An open journal, positioned behind its last whole line. One process holds one."""

    def __init__(self, path: Path) -> None:
        """Opens or makes the journal and reads what is in it into ``lines``.

        Raises:
            JournalError: It cannot be opened, or a line that is not the last is damaged.
        """
        self.path = path
        self._unsynced, self._doubtful = bytearray(), False
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            sync(path.parent)
            self.lines, self.size_bytes = _whole_lines(path)
            os.ftruncate(self._fd, self.size_bytes)
        except OSError as error:
            raise JournalError(f"cannot open the journal {path}: {error.strerror}") from error

    @property
    def unsynced_bytes(self) -> int:
        """Bytes that a power cut would cost."""
        return len(self._unsynced)

    def append(self, content: bytes) -> None:
        """Writes one line, which survives the death of this process. ``content`` holds no newline.

        Raises:
            JournalError: It could not be written; the journal is as before and the same call may be made again.
        """
        line = _line(content)
        try:
            self._write(line, self.size_bytes)
        except OSError as error:
            os.ftruncate(self._fd, self.size_bytes)
            raise JournalError(f"cannot write the journal {self.path}: {error.strerror}") from error
        self.size_bytes += len(line)
        self._unsynced += line

    def sync(self) -> None:
        """When this returns, what was appended survives a power cut too.

        Raises:
            JournalError: The disk does not take it; may be called again.
        """
        if not self._unsynced:
            return
        kept = len(self._unsynced)
        try:
            if (
                self._doubtful
            ):  # after a failed fsync the kernel may have dropped the pages (PostgreSQL's "fsyncgate")
                self._write(bytes(self._unsynced), self.size_bytes - len(self._unsynced))
            os.fdatasync(self._fd)
        except OSError as error:
            self._doubtful = True
            raise JournalError(f"cannot sync the journal {self.path}: {error.strerror}") from error
        self._doubtful = False
        del self._unsynced[:kept]

    def _write(self, data: bytes, at: int) -> None:
        written = os.pwrite(self._fd, data, at)
        if written != len(data):
            raise OSError(0, f"only {written} of {len(data)} bytes were written; the disk is full")

    def begin_anew(self, content: bytes, keep_as: Path | None = None) -> None:
        """Replaces the journal by one whose only line is ``content``, atomically.

        Args:
            content: The line.
            keep_as: A second name under which the old journal is kept as evidence; it takes no space of its own.

        Raises:
            JournalError: The disk does not take it; the same call may be made again.
        """
        line = _line(content)
        if keep_as is not None:
            with suppress(OSError):  # evidence: not worth stopping for
                os.link(self.path, keep_as)
        try:
            write_atomically(self.path, line, mode=0o600)
            # The open file has no name any more: what was appended there would be lost.
            reopened = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            os.close(self._fd)
            self._fd = reopened
        except OSError as error:
            raise JournalError(f"cannot renew the journal {self.path}: {error.strerror}") from error
        self.size_bytes = len(line)
        self._unsynced.clear()

    def close(self) -> None:
        """Closes the file; nothing is buffered, so nothing is lost."""
        os.close(self._fd)


def _line(content: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(content).encode() + b" " + content + b"\n"


def _whole_lines(path: Path) -> tuple[list[bytes], int]:
    """The contents of the good lines, and the offset in bytes at which the last of them ends."""
    contents: list[bytes] = []
    end, torn = 0, 0
    for number, piece in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        content = piece[_DIGITS + 1 :]
        if piece[:_DIGITS] != xxhash.xxh3_64_hexdigest(content).encode():
            torn = torn or number
        elif torn:
            raise JournalError(
                f"line {torn} of {path} is damaged though line {number} is whole: the disk has lost what it promised to "
                "keep. Stop the fleet, move the file away and start again: the run goes on from its newest checkpoint"
            )
        else:
            contents.append(content)
            end += len(piece) + 1
    return contents, end
