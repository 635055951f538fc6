"""Simulated time: a clock with its event queue, and an account in which each nanosecond is in exactly one bucket.

Actions run in the order of their times, ties in the order of scheduling.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field


class SimulatedClock:
    """Simulated seconds since the start, and a queue of scheduled actions."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Schedule ``action`` at ``time_s``, or now if that is past."""
        self._scheduled += 1
        heapq.heappush(self._queue, (max(time_s, self.now_s), self._scheduled, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Schedule ``action`` in ``delay_s`` seconds."""
        self.at(self.now_s + delay_s, action)

    def run_until(self, end_s: float) -> None:
        """Run every action that is due by ``end_s``, also those they schedule, each at its time; then set the clock
        to ``end_s``.
        """
        while self._queue and self._queue[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(self._queue)
            action()
        self.now_s = end_s


# The account.


NS_PER_S = 1_000_000_000
USEFUL, RECOMPUTED, INTERRUPTED = "useful steps", "recomputed steps", "interrupted step"
DETECTION, PARKING, BINDING = "detection", "parking", "binding and restore"
FORMING, WAITING = "first formation", "waiting for nodes"


def to_ns(time_s: float) -> int:
    """Return seconds as whole nanoseconds."""
    return round(time_s * NS_PER_S)


@dataclass
class Account:
    """The time of the run: exactly one bucket is open at any moment."""

    bucket: str = FORMING
    since_ns: int = 0
    totals_ns: dict[str, int] = field(default_factory=dict)

    def switch(self, bucket: str, now_ns: int) -> None:
        """Close the open bucket and open ``bucket``."""
        self.add(self.bucket, now_ns - self.since_ns)
        self.bucket, self.since_ns = bucket, now_ns

    def split(self, parts: dict[str, int], bucket: str, now_ns: int) -> None:
        """Close the open bucket by dividing its time into ``parts`` (nanoseconds by bucket), and open ``bucket`` at
        ``now_ns``.

        Raises ``ValueError`` if a part is negative or they do not add up to it.
        """
        if sum(parts.values()) != now_ns - self.since_ns or min(parts.values()) < 0:
            raise ValueError(f"{parts} do not add up to {now_ns - self.since_ns} ns")
        for name, duration_ns in parts.items():
            self.add(name, duration_ns)
        self.bucket, self.since_ns = bucket, now_ns

    def add(self, bucket: str, duration_ns: int) -> None:
        """Add a duration to a bucket."""
        self.totals_ns[bucket] = self.totals_ns.get(bucket, 0) + duration_ns
