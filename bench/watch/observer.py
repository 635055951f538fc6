"""An observer outside a run: its own clock, the growth of the event file, and the kernel's account of the writer's main thread.

It shares nothing with the run that it watches; ``bench.watch.ledger`` compares the run's ledger with it.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.fleet.outside import children
from bench.watch.spans_inside import Spent, read
from phalanx.run.directory.paths import RunDirectory

SAMPLE_S = 0.002


@dataclass(frozen=True)
class Sample:
    """A reading of the processes at a moment of the observer's clock."""

    at_s: float
    pid: int
    """The process that writes the run's events; 0 if there is none."""
    thread: Spent
    """The kernel's account of its main thread since it began, on a processor and in line for one, by the observer's clock."""
    waiting: Spent
    """The process's own account of that thread in the spans that the ledger books as waiting, up to the newest that has ended."""
    between: Spent
    """The same account of the time between these spans."""
    nbytes: int
    """Size of the event file."""


class Observer(threading.Thread):
    """Samples a run from outside until ``over`` is set."""

    def __init__(self, launcher: int, run_dir: Path, spans: Path) -> None:
        """
        Args:
            launcher: The process that was started; all processes of the run descend from it.
            run_dir: The directory of its run.
            spans: Folder in which its processes keep their account of spans of waiting.
        """
        super().__init__(daemon=True)
        self.spans = spans
        self.events, self.launcher, self.over = RunDirectory(run_dir).events, launcher, threading.Event()
        self.samples: list[Sample] = []
        self.born: dict[int, float] = {}
        """Time at which each of the run's processes was first seen."""
        self.writer = 0

    def run(self) -> None:
        turn = 0
        while not self.over.is_set():
            now_s = time.monotonic()
            if turn % 10 == 0:
                self._look_around(now_s)
            ran_s, in_line_s = kernel_s(self.writer)
            thread = Spent(now_s, ran_s, in_line_s)
            accounts = read(self.spans, self.writer)
            self.samples.append(Sample(now_s, self.writer, thread, *accounts, size_of(self.events)))
            turn += 1
            time.sleep(SAMPLE_S)

    def _look_around(self, now_s: float) -> None:
        pids = descendants(self.launcher)
        for pid in pids:
            self.born.setdefault(pid, now_s)
        if not (self.writer in pids and holds(self.writer, self.events)):
            self.writer = next((pid for pid in pids if is_worker(pid) and holds(pid, self.events)), 0)

    def seen_s(self, nbytes: int) -> float:
        """Return the time at which the event file was first seen to have ``nbytes`` bytes."""
        place = bisect_left(self.samples, nbytes, key=lambda sample: sample.nbytes)
        return self.samples[min(place, len(self.samples) - 1)].at_s

    def between(self, first_s: float, last_s: float) -> tuple[Spent, Spent, Spent]:
        """Return the seconds of the writer's main thread between two times in one process: in all, in waiting, and between."""
        inside = [sample for sample in self.samples if first_s <= sample.at_s <= last_s and sample.pid]
        if not inside:
            return Spent(), Spent(), Spent()
        first, last = inside[0], inside[-1]
        return last.thread - first.thread, last.waiting - first.waiting, last.between - first.between


def descendants(pid: int) -> list[int]:
    """Return all processes below ``pid``, parents first."""
    pids, due = list[int](), [pid]
    while due:
        own = children(due.pop())
        pids += own
        due += own
    return pids


def kernel_s(pid: int) -> tuple[float, float]:
    """Return the seconds for which the main thread of a process has been on a processor, and in line for one."""
    with suppress(OSError, ValueError):
        ran, in_line, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
        return int(ran) / 1e9, int(in_line) / 1e9
    return 0.0, 0.0


def size_of(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def is_worker(pid: int) -> bool:
    with suppress(OSError):
        return b"worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def holds(pid: int, path: Path) -> bool:
    """Return True if a process has the file open."""
    with suppress(OSError):
        names = os.listdir(f"/proc/{pid}/fd")
        return any(os.path.realpath(f"/proc/{pid}/fd/{name}") == str(path) for name in names)
    return False
