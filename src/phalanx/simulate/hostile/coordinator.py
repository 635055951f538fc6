"""A simulated coordinator: the real core, a journal, a timer; it may crash at any moment and replays its journal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.fleet.core import decide as core
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.epochs import next_deadline_s
from phalanx.fleet.core.invariants import BrokenInvariant, check, mark
from phalanx.fleet.core.orders import deliveries
from phalanx.fleet.core.state import encode_state

if TYPE_CHECKING:
    from phalanx.simulate.hostile.world import CoreStep, World

LEAST_TICK_S = 0.25


class SimulatedCoordinator:
    """What stands between the network and the core."""

    def __init__(self, world: World, step: CoreStep) -> None:
        self.world, self.step = world, step
        self.state = core.initial_state(world.settings, 0.0)
        self.journal: list[tuple[float, m.CoreEvent]] = []
        self.up = False
        self.life = 0
        self.seen: tuple[int, ...] = ()

    def start(self) -> None:
        """Comes up: replays the journal, and says that it was away."""
        if self.up:
            return
        self.up = True
        if self.journal:
            before = encode_state(self.state)
            state = core.initial_state(self.world.settings, 0.0)
            for now_s, event in self.journal:
                state, _ = self.step(state, m.decode_event(m.encode(event)), now_s)
            if encode_state(state) != before:
                raise BrokenInvariant("the journal does not replay to the same state")
            self.state = state
            self.hear(m.Restarted())
        self._tick(self.life)

    def crash(self) -> None:
        """Is gone at once."""
        self.up = False
        self.life += 1

    def hear(self, event: m.CoreEvent) -> None:
        """Takes an event, after what has changed on disk."""
        if self.up:
            saved = tuple(sorted(self.world.disk.steps))
            if saved != self.seen:
                self.seen = saved
                self._decide(m.DiskHolds(saved))
            self._decide(event)

    def _decide(self, event: m.CoreEvent) -> None:
        before, now_s = mark(self.state), self.world.clock.now_s
        self.journal.append((now_s, event))
        self.state, orders = self.step(self.state, event, now_s)
        check(self.state, before)
        self.world.disk.delete(self.state.condemned)
        if self.state.epoch > before.epoch:
            # Before anybody is told: who was given up, and trains on, must not commit what is about to be redone.
            self.world.disk.fence = self.state.epoch
            self.world.check_source(self.state)
        for name, command in deliveries(self.state, orders):
            self.world.to_node(name, command)

    def _tick(self, life: int) -> None:
        if self.life == life:
            self.hear(m.Tick())
            wait_s = max(LEAST_TICK_S, next_deadline_s(self.state) - self.world.clock.now_s)
            self.world.clock.after(min(wait_s, 1.0), lambda: self._tick(life))
