"""The journal: the coordinator's write-ahead log of all events, synced to disk before any resulting command
is sent.

The coordinator's state is a function of its events, so a restarted one replays this file and reaches the same
state (write-ahead logging; Gray and Reuter, "Transaction Processing", 1992, chapter 9). A line holds one
batch of events and its checksum. Since it is synced before its commands are sent, a crash leaves at most one
incomplete last line. No node has acted on that line, so it is dropped. A complete line with a wrong checksum
is damaged: the disk lost data that it had synced. Such lines are left out and named (``damaged``). The
coordinator then trusts the nodes' reports more than the remaining lines. When the file has grown large,
``replace_content`` replaces it by one that starts with the state.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash

from phalanx.fleet.core.invariants import JournalError
from phalanx.run.directory.files import sync, write_atomically

_DIGITS = 16


class Journal:
    """An open journal, positioned behind its last complete line. One process has it open."""

    def __init__(self, path: Path) -> None:
        """Open or make the journal, and read it: its good lines into ``lines``, the numbers of others into ``damaged``.

        Raises:
            JournalError: It cannot be opened.

        A last line that is incomplete is cut off.
        """
        self.path = path
        self._unsynced, self._doubtful, self._replaced = bytearray(), False, False
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            sync(path.parent)
            self.lines, self.damaged, self.size_bytes = _read(path.read_bytes())
            os.ftruncate(self._fd, self.size_bytes)
        except OSError as error:
            raise JournalError(f"cannot open the journal {path}: {error.strerror}") from error

    @property
    def unsynced_bytes(self) -> int:
        """Bytes that a power cut would cost."""
        return len(self._unsynced)

    def append(self, content: bytes) -> None:
        """Write one line, which survives the death of this process. ``content`` holds no newline.

        Raises:
            JournalError: It could not be written; the journal is as before and the same call may be made
                again.

        It is on disk only after ``sync``.
        """
        line = _line(content)
        self._follow_name()
        try:
            self._write(line, self.size_bytes)
        except OSError as error:
            with suppress(
                OSError
            ):  # The next line is written over the rest, and a reader drops it: it has no end.
                os.ftruncate(self._fd, self.size_bytes)
            raise JournalError(f"cannot write the journal {self.path}: {error.strerror}") from error
        self.size_bytes += len(line)
        self._unsynced += line

    def sync(self) -> None:
        """Sync to disk. On return, all appended lines survive a power cut.

        Raises:
            JournalError: The disk does not take it; may be called again.
        """
        if not self._unsynced:
            return
        kept = len(self._unsynced)
        try:
            if self._doubtful:
                # After a failed fsync the kernel may have dropped the pages (PostgreSQL's "fsyncgate").
                self._write(bytes(self._unsynced), self.size_bytes - len(self._unsynced))
            os.fdatasync(self._fd)
        except OSError as error:
            self._doubtful = True
            raise JournalError(f"cannot sync the journal {self.path}: {error.strerror}") from error
        self._doubtful = False
        del self._unsynced[:kept]

    def _write(self, data: bytes, at: int) -> None:
        """Write at an offset. Raises OSError if not all bytes were written."""
        written = os.pwrite(self._fd, data, at)
        if written != len(data):
            raise OSError(0, f"only {written} of {len(data)} bytes were written; the disk is full")

    def replace_content(self, content: bytes, keep_as: Path | None = None) -> None:
        """Replace the journal by one whose only line is ``content``, atomically and durably, and append there from
        now on.

        With ``keep_as``, the old journal keeps that second name as evidence; failing to link it is ignored. Raises
        ``JournalError`` if the disk does not take it; the same call may be made again.
        """
        line = _line(content)
        if keep_as is not None:
            with suppress(OSError):  # Evidence only: not worth stopping for.
                os.link(self.path, keep_as)
        try:
            write_atomically(self.path, line, mode=0o600)
        except OSError as error:
            self._replaced = not self._has_name()
            raise JournalError(f"cannot renew the journal {self.path}: {error.strerror}") from error
        self._replaced = True
        self._follow_name()

    def _has_name(self) -> bool:
        """Return True if the path still names the open file, or names none; False if it cannot be determined."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except FileNotFoundError:
            return True  # Neither has a name: the folder was removed.
        except OSError:
            return False

    def _follow_name(self) -> None:
        """Open the new journal, once ``replace_content`` has put it in place: lines appended to the old one would
        be lost.

        Does nothing if none was replaced. Raises ``JournalError`` if it cannot be opened now; nothing may be
        appended then.
        """
        if not self._replaced:
            return
        try:
            reopened = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            size_bytes = os.fstat(reopened).st_size
            sync(self.path.parent)
        except OSError as error:
            raise JournalError(f"cannot open the renewed journal {self.path}: {error.strerror}") from error
        os.close(self._fd)
        self._fd, self.size_bytes, self._replaced = reopened, size_bytes, False
        self._unsynced.clear()

    def close(self) -> None:
        """Close the file. Nothing is buffered, so nothing is lost."""
        os.close(self._fd)


def read_journal(path: Path) -> list[bytes]:
    """Return the lines of another process's journal, without opening it for writing.

    Empty if it cannot be read or a line is damaged; an incomplete last line is left out.
    """
    try:
        lines, damaged, _ = _read(path.read_bytes())
    except OSError:
        return []
    return [] if damaged else lines


def _line(content: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(content).encode() + b" " + content + b"\n"


def _read(file: bytes) -> tuple[list[bytes], tuple[int, ...], int]:
    """Split a journal into good lines and damaged ones.

    Returns the contents of the good lines, the numbers of the damaged ones (from 1), and the bytes up to the
    end of the last line.
    """
    *pieces, remaining = file.split(b"\n")
    contents = [piece[_DIGITS + 1 :] for piece in pieces if _is_good(piece)]
    damaged = [number for number, piece in enumerate(pieces, 1) if not _is_good(piece)]
    if _is_good(remaining[:-1]):  # Nothing was cut off: the end of the line itself has changed.
        damaged.append(len(pieces) + 1)
    return contents, tuple(damaged), len(file) - len(remaining)


def _is_good(line: bytes) -> bool:
    """Return True if a line begins with its checksum."""
    digest = xxhash.xxh3_64_hexdigest(line[_DIGITS + 1 :]).encode()
    return line[: _DIGITS + 1] == digest + b" "


# Writes of a leading coordinator that must be on disk before anything is sent: retried until the disk takes them.

RENEW_BYTES = 64 << 20
"""Size above which a journal is replaced by a short one."""
_RENEW_AGAIN_BYTES = 4 << 20
RETRY_S = 1.0
"""Seconds between two tries of a write that the disk did not take."""


class PatientJournal:
    """The journal of a leading coordinator, which does nothing else while it waits for the disk."""

    def __init__(self, journal: Journal, log: Callable[[str], None], renew_bytes: int = RENEW_BYTES) -> None:
        """Wrap ``journal``. ``renew_bytes`` is the size above which ``renew`` replaces it."""
        self.journal, self._log = journal, log
        self._renew_bytes = self._renew_at_bytes = renew_bytes

    async def synced(self) -> None:
        """Wait until the journal is on disk."""
        await self.until_written(self.journal.sync)

    async def until_written(self, write: Callable[[], None]) -> None:
        """Call ``write`` in a thread until it succeeds. A JournalError is logged, and retried after a second,
        without limit.
        """
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(None, write)
            except JournalError as error:
                self._log(f"{error}; no commands are sent until that succeeds")
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def renew(self, first_line: Callable[[], bytes]) -> None:
        """Replace the journal by ``first_line()`` once it has grown beyond its limit.

        On an error, log it, keep the old one, and try again after it has grown by 4 MiB. The next limit is at
        least twice the new size.
        """
        if self.journal.size_bytes <= self._renew_at_bytes:
            return
        content = first_line()
        try:
            await asyncio.get_running_loop().run_in_executor(None, self.journal.replace_content, content)
        except JournalError as error:
            self._log(f"{error}; the old one is kept, and it is tried again later")
            self._renew_at_bytes = self.journal.size_bytes + _RENEW_AGAIN_BYTES
        else:
            self._renew_at_bytes = max(self._renew_bytes, 2 * self.journal.size_bytes)
