"""Stop random processes of the tests for moments: ``pytest -p random_stops`` finds tests that depend on the order of two processes.

A busy machine lets a process wait for tenths of a second, at any line. A failure that this makes once in a thousand runs of a test comes within
minutes if a program stops one descendant of pytest after the other (SIGSTOP), each for up to ``LONGEST_S``, and continues it.

A test that stops a process itself, as some of ``tests/fleet/node/test_worker.py`` do, can take such a stop for its own, and then waits for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

LONGEST_S = 0.5
"""Longest stop. Leases and time limits of tests are longer than a second."""
_PAUSE_S = 0.15
"""Longest pause between two stops."""
_RUNNING = "RSD"
"""States of a process that no test has stopped (proc(5))."""


def pytest_configure() -> None:
    """Start the program that stops descendants of this process. It ends with it."""
    context = multiprocessing.get_context("fork")  # this module is imported once
    context.Process(target=_stop_at_random, args=(os.getpid(),), daemon=True).start()


def _stop_at_random(ancestor: int) -> None:
    while os.getppid() == ancestor:
        candidates = [pid for pid in _descendants(ancestor) if pid != os.getpid() and _state(pid) in _RUNNING]
        with suppress(ProcessLookupError, IndexError):  # it has ended; there is none
            pid = random.choice(candidates)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(random.uniform(0, LONGEST_S))
            os.kill(pid, signal.SIGCONT)
        time.sleep(random.uniform(0, _PAUSE_S))


def _descendants(pid: int) -> list[int]:
    descendants, parents = list[int](), [pid]
    while parents:
        children = _children(parents.pop())
        descendants += children
        parents += children
    return descendants


def _children(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    children = list[int]()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            children += map(int, file.read_text().split())
    return children


def _state(pid: int) -> str:
    """Return the letter of the process's state; X if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"
