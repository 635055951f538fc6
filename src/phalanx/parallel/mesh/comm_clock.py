"""Exposed communication time: how long a rank stood still in collectives.

A collective on gloo blocks the calling thread, so its time is communication that nothing hides. On a GPU
collectives run on streams of their own, and what the host spends launching them says nothing: nothing is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class CommClock:
    """Adds up the time spent in blocking collectives since it was last read."""

    blocking: bool
    """True if collectives block the host (gloo on CPU tensors)."""
    total_ns: int = 0
    entered: Callable[[], None] | None = None
    """Called before each collective."""

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Counts the time inside the ``with``."""
        if self.entered is not None:
            self.entered()
        begin = time.monotonic_ns()
        try:
            yield
        finally:
            if self.blocking:
                self.total_ns += time.monotonic_ns() - begin

    def take_ns(self) -> int:
        """The time counted since the last call."""
        total, self.total_ns = self.total_ns, 0
        return total
