"""How long a device's queue stood in parts of the work, told after the step, without the host waiting meanwhile.

A GPU runs behind the host, which queues a wait for a collective in microseconds and goes on. What the wait took is known to the GPU alone: two
events around it in the queue (https://docs.pytorch.org/docs/2.11/generated/torch.cuda.Event.html, ``enable_timing``) are read when all is done.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from phalanx.hardware.local.device import on_gpu

_NS_PER_MS = 1e6


class Event(Protocol):
    """A place in a queue of which the device notes the time when it comes there."""

    @abstractmethod
    def record(self) -> None:
        """Puts it behind all that is in the current queue."""

    @abstractmethod
    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from here to ``end``, an event of the same kind; both must have been reached."""


class QueueTimes:
    """Adds up the time of parts of one queue since it was last read.

    Args:
        queue: Tells in which queue the work is put now. What is put in another one than that of the time of making runs beside it, and is not counted.
        event: Makes events, which are used again.
    """

    def __init__(self, queue: Callable[[], object], event: Callable[[], Event]) -> None:
        self._queue, self._make = queue, event
        self._own = queue()
        self._free: list[Event] = []
        self._spans: list[tuple[Event, Event]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Counts what the queue does for the work that is put there inside the ``with``, waiting included."""
        if self._queue() != self._own:
            yield
            return
        start = self._recorded()
        try:
            yield
        finally:
            self._spans.append((start, self._recorded()))

    def take_ns(self) -> int:
        """The time counted since the last call, all of which must be over on the device: wait for it before."""
        total = sum(start.elapsed_time(end) for start, end in self._spans)
        self.forget()
        return round(total * _NS_PER_MS)

    def forget(self) -> None:
        """Counts nothing of what was measured since the last call."""
        self._free += [event for span in self._spans for event in span]
        self._spans = []

    def _recorded(self) -> Event:
        event = self._free.pop() if self._free else self._make()
        event.record()
        return event


def queue_times(device: torch.device) -> QueueTimes | None:
    """The times of the queue that this thread puts its work in; ``None`` for a CPU, where the host's clock says the same."""
    if not on_gpu(device):
        return None

    def event() -> Event:
        made: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return made

    return QueueTimes(lambda: torch.cuda.current_stream(device), event)
