"""The kernel's account of a rank's main thread in the spans that its ledger books as waiting, and between them.

An observer outside sees how long a thread slept, and not the reason. So ``bench.watch.ledger`` lets every process of its run load this module
(by a ``sitecustomize``): it reads three clocks of the calling thread at both ends of each such span (the collectives that ``CommClock`` measures, and the
ledger's own buckets of waiting) and keeps the sums in a small file, which the observer reads while it samples. The product has none of it.

    wall      CLOCK_MONOTONIC, as the ledger counts
    ran       CLOCK_THREAD_CPUTIME_ID
    in line   ready to run while others had the processor: the second number of /proc/PID/task/TID/schedstat
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.hardware.local.device import CommClock
from phalanx.observe.ledger import Bucket, Ledger

WAITING = ("step.comm_exposed", "step.wait_straggler", "step.data_wait", "step.bubble")
"""Beginnings of the names of the ledger's buckets of waiting."""
_FORM = struct.Struct("<6q")


@dataclass(frozen=True)
class Spent:
    """Seconds of one thread: by the clock, of these on a processor, and of these in line for one. The rest it slept."""

    wall_s: float = 0.0
    ran_s: float = 0.0
    in_line_s: float = 0.0

    @property
    def slept_s(self) -> float:
        return self.wall_s - self.ran_s - self.in_line_s

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.wall_s + other.wall_s, self.ran_s + other.ran_s, self.in_line_s + other.in_line_s)

    def __sub__(self, other: Spent) -> Spent:
        return self + Spent(-other.wall_s, -other.ran_s, -other.in_line_s)


def read(folder: Path, pid: int) -> tuple[Spent, Spent]:
    """Return the seconds of a process's main thread in waiting, and between; zeros for a process that has not waited yet."""
    with suppress(OSError, struct.error):
        numbers = [number / 1e9 for number in _FORM.unpack((folder / str(pid)).read_bytes()[: _FORM.size])]
        return Spent(*numbers[:3]), Spent(*numbers[3:])
    return Spent(), Spent()


class Spans:
    """The sums of this process' main thread, in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pid, self._main = folder, 0, threading.main_thread().ident
        self._depth = 0
        self._since = (0, 0, 0)
        self._sums = [0] * 6

    def enter(self) -> None:
        """Begin a span of waiting; a span within another is part of it."""
        if threading.get_ident() != self._main:
            return
        if self._pid != os.getpid():
            self._open()
        self._depth += 1
        if self._depth == 1:
            self._add(3)

    def leave(self) -> None:
        """End the span."""
        if threading.get_ident() != self._main or not self._depth:
            return
        self._depth -= 1
        if not self._depth:
            self._add(0)

    def _open(self) -> None:
        """Begin the account of this process, which may be a fork of a process with its own."""
        self._pid, self._depth, self._sums = os.getpid(), 0, [0] * 6
        self._line = os.open(f"/proc/{self._pid}/task/{self._pid}/schedstat", os.O_RDONLY)
        path = self._folder / str(self._pid)
        path.write_bytes(bytes(_FORM.size))
        with path.open("r+b") as file:
            self._file = mmap.mmap(file.fileno(), _FORM.size)
        self._since = self._now()

    def _add(self, place: int) -> None:
        now = self._now()
        for number, (after, before) in enumerate(zip(now, self._since, strict=True), place):
            self._sums[number] += after - before
        self._since = now
        _FORM.pack_into(self._file, 0, *self._sums)

    def _now(self) -> tuple[int, int, int]:
        in_line = int(os.pread(self._line, 64, 0).split()[1])
        return time.monotonic_ns(), time.thread_time_ns(), in_line


def install(folder: Path) -> None:
    """Let the ledger and the stopwatches of this process mark the begin and end of waiting."""
    spans = Spans(folder)
    measured, switched = CommClock.measure, Ledger.switch

    @contextmanager
    def measure(clock: CommClock) -> Iterator[None]:
        with measured(clock):
            if clock.blocking:
                spans.enter()
            try:
                yield
            finally:
                if clock.blocking:
                    spans.leave()

    def switch(ledger: Ledger, bucket: Bucket) -> None:
        waited, waits = (name.startswith(WAITING) for name in (ledger._open, bucket))
        switched(ledger, bucket)
        if waits and not waited:
            spans.enter()
        elif waited and not waits:
            spans.leave()

    CommClock.measure = measure  # type: ignore[method-assign]
    Ledger.switch = switch  # type: ignore[method-assign]


SITE = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from bench.watch.spans_inside import install
install(Path({folder!r}))
del sys.path[:{count}]
"""


def environment_of(folder: Path) -> dict[str, str]:
    """Return variables with which every Python process below loads this module, and keeps its sums in ``folder``."""
    (folder / "site").mkdir(parents=True, exist_ok=True)
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "src")]
    (folder / "site" / "sitecustomize.py").write_text(
        SITE.format(paths=paths, folder=str(folder), count=len(paths))
    )
    return {"PYTHONPATH": os.pathsep.join((str(folder / "site"), os.environ.get("PYTHONPATH", "")))}
