"""Exposed communication time: how long a rank stood still in collectives.

A collective on gloo blocks the calling thread, so its time is communication that nothing hides. On a GPU
collectives run on streams of their own, and what the host spends launching them says nothing; there the time is counted in which the
stream of the computation waits for one (``phalanx.hardware.local.device``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from phalanx.hardware.local.device import QueueTimes, on_gpu, queue_times


@dataclass
class CommClock:
    """Adds up the time spent waiting for collectives since it was last read."""

    blocking: bool
    """True if collectives block the host (gloo on CPU tensors)."""
    total_ns: int = 0
    entered: Callable[[], None] | None = None
    """Called before each collective."""
    queue: QueueTimes | None = None
    """Measures where they do not block the host; without it, nothing is counted there."""

    @classmethod
    def of(cls, device: torch.device) -> CommClock:
        """The clock of a rank that computes on ``device``."""
        return cls(blocking=not on_gpu(device), queue=queue_times(device))

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Counts the time inside the ``with``."""
        if self.entered is not None:
            self.entered()
        begin = time.monotonic_ns()
        try:
            with nullcontext() if self.queue is None else self.queue.measure():
                yield
        finally:
            if self.blocking:
                self.total_ns += time.monotonic_ns() - begin

    def take_ns(self) -> int:
        """The time counted since the last call. Where collectives do not block, the device must be done with them."""
        total = self.total_ns + (0 if self.queue is None else self.queue.take_ns())
        self.total_ns = 0
        return total

    def forget(self) -> None:
        """Counts nothing of what was measured since the last call."""
        self.total_ns = 0
        if self.queue is not None:
            self.queue.forget()
