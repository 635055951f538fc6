"""A log file of one process, bounded: when it is full it is set aside, and of those set aside the first and the newest are kept.

The first has the process's start (versions, addresses, settings), the newest its end; what lies between goes first. A file that is set aside
is renamed once and never again (``NAME.jsonl`` becomes ``NAME.r0007.jsonl``), so that whoever follows it by its inode loses nothing.

Nothing is buffered: a line that was written is in the kernel, and survives a kill of the process. Nothing raises: a disk that is full or
gone costs lines. They are counted, the owner is told once, and the count is written as soon as there is room.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.observe.lines.appended import AppendedFile

_AGAIN_S = 1.0
"""After a failure, the disk is tried again after so long."""
_SET_ASIDE = re.compile(r"\.r(\d{4,})\.jsonl")


@dataclass(frozen=True)
class Bounds:
    """How much of a process's log is kept: at most ``files`` files of ``file_bytes`` each."""

    file_bytes: int = 16 << 20
    files: int = 4


def aside(path: Path, number: int) -> Path:
    """The name of the log ``path`` once it has been set aside as the ``number``-th."""
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.r{number:04d}.jsonl")


def set_aside(path: Path) -> list[tuple[int, Path]]:
    """The files of the log ``path`` that were set aside, oldest first."""
    stem = path.name.removesuffix(".jsonl")
    found = []
    with suppress(OSError):
        for name in os.listdir(path.parent):
            if name.startswith(stem) and (match := _SET_ASIDE.fullmatch(name[len(stem) :])):
                found.append((int(match[1]), path.with_name(name)))
    return sorted(found)


class LogFile:
    """The log of one process, for its one writer; it is opened at the first line."""

    def __init__(
        self,
        path: Path,
        bounds: Bounds,
        lost: Callable[[int, str], bytes],
        on_trouble: Callable[[str], None] = lambda _words: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            path: ``NAME.jsonl``.
            bounds: How much is kept.
            lost: Makes the line which says that so many lines were lost, and why.
            on_trouble: Told once, in words, that lines are being lost.
            clock: Of the pause between two attempts.
        """
        self.path, self._bounds, self._make_lost, self._on_trouble, self._clock = (
            path,
            bounds,
            lost,
            on_trouble,
            clock,
        )
        self._file: AppendedFile | None = None
        self._number: int | None = None
        self._missed, self._why, self._again_s, self._told = 0, "", 0.0, False

    def write(self, line: bytes) -> None:
        """Appends a line, which ends in a newline."""
        if self._missed and self._clock() < self._again_s:
            self._missed += 1
            return
        try:
            if self._missed:
                self._append(self._make_lost(self._missed, self._why))
                self._missed = 0
            self._append(line)
        except OSError as error:
            self._missed, self._why = self._missed + 1, error.strerror or str(error)
            self._again_s = self._clock() + _AGAIN_S
            if not self._told:
                self._told = True
                self._on_trouble(
                    f"{self.path} cannot be written: {self._why}; lines are lost until it can, and the run goes on"
                )

    def close(self) -> None:
        """Closes the file; a later line opens it again."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _append(self, line: bytes) -> None:
        file = self._file or self._open()
        if file.size_bytes and file.size_bytes + len(line) > self._bounds.file_bytes:
            file = self._turn()
        file.append(line)

    def _open(self) -> AppendedFile:
        self.path.parent.mkdir(exist_ok=True)  # somebody may have removed it
        self._file = AppendedFile(self.path)
        return self._file

    def _turn(self) -> AppendedFile:
        """Sets the full file aside, removes those that are too many, and opens a new one."""
        before = set_aside(self.path)
        if self._number is None:
            self._number = before[-1][0] + 1 if before else 0
        self.close()
        with suppress(FileNotFoundError):  # somebody has removed it
            os.rename(self.path, aside(self.path, self._number))
        self._number += 1
        kept = max(1, self._bounds.files - 1)
        for _, path in before[1 : len(before) + 2 - kept]:
            with suppress(OSError):
                path.unlink()
        return self._open()
