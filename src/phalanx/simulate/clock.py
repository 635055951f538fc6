"""A simulated clock: things happen in the order of their times, and those of the same time in the order of their making."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class SimulatedClock:
    """Simulated seconds since the start, and what is still to happen."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Lets ``action`` happen at ``time_s``, or now if that is past."""
        self._made += 1
        heapq.heappush(self._agenda, (max(time_s, self.now_s), self._made, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Lets ``action`` happen ``delay_s`` from now."""
        self.at(self.now_s + delay_s, action)

    def run_until(self, end_s: float) -> None:
        """Lets everything happen that is due by ``end_s``."""
        while self._agenda and self._agenda[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(self._agenda)
            action()
        self.now_s = end_s
