"""A simulated coordinator: the real core, a journal and a timer; it may crash at any moment and replays its journal."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.fleet.core import commands as c
from phalanx.fleet.core import decide as core
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.decide import CoreStep
from phalanx.fleet.core.epochs import next_deadline_s
from phalanx.fleet.core.invariants import BrokenInvariant, check, mark
from phalanx.fleet.core.orders import deliveries
from phalanx.fleet.core.replay import batch_line, first_line, replay
from phalanx.fleet.core.settings import CoreSettings
from phalanx.fleet.core.state import FleetState, NonFiniteDoubt, encode_state
from phalanx.simulate.clock import SimulatedClock
from phalanx.simulate.hostile.training import Disk

LEAST_TICK_S = 0.25


class SimulatedCoordinator:
    """The shell around the core: what stands between the network and the decisions."""

    def __init__(
        self,
        settings: CoreSettings,
        clock: SimulatedClock,
        disk: Disk,
        send: Callable[[str, c.Command], None],
        on_epoch: Callable[[FleetState], None],
        on_decision: Callable[[NonFiniteDoubt | None, FleetState], None],
        step: CoreStep,
    ) -> None:
        """
        Args:
            settings: The core's.
            clock: Simulated time.
            disk: Committed checkpoints, which it watches.
            send: Sends a command to a node.
            on_epoch: Called with the state that begins an epoch, before anybody is told.
            on_decision: Called after each event, with the doubt that was open before it and the state after it.
            step: The core's ``step``, or a broken one that the world is to find out.
        """
        self.clock, self.disk = clock, disk
        self.send, self.on_epoch, self.on_decision, self.step = send, on_epoch, on_decision, step
        self.state = core.initial_state(settings, 0.0)
        self.journal = [first_line(self.state)]
        self.up = False
        self.life = 0
        self.seen: tuple[int, ...] = ()
        """Committed steps that the core has been told of."""

    def start(self) -> None:
        """Comes up: replays the journal, and tells the core that it was away."""
        if self.up:
            return
        self.up = True
        if self.events:
            before = encode_state(self.state)
            self.state = replay(self.journal, self.step).state
            if encode_state(self.state) != before:
                raise BrokenInvariant("the journal does not replay to the same state")
            self.hear(m.Restarted())
        self._tick(self.life)

    @property
    def events(self) -> int:
        """How many events the core has seen."""
        return len(self.journal) - 1

    def crash(self) -> None:
        """Dies at once; the journal survives."""
        self.up = False
        self.life += 1

    def hear(self, event: m.CoreEvent) -> None:
        """Takes an event, after what has changed on disk."""
        if self.up:
            saved = tuple(sorted(self.disk.steps))
            if saved != self.seen:
                self.seen = saved
                self._decide(m.DiskHolds(saved))
            self._decide(event)

    def _decide(self, event: m.CoreEvent) -> None:
        before, doubt, now_s = mark(self.state), self.state.doubt, self.clock.now_s
        self.journal.append(batch_line(now_s, (event,)))
        self.state, orders = self.step(self.state, event, now_s)
        check(self.state, before)
        self.on_decision(doubt, self.state)
        self.disk.delete(self.state.condemned)
        if self.state.epoch > before.epoch:
            # Before anybody is told: a fenced node that trains on must not commit what is about to be computed again.
            self.disk.fence = self.state.epoch
            self.on_epoch(self.state)
        for name, command in deliveries(self.state, orders):
            self.send(name, command)

    def _tick(self, life: int) -> None:
        if self.life == life:
            self.hear(m.Tick())
            wait_s = max(LEAST_TICK_S, next_deadline_s(self.state) - self.clock.now_s)
            self.clock.after(min(wait_s, 1.0), lambda: self._tick(life))
