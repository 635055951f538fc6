"""A simulated coordinator: the real core, a journal, a claim and a timer; it may crash at any moment and replays its journal."""

from __future__ import annotations

from typing import Protocol

from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core import succession
from phalanx.fleet.core.decide import CoreStep
from phalanx.fleet.core.epochs.deadlines import next_deadline_s
from phalanx.fleet.core.invariants import BrokenInvariant, check, mark
from phalanx.fleet.core.orders import Order, deliveries
from phalanx.fleet.core.replay import batch_line, first_line, replay
from phalanx.fleet.core.state import FleetPhase, FleetState, NonFiniteDoubt, encode_state
from phalanx.fleet.core.succession import Claim
from phalanx.simulate.clock import SimulatedClock
from phalanx.simulate.hostile.conditions import Conditions
from phalanx.simulate.hostile.training import Disk

LEAST_TICK_S = 0.25


class Register(Protocol):
    """The claims of all heads, as one head sees them."""

    @property
    def claim(self) -> Claim:
        """The newest claim."""

    def make(self, claim: Claim) -> bool:
        """Makes a claim; False if its term has been claimed."""

    def begins(self, head: SimulatedCoordinator) -> None:
        """Notes that a head begins an epoch."""

    def left_of(self, journal: list[bytes]) -> list[bytes]:
        """What is left of a journal after its machine was lost."""


class HeadWorld(Protocol):
    """A head's view of the world."""

    clock: SimulatedClock
    conditions: Conditions
    disk: Disk

    def to_node(self, head: SimulatedCoordinator, name: str, command: c.Command) -> None:
        """Sends a command over the unreliable network."""

    def check_source(self, state: FleetState) -> None:
        """Is called with the state that begins an epoch, before anybody is told."""

    def check_laid(self, seats: int, state: FleetState) -> None:
        """Is called with a state that has begun an epoch, and the number of seats before it."""

    def check_verdict(self, doubt: NonFiniteDoubt | None, state: FleetState) -> None:
        """Is called after each event, with the doubt that was open before it and the state after it."""


class SimulatedCoordinator:
    """The shell around the core: what stands between the network and the decisions."""

    def __init__(
        self,
        world: HeadWorld,
        register: Register,
        node: str,
        claim: Claim,
        state: FleetState,
        step: CoreStep,
    ) -> None:
        """
        Args:
            world: Clock, disk and network.
            register: The claims.
            node: The node on whose machine it runs; empty if that is none of the fleet's.
            claim: The claim with which it begins to lead.
            state: The state from which it leads on.
            step: The core's ``step``, or a broken one that the world is to find out.
        """
        self.world, self.register, self.node, self.claim, self.step = world, register, node, claim, step
        self.clock, self.disk = world.clock, world.disk
        self.state = state
        self.journal = [first_line(self.state)]
        self.up = False
        self.life = 0
        self.superseded = False
        self.gone = False
        """Its machine was lost, and with it perhaps the end of its journal."""
        self.stopped = False
        """The process stands still: it hears nothing until it goes on, and then everything at once."""
        self.unread: list[m.CoreEvent] = []
        self.falls: str = ""
        """``before`` or ``after`` the next claim, it crashes."""
        self.seen: tuple[int, ...] = ()
        """Committed steps that the core has been told of."""

    def start(self) -> None:
        """Comes up where it was before: replays the journal, and tells the core that it was away."""
        if self.up or self.gone or self._is_superseded():
            return
        if self.events:
            before = encode_state(self.state)
            self.state = replay(self.journal, self.step).state
            if encode_state(self.state) != before:
                raise BrokenInvariant("the journal does not replay to the same state")
        self._lead(anew=not self.events and self.claim.reign == 1)

    def come_back(self) -> None:
        """Comes up after its machine was lost, with what is left of its journal."""
        self.gone = False
        if self._is_superseded():
            return
        lines, fencing = self.register.left_of(self.journal), self.state.fencing
        self.state = succession.inherited(self.claim, lines, fencing, self.clock.now_s, self.step)
        self.journal, self.seen = [first_line(self.state)], ()
        self._lead(anew=False)

    def _is_superseded(self) -> bool:
        self.superseded = self.superseded or self.register.claim.reign != self.claim.reign
        return self.superseded

    def _lead(self, anew: bool) -> None:
        self.up = True
        # A head that fell between its claim and its commands has begun the epoch all the same.
        self.disk.fence = max(self.disk.fence, self.claim.epoch)
        if succession.is_untold(self.state, self.claim):
            self._decide(m.Untold())
        if not anew and self.up:  # before anything else: deadlines may have passed that nobody could keep
            self._decide(m.Restarted())
        self._tick(self.life)

    @property
    def events(self) -> int:
        """How many events the core has seen."""
        return len(self.journal) - 1

    def crash(self) -> None:
        """Dies at once; the journal survives."""
        self.up = self.stopped = False
        self.falls = ""
        self.unread = []
        self.life += 1

    def lose_machine(self) -> None:
        """Dies, and no launcher on its machine starts it again."""
        self.gone = True
        self.crash()

    def go_on(self) -> None:
        """The process that stood still goes on, with all that has arrived meanwhile."""
        self.stopped = False
        unread, self.unread = self.unread, []
        for event in unread:
            self.hear(event)

    def hear(self, event: m.CoreEvent) -> None:
        """Takes an event, after what has changed on disk."""
        if self.stopped:
            self.unread.append(event)
        elif self.up:
            saved = tuple(sorted(self.disk.steps))
            if saved != self.seen:
                self.seen = saved
                self._decide(m.DiskHolds(saved))
            if self.up:
                self._decide(event)

    def _decide(self, event: m.CoreEvent) -> None:
        before, doubt, now_s = mark(self.state), self.state.doubt, self.clock.now_s
        seats = len(self.state.seats)
        self.journal.append(batch_line(now_s, (event,)))
        self.state, orders = self.step(self.state, event, now_s)
        check(self.state, before)
        self.world.check_verdict(doubt, self.state)
        if self.state.epoch > before.epoch:
            self.world.check_laid(seats, self.state)
        if succession.is_due(self.claim, self.state) and not self._claims():
            return
        self.disk.delete(self.state.condemned)
        self._send(orders)

    def _claims(self) -> bool:
        """Claims anew; False if it must send nothing: it was superseded, or fell."""
        falls = self.falls
        if falls == "before":
            self.crash()
            return False
        claim = succession.renewed(self.claim, self.state, f"{self.claim.term + 1} by {self.node}")
        if not self.register.make(claim):
            self.crash()
            self.superseded = True
            return False
        begins, self.claim = claim.epoch > self.claim.epoch, claim
        if falls:
            self.crash()
            return False
        if begins:
            self._begins()
        return True

    def _begins(self) -> None:
        # Before anybody is told: a fenced node that trains on must not commit what is about to be computed again.
        self.disk.fence = self.state.epoch
        self.register.begins(self)
        if self.state.phase is FleetPhase.BINDING:
            self.world.check_source(self.state)

    def _send(self, orders: list[Order]) -> None:
        for name, command in deliveries(self.state, orders):
            self.world.to_node(self, name, command)

    def _tick(self, life: int) -> None:
        if self.life != life:
            return
        if not self.stopped:
            if self._is_superseded():
                self.crash()
                return
            self.hear(m.Tick())
        wait_s = max(LEAST_TICK_S, next_deadline_s(self.state) - self.clock.now_s)
        self.clock.after(min(wait_s, 1.0), lambda: self._tick(life))
