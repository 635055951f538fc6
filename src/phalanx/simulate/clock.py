"""A simulated clock with its event queue: actions run in the order of their times, ties in the order of scheduling."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class SimulatedClock:
    """Simulated seconds since the start, and a queue of scheduled actions."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Schedules ``action`` at ``time_s``, or now if that is past."""
        self._scheduled += 1
        heapq.heappush(self._queue, (max(time_s, self.now_s), self._scheduled, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Schedules ``action`` in ``delay_s`` seconds."""
        self.at(self.now_s + delay_s, action)

    def run_until(self, end_s: float) -> None:
        """Runs every action that is due by ``end_s``."""
        while self._queue and self._queue[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(self._queue)
            action()
        self.now_s = end_s
