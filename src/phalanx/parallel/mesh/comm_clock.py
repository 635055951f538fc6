"""Exposed communication time: the time that a rank waits in collectives.

A gloo collective blocks the calling thread, so all of its time is exposed. On a GPU, collectives run on their own streams, and the
host time of launching them is not communication. There the clock measures how long the compute stream waits for them
(``phalanx.hardware.local.device``).
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
    """Total time spent waiting for collectives since the last read."""

    blocking: bool
    """True if collectives block the host (gloo on CPU tensors)."""
    total_ns: int = 0
    on_enter: Callable[[], None] | None = None
    """Called before each collective."""
    queue: QueueTimes | None = None
    """Measures waits on a device whose collectives do not block the host; ``None`` measures nothing there."""

    @classmethod
    def of(cls, device: torch.device) -> CommClock:
        """Return the clock of a rank that computes on ``device``."""
        return cls(blocking=not on_gpu(device), queue=queue_times(device))

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time inside the ``with`` to ``total_ns`` if calls block the host, else to the device queue's times.

        Calls ``on_enter`` first.
        """
        if self.on_enter is not None:
            self.on_enter()
        begin = time.monotonic_ns()
        try:
            with nullcontext() if self.queue is None else self.queue.measure():
                yield
        finally:
            if self.blocking:
                self.total_ns += time.monotonic_ns() - begin

    def take_ns(self) -> int:
        """Return the nanoseconds measured since the last call. If collectives do not block, the device must have finished them."""
        total = self.total_ns + (0 if self.queue is None else self.queue.take_ns())
        self.total_ns = 0
        return total

    def forget(self) -> None:
        """Discard what was measured since the last call."""
        self.total_ns = 0
        if self.queue is not None:
            self.queue.forget()
