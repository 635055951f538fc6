"""Accounting of simulated time: each nanosecond of the run is in exactly one bucket."""

from __future__ import annotations

from dataclasses import dataclass, field

NS_PER_S = 1_000_000_000
USEFUL, RECOMPUTED, INTERRUPTED = "useful steps", "recomputed steps", "interrupted step"
DETECTION, PARKING, BINDING = "detection", "parking", "binding and restore"
FORMING, WAITING = "first formation", "waiting for nodes"


def to_ns(time_s: float) -> int:
    """Seconds as whole nanoseconds."""
    return round(time_s * NS_PER_S)


@dataclass
class Account:
    """The time of the run: exactly one bucket is open at any moment."""

    bucket: str = FORMING
    since_ns: int = 0
    totals_ns: dict[str, int] = field(default_factory=dict)

    def switch(self, bucket: str, now_ns: int) -> None:
        """Closes the open bucket and opens ``bucket``."""
        self.add(self.bucket, now_ns - self.since_ns)
        self.bucket, self.since_ns = bucket, now_ns

    def split(self, parts: dict[str, int], bucket: str, now_ns: int) -> None:
        """Closes the open bucket by dividing its time into ``parts``; ValueError if they are not the whole of it."""
        if sum(parts.values()) != now_ns - self.since_ns or min(parts.values()) < 0:
            raise ValueError(f"{parts} do not add up to {now_ns - self.since_ns} ns")
        for name, duration_ns in parts.items():
            self.add(name, duration_ns)
        self.bucket, self.since_ns = bucket, now_ns

    def add(self, bucket: str, duration_ns: int) -> None:
        """Adds a duration to a bucket."""
        self.totals_ns[bucket] = self.totals_ns.get(bucket, 0) + duration_ns
