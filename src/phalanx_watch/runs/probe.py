"""Quick reads of a run directory of any size: the process that holds it, and the newest events of its stream.

A start of a run locks the file ``lock`` of its directory (``flock``), and the kernel releases that lock with the last
of its processes, however they end. Trying the lock would hold it for a moment, in which the run could be refused. So
``/proc/locks`` (proc(5)), the kernel's list, is read. For a run on another machine, or without such a list, the
holder is unknown.

A run of 100,000 steps has 70 MB of events; forty of them are listed in less time than reading one. The newest step,
evaluation and end are at the end of the file. The newest start may be anywhere, but attempts ascend along the file,
so it is found by bisection.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from phalanx.observe.event_log import lines_from_the_end
from phalanx.observe.events import Evaluated, Event, Finished, RunStarted, Step, Stopped, decode
from phalanx.observe.lines import bisect_lines
from phalanx.process.this_process import host_name
from phalanx.run.directory.files import open_regular, read_small
from phalanx.run.directory.paths import RunDirectory

# The lock.


_LOCK = re.compile(r"^\d+: FLOCK +\S+ +WRITE +(-?\d+) +([0-9a-f]+):([0-9a-f]+):(\d+) ", re.MULTILINE)
_HOLDER = re.compile(r"process (\d+) on (\S+)")


@dataclass(frozen=True)
class KernelLocks:
    """Exclusive ``flock`` locks of this machine: process, device (major, minor) and inode of each; None if
    unknown.
    """

    locks: frozenset[tuple[int, int, int, int]] | None = field(
        default_factory=lambda: _listed(Path("/proc/locks"))
    )

    def holds(self, directory: RunDirectory) -> bool | None:
        """Return True if a process of this machine holds the lock of the run directory, False if no process does.

        None if unknown: another machine locked it last, or locks cannot be read.
        """
        try:
            status, text = (
                directory.lock.stat(),
                read_small(directory.lock).decode(errors="replace"),
            )
        except FileNotFoundError:
            return False
        except OSError:
            return None
        holder = _HOLDER.match(text)
        if holder is None or holder[2] != host_name() or self.locks is None:
            return None
        device = os.major(status.st_dev), os.minor(status.st_dev)
        # On some file systems, stat and the kernel's list have different device numbers; then the process decides.
        return any(
            inode == status.st_ino and ((major, minor) == device or process == int(holder[1]))
            for process, major, minor, inode in self.locks
        )


def holder_of(directory: RunDirectory) -> int | None:
    """Return the local process that last locked the run directory; None if it was on another machine, or is unknown."""
    try:
        holder = _HOLDER.match(read_small(directory.lock).decode(errors="replace"))
    except OSError:
        return None
    return int(holder[1]) if holder is not None and holder[2] == host_name() else None


def _listed(path: Path) -> frozenset[tuple[int, int, int, int]] | None:
    """Return the kernel's file locks as (process, major, minor, inode); None if they cannot be read."""
    try:
        text = path.read_text()
    except OSError:
        return None
    locks = _LOCK.findall(text)
    return frozenset((int(process), int(a, 16), int(b, 16), int(inode)) for process, a, b, inode in locks)


# The ends of the event stream.


_BLOCK_BYTES = 1 << 16
_MOST_BYTES = 1 << 20
"""Bytes from the end in which the newest step is searched."""
_KIND = re.compile(rb'"kind": ?"(\w+)"')
_ATTEMPT = re.compile(rb'\{"t":[^,]*, ?"attempt": ?(\d+),')


@dataclass(frozen=True)
class Tail:
    """Newest events of a run, by kind; None for a missing kind."""

    first: RunStarted | None = None
    """First start."""
    began_s: float = 0.0
    """Time of the first start (unix seconds); 0 if there is none."""
    started: RunStarted | None = None
    """Newest start."""
    step: Step | None = None
    evaluated: Evaluated | None = None
    ended: Stopped | Finished | None = None
    """End of the newest attempt, if it logged one."""
    last_s: float = 0.0
    """Time of the newest event of any kind; 0 if there is none."""


def read_tail(path: Path) -> Tail:
    """Return the newest events in the file at ``path``; none if it is missing. Raises ``OSError`` if it cannot be read."""
    try:
        with open_regular(path) as file:
            return _read(file)
    except FileNotFoundError:
        return Tail()


def _read(file: BinaryIO) -> Tail:
    """Return the newest step, evaluation, start and end by reading backward from the end, and the first start.

    Stops after about ``_MOST_BYTES``; the newest start is then found by its attempt. An end counts only if no step or
    start follows it.
    """
    first = next(_starts(file, 0, _MOST_BYTES), None)  # among the first events of the file
    step: Event | None = None
    evaluated: Evaluated | None = None
    ended: Stopped | Finished | None = None
    started: RunStarted | None = None
    last_s, read = 0.0, 0
    for line in lines_from_the_end(file, _BLOCK_BYTES, 4 * _MOST_BYTES):
        read += len(line)
        kind = _KIND.search(line, 0, 200)
        name = kind[1].decode() if kind else ""
        is_needed = (
            not last_s
            or (name == "Step" and step is None)
            or (name == "Evaluated" and evaluated is None)
            or (name in ("RunStarted", "Stopped", "Finished"))
        )
        if is_needed and (event := _decoded(line)) is not None:
            last_s = last_s or event.t
            match event.body:
                case Step():
                    step = step or event
                case Evaluated() as body:
                    evaluated = evaluated or body
                case RunStarted() as body:
                    started = started or body
                case Stopped() | Finished() as body if started is None and step is None:
                    ended = ended or body
        if read > _MOST_BYTES or (step and evaluated and started):
            break
    if started is None and first is not None:
        attempt = step.attempt if step else first.attempt
        started = _start_of(file, attempt, first) if attempt != first.attempt else _body(first)
    return Tail(
        first=_body(first) if first else None,
        began_s=first.t if first else 0.0,
        started=started,
        step=step.body if step and isinstance(step.body, Step) else None,
        evaluated=evaluated,
        ended=ended,
        last_s=last_s,
    )


def _decoded(line: bytes) -> Event | None:
    """Return the event of a line; None if it cannot be decoded."""
    with suppress(ValueError, RecursionError):
        return decode(line)
    return None


def _body(event: Event) -> RunStarted | None:
    return event.body if isinstance(event.body, RunStarted) else None


def _starts(file: BinaryIO, begin: int, end: int) -> Iterator[Event]:
    """Yield the starts of attempts whose lines begin between two offsets; a line that is cut at ``begin`` is skipped."""
    file.seek(begin)
    while file.tell() < end and (line := file.readline(_MOST_BYTES)):
        kind = _KIND.search(line, 0, 200)
        if kind and kind[1] == b"RunStarted" and (event := _decoded(line)) is not None:
            yield event


def _start_of(file: BinaryIO, attempt: int, first: Event) -> RunStarted | None:
    """Return the start of ``attempt``, or the newest one before it, else that of ``first``, by binary search in the
    file.

    Attempts ascend along the file, except for a few lines.
    """

    def is_before(line: bytes) -> bool:
        match = _ATTEMPT.match(line)
        return match is not None and int(match[1]) < attempt

    low, high = bisect_lines(file, is_before, 4 * _BLOCK_BYTES)
    starts = list(_starts(file, max(0, low - _BLOCK_BYTES), high + 4 * _BLOCK_BYTES))
    fitting = [event for event in starts if event.attempt == attempt]
    return _body((fitting or starts or [first])[-1])
