"""A log file of one process, bounded: when it is full it is set aside, and of those set aside the first and the newest are kept.

The first has the process's start (versions, addresses, settings), the newest its end; what lies between goes first. A file that is set aside
is renamed once and never again (``NAME.jsonl`` becomes ``NAME.r0007.jsonl``), so that whoever follows it by its inode loses nothing.

Nothing is buffered: a line that was written is in the kernel, and survives a kill of the process. Nothing raises: a disk that is full or
gone costs lines. They are counted, the owner is notified once, and the count is written as soon as there is room.

Below: the end of a log, and the settings of a log that a parent passes to its child.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from msgspec import UNSET

from phalanx.observe.lines import AppendedFile, blocks_from_the_end
from phalanx.observe.logs.assemble import Record
from phalanx.observe.logs.line import Level, LogLine, decode_lines, encode, says_its_beginning, says_its_end
from phalanx.observe.logs.masking import SecretMask
from phalanx.process.this_process import host_name
from phalanx.run.directory.files import open_regular, read_small
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
    """Return (number, path) of the full files of the log ``path`` that were renamed, oldest first; empty if the
    folder cannot be read.
    """
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
        """Set up the log ``NAME.jsonl``; it is opened at the first line.

        ``lost`` returns the line that reports how many lines were lost, and the reason. ``on_trouble`` is called
        once, with a sentence, when lines are being lost. ``clock`` times the pause between two attempts.
        """
        self.path, self._bounds, self._make_lost = path, bounds, lost
        self._on_trouble, self._clock = on_trouble, clock
        self._file: AppendedFile | None = None
        self._number: int | None = None
        self._missed, self._reason, self._again_s, self._is_reported = 0, "", 0.0, False

    def write(self, line: bytes) -> None:
        """Append a line, which ends in a newline; never raises ``OSError``.

        After a failure, lines are counted as lost for a second. The next line after that is preceded by one on
        the loss.
        """
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
                    f"{self.path} cannot be written: {self._reason}; lines are lost until it can, and the run continues"
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
        self.path.parent.mkdir(exist_ok=True)  # the folder may have been removed
        self._file = AppendedFile(self.path)
        return self._file

    def _turn(self) -> AppendedFile:
        """Rename the full file, delete the oldest beyond the bounds but never the first, and return a new one. Raises
        ``OSError``.
        """
        if self._number is None:
            before = set_aside(self.path)
            self._number = before[-1][0] + 1 if before else 0
        self.close()
        with suppress(FileNotFoundError):  # the file may have been removed
            os.rename(self.path, aside(self.path, self._number))
        self._number += 1
        full_files = set_aside(self.path)
        surplus = max(0, len(full_files) + 1 - self._bounds.files)  # with the new one
        for _, path in full_files[1 : 1 + surplus]:
            with suppress(OSError):
                path.unlink()
        return self._open()


# The end of a process's log: the newest lines of its own file and of its captured descriptors, in the order of time.


_BLOCK = 64 << 10


def raw_of(path: Path) -> Path:
    """Beside the log ``path`` of a process: that of what it wrote past Python."""
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.out.jsonl")


def last_lines(path: Path, most: int) -> list[LogLine]:
    """The last lines of the process whose log is ``path``, at most so many; empty if there are none that can be read."""
    merged = [*_last(path), *_last(raw_of(path))]
    return sorted(merged, key=lambda line: line.t)[-most:]


def _last(path: Path) -> list[LogLine]:
    """Return the lines in the last block of a log, or if it has none yet, of the newest file set aside.

    Empty if neither can be read.
    """
    files = [path, *(file for _, file in reversed(set_aside(path)))]
    for file in files[:2]:  # a log that was set aside a moment ago is empty
        with suppress(OSError), open_regular(file) as opened:
            if lines := decode_lines(next(blocks_from_the_end(opened, _BLOCK), b"")):
                return lines
    return []


def last_text(path: Path, lines: int) -> list[str]:
    """Return the last ``lines`` lines of text that the newest process wrote into the log ``path``, tracebacks line
    by line.

    The records about a process's begin and end are left out.
    """
    tail = last_lines(path, lines + 2)
    beginning = max((number for number, line in enumerate(tail) if says_its_beginning(line)), default=-1)
    tail = [line for line in tail[beginning + 1 :] if not says_its_end(line)]
    return [text for line in tail for text in line.text.splitlines()][-lines:]


# The settings of a process's log: path, process, attempt, node, bounds. A parent passes them to a child in one environment
# variable.


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
    """Return the order for the log of a process, with the bounds of ``observe``.

    ``node`` "" is the name of this machine; ``None`` is no node.
    """
    bounds = Bounds(observe.log_mib << 20, observe.log_files)
    return LogOrder(path, process, attempt, host_name() if node == "" else node, bounds)


def taken_from(environment: MutableMapping[str, str]) -> LogOrder | None:
    """Return the order for this process, and remove its variable from ``environment``, so that no child takes it
    for its own.

    ``None`` if there is none, or it cannot be decoded.
    """
    text = environment.pop(VARIABLE, "")
    if not text:
        return None
    try:
        return msgspec.convert(msgspec.json.decode(text), LogOrder, dec_hook=lambda kind, value: kind(value))
    except msgspec.MsgspecError:
        return None


# Write records into a process's log, with time and place, with secrets masked, and within the process's rate limit.

_TOKEN_FILES = ("fleet.token", "fleet.operator-token")
_TOKEN = re.compile(r"[0-9A-Za-z_-]{16,}")
_LOOK_S = 5.0
_LOUD = ("Traceback", "Fatal", "FATAL", "Error", "ERROR", "error:", "WARN")


class Recorder:
    """The one writer of a log. Nothing that it does raises, and no line of it is held back."""

    def __init__(
        self,
        order: LogOrder,
        path: Path,
        mask: SecretMask,
        place: LogPosition,
        on_trouble: Callable[[str], None] = lambda _words: None,
    ) -> None:
        """Set up the writer of the log ``path``; ``mask`` removes secrets, and ``place`` has the process's rank and
        step.

        ``on_trouble`` is called once if lines are lost.
        """
        self._order, self._mask, self._place = order, mask, place
        self._file = LogFile(path, order.bounds, self._lost, on_trouble)
        self._bucket, self._reserve = LineBucket(), LineBucket(256 << 10, 1 << 20)
        self._left_out, self._left_out_bytes = 0, 0
        self._looked_s, self._seen = 0.0, dict[str, int]()

    def put(self, record: Record) -> None:
        """Write a record if its size fits the allowed rate, for which errors have a reserve; else leave it out and
        count it.
        """
        text = record.text
        if self.has_room(len(text) + PER_LINE, loud=record.level == "error"):
            self.write(record)
        else:
            self.leave_out(1, len(text))

    def has_room(self, nbytes: int, *, loud: bool = False) -> bool:
        """True if so much text may come now; then it is counted as having come. What is ``loud`` has a reserve of its own."""
        return self._bucket.takes(nbytes) or (loud and self._reserve.takes(nbytes))

    def floods(self, text: str) -> bool:
        """Return True if a text that is no error exceeds the rate."""
        return not self._bucket.has(len(text)) and not any(word in text for word in _LOUD)

    def write(self, record: Record) -> None:
        """Write a record, with secrets masked, whatever the rate. Before it, write the count of those left out, if
        any.
        """
        if self._left_out:
            self._tell_left_out()
        self._learn_tokens()
        self._file.write(self._line(self._mask(record.text), record.level, goes_on=record.goes_on))

    def leave_out(self, lines: int, nbytes: int) -> None:
        """Count lines that are not to be written; the next line reports the count."""
        self._left_out += lines
        self._left_out_bytes += nbytes

    def close(self) -> None:
        """Write the count of lines that were left out, and close the file; it is opened again by a later line."""
        if self._left_out:
            self._tell_left_out()
        self._file.close()

    def _tell_left_out(self) -> None:
        lines, nbytes = self._left_out, self._left_out_bytes
        self._left_out = self._left_out_bytes = 0
        text = (
            f"{lines:,} lines ({nbytes:,} bytes) are left out here: this process logs faster than its limit"
        )
        self._file.write(self._line(text, "warning"))

    def _lost(self, lines: int, reason: str) -> bytes:
        return self._line(f"{lines:,} lines are lost here: {reason}", "warning")

    def _line(self, text: str, level: Level, *, goes_on: bool = False) -> bytes:
        """Return a line of the log with the present time and the place (node, rank, epoch, step) of the process."""
        order, place = self._order, self._place
        facts = order.node, place.rank, place.epoch, order.attempt, place.step
        now_s = round(time.time(), 6)
        return encode(LogLine(now_s, level, *facts, text, process=order.process, goes_on=goes_on or UNSET))

    def _learn_tokens(self) -> None:
        """Add the tokens in the run directory's files to the mask, as they may change while it runs. Looks every 5
        s.
        """
        now_s = time.monotonic()
        if now_s < self._looked_s:
            return
        self._looked_s = now_s + _LOOK_S
        for name in _TOKEN_FILES:
            path = self._order.run_dir / name
            with suppress(OSError):
                changed_ns = path.stat().st_mtime_ns
                if self._seen.get(name) != changed_ns:
                    self._seen[name] = changed_ns
                    self._mask.add(*_TOKEN.findall(read_small(path).decode(errors="replace")))


# Rate limit of a process's output: a token bucket of bytes.
#
# A process may write much at once (a start, a listing), but little on average. Lines beyond the limit are left out and counted.
# Errors have a reserve of their own (``Recorder``).


PER_LINE = 200
"""Bytes that a line costs beside its text."""


class LineBucket:
    """Token bucket: ``per_s`` bytes a second pass, and ``most`` at once."""

    def __init__(
        self, per_s: float = 2 << 20, most: float = 8 << 20, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s, self._most, self._clock = per_s, most, clock
        self._left, self._at_s = float(most), clock()

    def takes(self, nbytes: int) -> bool:
        """Return True if ``nbytes`` may pass, and take them out."""
        if not self.has(nbytes):
            return False
        self._left -= nbytes
        return True

    def has(self, nbytes: int) -> bool:
        """Return True if ``nbytes`` might pass now; the bucket fills with time."""
        if self._left < nbytes:
            now_s = self._clock()
            self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
            self._at_s = now_s
        return self._left >= nbytes


# A process's place in its run, for the lines of its log: rank, epoch and step, in memory that its parent can read.
#
# A rank sets its step with one store. Its launcher or agent, which captures the output of native code in the rank, reads the
# rank and step of those lines here, even after the rank was killed. The child inherits the memory's descriptor; a process
# without one has private memory.


_BYTES = 3 * 8
_UNKNOWN = -(2**63)


class _PositionField:
    """Attribute of a ``LogPosition``: the number at ``index`` of its memory."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, place: LogPosition, _owner: type[LogPosition]) -> int | None:
        value = place.values[self._index]
        return None if value == _UNKNOWN else value

    def __set__(self, place: LogPosition, value: int | None) -> None:
        place.values[self._index] = _UNKNOWN if value is None else value


class LogPosition:
    """Rank, epoch and step of a process; ``None`` is not known, or none."""

    rank = _PositionField(0)
    """The rank that the process holds."""
    epoch = _PositionField(1)
    """The epoch of the fleet that it is in."""
    step = _PositionField(2)
    """The step that it computes."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Make an empty place, or map that of another process by ``descriptor``, which the caller still closes.

        Raises ``OSError`` or ``ValueError`` if the descriptor is not one of a place.
        """
        self._shared = None if descriptor is None else mmap.mmap(descriptor, _BYTES)
        self.values = memoryview(self._shared or bytearray(_BYTES)).cast("q")
        """Rank, epoch and step as they are in memory."""
        if descriptor is None:
            self.rank = self.epoch = self.step = None

    @classmethod
    def shared(cls) -> tuple[LogPosition, int]:
        """Return a new place, empty, and the descriptor by which a child process gets it; the caller closes that. Raises ``OSError``."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("phalanx-place", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        try:
            os.ftruncate(descriptor, _BYTES)
            place = cls(descriptor)  # the mapping has a descriptor of its own, and there may be none left
        except BaseException:
            os.close(descriptor)
            raise
        place.rank = place.epoch = place.step = None
        return place, descriptor

    def close(self) -> None:
        """Release the shared memory; the place is not used any more."""
        self.values.release()
        if self._shared is not None:
            self._shared.close()
