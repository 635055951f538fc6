"""A log file of one process, bounded: when it is full it is set aside, and of those set aside the first and the newest are kept.

The first has the process's start (versions, addresses, settings), the newest its end; what lies between goes first. A file that is set aside
is renamed once and never again (``NAME.jsonl`` becomes ``NAME.r0007.jsonl``), so that whoever follows it by its inode loses nothing.

Nothing is buffered: a line that was written is in the kernel, and survives a kill of the process. Nothing raises: a disk that is full or
gone costs lines. They are counted, the owner is notified once, and the count is written as soon as there is room.

Below: the end of a log, and the settings of a log that a parent passes to its child.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from phalanx.observe.lines import AppendedFile
from phalanx.observe.logs.line import LogLine, decode_lines, says_its_beginning, says_its_end
from phalanx.run.directory.files import open_regular
from phalanx.run.spec import ObserveSpec

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
    """Return number and path of the files of the log ``path`` that were set aside, oldest first; none if the folder cannot be read."""
    stem = path.name.removesuffix(".jsonl")
    paths = []
    with suppress(OSError):
        for name in os.listdir(path.parent):
            if name.startswith(stem) and (match := _SET_ASIDE.fullmatch(name[len(stem) :])):
                paths.append((int(match[1]), path.with_name(name)))
    return sorted(paths)


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
            lost: Returns the line that reports how many lines were lost, and why.
            on_trouble: Called once, with a sentence, when lines are being lost.
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
        self._missed, self._reason, self._again_s, self._is_reported = 0, "", 0.0, False

    def write(self, line: bytes) -> None:
        """Append a line, which ends in a newline. After a failure, lines are counted as lost for a while, and the loss is written
        before the next."""
        if self._missed and self._clock() < self._again_s:
            self._missed += 1
            return
        try:
            if self._missed:
                self._append(self._make_lost(self._missed, self._reason))
                self._missed = 0
            self._append(line)
        except OSError as error:
            self._missed, self._reason = self._missed + 1, error.strerror or str(error)
            self._again_s = self._clock() + _AGAIN_S
            if not self._is_reported:
                self._is_reported = True
                self._on_trouble(
                    f"{self.path} cannot be written: {self._reason}; lines are lost until it can, and the run goes on"
                )

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _append(self, line: bytes) -> None:
        """Append a line; if the file would be too long, set it aside first. Raises ``OSError``."""
        file = self._file or self._open()
        if file.size_bytes and file.size_bytes + len(line) > self._bounds.file_bytes:
            file = self._turn()
        file.append(line)

    def _open(self) -> AppendedFile:
        self.path.parent.mkdir(exist_ok=True)  # somebody may have removed it
        self._file = AppendedFile(self.path)
        return self._file

    def _turn(self) -> AppendedFile:
        """Set the full file aside, delete those that are too many, but never the first, and open a new one."""
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


# The end of a log: what a process said last, from its own file and from that of its descriptors, in the order of time.


_BLOCK = 64 << 10


def raw_of(path: Path) -> Path:
    """Beside the log ``path`` of a process: that of what it wrote past Python."""
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.out.jsonl")


def last_lines(path: Path, most: int) -> list[LogLine]:
    """The last lines of the process whose log is ``path``, at most so many; empty if there are none that can be read."""
    merged = [*_last(path), *_last(raw_of(path))]
    return sorted(merged, key=lambda line: line.t)[-most:]


def _last(path: Path) -> list[LogLine]:
    """Return the lines at the end of a log, or if it has none yet, of the newest file set aside; empty if neither can be read."""
    files = [path, *(file for _, file in reversed(set_aside(path)))]
    for file in files[:2]:  # a log that was set aside a moment ago is empty
        with suppress(OSError), open_regular(file) as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - _BLOCK))
            block = opened.read(_BLOCK)
            if size > _BLOCK:
                block = block[block.find(b"\n") + 1 :]
            if lines := decode_lines(block):
                return lines
    return []


def last_text(path: Path, lines: int) -> list[str]:
    """Return the last ``lines`` lines of text of the newest process that wrote the log ``path``, those of tracebacks too."""
    tail = last_lines(path, lines + 2)
    beginning = max((number for number, line in enumerate(tail) if says_its_beginning(line)), default=-1)
    tail = [line for line in tail[beginning + 1 :] if not says_its_end(line)]
    return [text for line in tail for text in line.text.splitlines()][-lines:]


# What a process is told about its log: where it lies, whose it is, how much is kept. A parent gives it to a child in one environment variable.


VARIABLE = "PHALANX_LOG"


@dataclass(frozen=True)
class LogOrder:
    """The log of one process of a run."""

    path: Path
    """``RUN/logs/attempt-NNN-PROCESS.jsonl``."""
    process: str
    attempt: int
    node: str | None = None
    """The node's name in a fleet, else the machine's; ``None`` for a coordinator that belongs to no node."""
    bounds: Bounds = field(default_factory=Bounds)
    place: int | None = None
    """In a child whose parent reads its descriptors 1 and 2: that of its place."""

    @property
    def raw(self) -> Path:
        """The log of what the process wrote past Python: native code, other programs, a crash."""
        return raw_of(self.path)

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.path.parent.parent

    def to_text(self, place: int | None) -> str:
        """The order for a child that inherits the descriptor ``place``."""
        return msgspec.json.encode(msgspec.to_builtins(replace(self, place=place), enc_hook=str)).decode()


def order_for(
    path: Path, process: str, attempt: int, observe: ObserveSpec, node: str | None = ""
) -> LogOrder:
    """The order for a process of a run; without a node's name it is the machine's."""
    bounds = Bounds(observe.log_mib << 20, observe.log_files)
    return LogOrder(path, process, attempt, socket.gethostname() if node == "" else node, bounds)


def taken_from(environment: MutableMapping[str, str]) -> LogOrder | None:
    """Return the order for this process, or ``None``, and remove it from ``environment``, so that no program that it starts takes
    it for its own."""
    text = environment.pop(VARIABLE, "")
    if not text:
        return None
    try:
        return msgspec.convert(msgspec.json.decode(text), LogOrder, dec_hook=lambda kind, value: kind(value))
    except msgspec.MsgspecError:
        return None
