"""What has come in for the core since the coordinator's last turn: one batch of events, which is one line of the journal.

Of heartbeats only the last one of each node counts, so that 12,500 nodes cost one event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from phalanx.fleet.core import messages as m


@dataclass
class Inbox:
    """The events of the next turn, in their order."""

    events: list[m.CoreEvent] = field(default_factory=list)
    heartbeats: dict[str, m.Heartbeat] = field(default_factory=dict)
    """Node -> its last heartbeat."""
    deaf_s: float = 0.0
    """Time in which this process did not read messages, and of which the core has not been told."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a turn is due before its time."""

    def add(self, *events: m.CoreEvent) -> None:
        """Queues events for a turn that begins at once."""
        self.events += events
        self.wake.set()

    def holds(self, kind: type[m.CoreEvent]) -> bool:
        """True if an event of this kind waits for its turn."""
        return any(isinstance(event, kind) for event in self.events)

    def batch(self, on_disk: m.DiskHolds | None) -> tuple[m.CoreEvent, ...]:
        """All that the core is to be told now; it stays here until ``clear``, since the journal may not take it."""
        stood_still = [m.StoodStill(self.deaf_s)] if self.deaf_s else []
        looked = [on_disk] if on_disk is not None else []
        folded = [m.Folded(tuple(self.heartbeats.values()))] if self.heartbeats else []
        return (*stood_still, *looked, *folded, *self.events, m.Tick())

    def clear(self) -> None:
        """Forgets what the journal has taken."""
        self.events, self.heartbeats, self.deaf_s = [], {}, 0.0

    def put_back(self, undecided: Collection[m.CoreEvent]) -> None:
        """Queues events of a batch that were not decided, before those that have come since."""
        self.events[:0] = [event for event in undecided if not isinstance(event, m.Tick)]

    async def measure_deafness(self, tick_s: float) -> None:
        """Measures, until cancelled, how long this process reads no messages: stopped, swapped out, starved, or busy with a turn.

        The time in which it waits for a disk does not count. A thread does that, and messages are read meanwhile.
        """
        while True:
            due_s = time.monotonic() + tick_s / 4
            await asyncio.sleep(tick_s / 4)
            late_s = time.monotonic() - due_s
            if late_s > tick_s / 2:
                self.deaf_s += late_s
