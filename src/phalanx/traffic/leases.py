"""Leases on pages that a worker offers to others: held until they were fetched, or until nobody fetched them in time.

A page under lease stays whatever the worker's own cache evicts. What is not under lease is freed by the cache alone, so that a fetcher that
dies costs memory for the time of a lease and no longer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass
class Leases:
    """Who may still fetch which pages."""

    lease_s: float = 30.0
    until_s: dict[Hashable, float] = field(default_factory=dict)
    names: dict[Hashable, tuple[bytes, ...]] = field(default_factory=dict)
    expired: int = 0

    def offer(self, job: Hashable, names: Sequence[bytes], now_s: float) -> None:
        """Begins a lease on pages under the number of the job that computed them."""
        self.until_s[job], self.names[job] = now_s + self.lease_s, tuple(names)

    def offered(self, job: Hashable, now_s: float) -> tuple[bytes, ...]:
        """The names of a lease that still holds; () of any other."""
        return self.names[job] if self.until_s.get(job, now_s) > now_s else ()

    def done(self, job: Hashable) -> bool:
        """Ends a lease; whether there was one."""
        self.names.pop(job, None)
        return self.until_s.pop(job, None) is not None

    def end_all(self) -> None:
        """Ends all leases."""
        self.until_s.clear()
        self.names.clear()

    def expire(self, now_s: float) -> list[Hashable]:
        """Ends the leases that are over, and returns their jobs."""
        over = [job for job, until_s in self.until_s.items() if until_s <= now_s]
        for job in over:
            self.done(job)
        self.expired += len(over)
        return over

    def held(self) -> set[bytes]:
        """Pages under any lease."""
        return {name for names in self.names.values() for name in names}
