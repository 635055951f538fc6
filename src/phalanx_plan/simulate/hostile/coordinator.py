"""Simulated coordinators: the real core, a journal, a claim and a timer each; leadership, and faults of claims and journals.

A coordinator may crash at any moment and replays its journal.

Heads and candidates share a register of claims, as they do on the storage of a real fleet (``phalanx.fleet.core.succession``). A head runs
on a node's machine and is lost with it, or its launcher restarts it, there or nowhere. It may crash between its claim and its
commands, stop while another takes over, or be cut off from most nodes. With its machine, the end of its journal may be lost, or
all of it. Oracle: no two heads begin the same epoch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from phalanx.fleet.core import commands as c
from phalanx.fleet.core import decide as core
from phalanx.fleet.core import messages as m
from phalanx.fleet.core import succession
from phalanx.fleet.core.decide import CoreStep
from phalanx.fleet.core.epochs.epoch_plan import deliveries
from phalanx.fleet.core.epochs.faults import next_deadline_s
from phalanx.fleet.core.invariants import BrokenInvariant, batch_line, check, first_line, mark, replay
from phalanx.fleet.core.simulated_clock import SimulatedClock
from phalanx.fleet.core.state import FleetPhase, FleetState, NonFiniteDoubt, encode_state
from phalanx.fleet.core.succession import Candidacy, Claim
from phalanx.run.identity import FencingToken
from phalanx_plan.simulate.hostile.training import Conditions, Disk

LEAST_TICK_S = 0.25


class HeadWorld(Protocol):
    """A head's view of the world."""

    clock: SimulatedClock
    conditions: Conditions
    disk: Disk

    def to_node(self, head: SimulatedCoordinator, name: str, command: c.Command) -> None:
        """Send a command over the unreliable network."""

    def check_source(self, state: FleetState) -> None:
        """Raise BrokenInvariant if the epoch that begins would restore an older state than it could; no command is sent yet."""

    def check_laid(self, seats: int, state: FleetState) -> None:
        """Raise BrokenInvariant if a fleet whose number of seats changed from ``seats`` is not placed along its network."""

    def check_verdict(self, doubt: NonFiniteDoubt | None, state: FleetState) -> None:
        """Raise BrokenInvariant if a node that never computed wrongly is found at fault; ``doubt`` was open before the event."""


class SimulatedCoordinator:
    """The shell around the core, between the network and the decisions."""

    def __init__(
        self,
        world: HeadWorld,
        register: Heads,
        node: str,
        claim: Claim,
        state: FleetState,
        step: CoreStep,
    ) -> None:
        """Prepare a head that is down, with a journal of its state only.

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
        self.machine_lost = False
        """True after the loss of its machine, and perhaps of the end of its journal."""
        self.stopped = False
        """True while the process is stopped: events queue up until it resumes."""
        self.unread: list[m.CoreEvent] = []
        self.falls: str = ""
        """The coordinator crashes ``before`` or ``after`` its next claim; empty if it does not."""
        self.reported_steps: tuple[int, ...] = ()
        """Committed steps that the core has received."""

    def start(self) -> None:
        """Restart on the same machine: replay the journal, and send ``Restarted`` to the core; the run's first start
        sends none.

        Does nothing if it is up, superseded, or its machine is lost. Raises BrokenInvariant if the replay differs.
        """
        if self.up or self.machine_lost or self._is_superseded():
            return
        if self.events:
            before = encode_state(self.state)
            self.state = replay(self.journal, self.step).state
            if encode_state(self.state) != before:
                raise BrokenInvariant("the journal does not replay to the same state")
        self._lead(anew=not self.events and self.claim.reign == 1)

    def come_back(self) -> None:
        """Restart after the loss of the machine, from the state that the surviving lines of the journal give.

        If another head has taken over, it only stops counting as lost.
        """
        self.machine_lost = False
        if self._is_superseded():
            return
        lines, fencing = self.register.surviving_lines(self.journal), self.state.fencing
        self.state = succession.inherited(self.claim, lines, fencing, self.clock.now_s, self.step)
        self.journal, self.reported_steps = [first_line(self.state)], ()
        self._lead(anew=False)

    def _is_superseded(self) -> bool:
        """Return True, from then on, once another reign has begun."""
        self.superseded = self.superseded or self.register.claim.reign != self.claim.reign
        return self.superseded

    def _lead(self, anew: bool) -> None:
        """Begin to lead: raise the disk's fence, send the core its first events, and start the ticks.

        ``anew`` is True only at the run's first start, which sends no ``Restarted``.
        """
        self.up = True
        # A head that crashed between its claim and its commands has still begun the epoch.
        self.disk.fence = max(self.disk.fence, self.claim.epoch)
        if succession.is_untold(self.state, self.claim):
            self._decide(m.EpochUnsent())
        if not anew and self.up:  # before other events: deadlines may have passed while it was down
            self._decide(m.Restarted())
        self._tick(self.life)

    @property
    def events(self) -> int:
        """Number of events that the core has received."""
        return len(self.journal) - 1

    def crash(self) -> None:
        """Crash at once; the journal survives. Events not yet read, a planned fall and planned ticks are lost."""
        self.up = self.stopped = False
        self.falls = ""
        self.unread = []
        self.life += 1

    def lose_machine(self) -> None:
        """Crash for good: no launcher on its machine restarts it."""
        self.machine_lost = True
        self.crash()

    def resume(self) -> None:
        """Resume a stopped process, with all events that arrived meanwhile."""
        self.stopped = False
        unread, self.unread = self.unread, []
        for event in unread:
            self.receive(event)

    def receive(self, event: m.CoreEvent) -> None:
        """Pass an event to the core, after an event for changed checkpoints on disk.

        Keeps it for later while the process is stopped; drops it if it is down.
        """
        if self.stopped:
            self.unread.append(event)
        elif self.up:
            saved = tuple(sorted(self.disk.steps))
            if saved != self.reported_steps:
                self.reported_steps = saved
                self._decide(m.DiskHolds(saved))
            if self.up:
                self._decide(event)

    def _decide(self, event: m.CoreEvent) -> None:
        """Append an event to the journal, take the core's step, check all invariants, and send its commands.

        Renews the claim if that is due; a claim for a new epoch fences earlier ones on disk. Then deletes condemned
        checkpoints, then sends. If the claim fails, by a succession or a planned fall, the head has crashed, and
        nothing is deleted or sent. Raises BrokenInvariant.
        """
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
        for name, command in deliveries(self.state, orders):
            self.world.to_node(self, name, command)

    def _claims(self) -> bool:
        """Renew the claim, due or not; return False if nothing may be sent, after a crash or a succession.

        ``falls`` crashes it before or after the claim is recorded. A claim for a new epoch begins that epoch.
        """
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
        """Fence earlier epochs on disk, and record the epoch that begins. While nodes are binding, check the state from which it starts."""
        # Before any command: a fenced node that still trains must not commit steps that will be computed again.
        self.disk.fence = self.state.epoch
        self.register.begins(self)
        if self.state.phase is FleetPhase.BINDING:
            self.world.check_source(self.state)

    def _tick(self, life: int) -> None:
        """Send a tick to the core, and plan the next at its deadline, after a second at most.

        Crashes if superseded; ends these ticks if it has restarted since ``life``; sends none while stopped.
        """
        if self.life != life:
            return
        if not self.stopped:
            if self._is_superseded():
                self.crash()
                return
            self.receive(m.Tick())
        wait_s = max(LEAST_TICK_S, next_deadline_s(self.state) - self.clock.now_s)
        self.clock.after(min(wait_s, 1.0), lambda: self._tick(life))


# The heads of a world.


STANDS_FOR = 2
"""A candidate withdraws after so many times the patience of the fleet."""
_START = FencingToken(0, "")


class Heads:
    """All heads that have led, their claims, and the current candidates."""

    def __init__(self, world: HeadWorld, step: core.CoreStep, draw: random.Random) -> None:
        """Begin without a claim or a head; ``step`` is the core's step, ``draw`` the world's random numbers."""
        self.world, self.step, self.random = world, step, draw
        self.claims: list[Claim] = []
        self.heads: list[SimulatedCoordinator] = []
        self.candidates: dict[str, tuple[Candidacy, float]] = {}
        """Node -> its candidacy, and the time at which it withdraws."""
        self.begun_by: dict[int, int] = {}
        """Epoch -> the reign of the head that began it."""
        self.successions = 0

    # --- the register

    @property
    def claim(self) -> Claim:
        """The newest claim."""
        return self.claims[-1]

    def make(self, claim: Claim) -> bool:
        """Record a claim and return True; False if its term has been claimed."""
        if claim.term != len(self.claims) + 1:
            return False
        self.claims.append(claim)
        return True

    # --- heads

    @property
    def newest(self) -> SimulatedCoordinator:
        """The head that made the newest claim, running or not."""
        return self.heads[self.claim.reign - 1]

    def first(self, node: str) -> None:
        """Start the run's first head on the machine of ``node``; outside the fleet if that is empty."""
        state = core.initial_state(self.world.conditions.settings, 0.0, _START)
        claim = succession.first_claim(state, node, "first")
        self.make(claim)
        self.heads.append(SimulatedCoordinator(self.world, self, node, claim, state, self.step))
        self.newest.start()

    def lose_machine(self, node: str) -> None:
        """Lose a machine, with the head or the candidate on it."""
        self.withdraw(node)
        for head in self.heads:
            if head.node == node:
                head.lose_machine()

    def machine_is_back(self, node: str) -> None:
        """Bring a machine back; some launchers come back with it and restart their head."""
        for head in self.heads:
            if head.node == node and head.machine_lost and self.random.random() < 0.5:
                head.come_back()

    def make_peace(self) -> None:
        """End the stops and planned crashes of all heads, and start the newest head unless its machine is lost.

        If no node can succeed it, its lost machine comes back.
        """
        for head in self.heads:
            head.falls = ""
            head.resume()
        newest = self.newest
        if newest.machine_lost and not self.claim.voters:
            newest.come_back()
        newest.start()

    def leading(self) -> list[SimulatedCoordinator]:
        """Return the heads that respond: more than one while an earlier head has not noticed its succession."""
        return [head for head in self.heads if head.up]

    def begins(self, head: SimulatedCoordinator) -> None:
        """Record that a head begins an epoch. Raises BrokenInvariant if another has begun that one, or a later one."""
        epoch, reign = head.state.epoch, head.claim.reign
        newest = max(self.begun_by, default=-1)
        if self.begun_by.get(epoch, reign) != reign or (epoch < newest and self.begun_by[newest] != reign):
            raise BrokenInvariant(
                f"reign {reign} began epoch {epoch}, and reign {self.begun_by[newest]} epoch {newest}"
            )
        self.begun_by[epoch] = reign

    @property
    def events(self) -> int:
        """Number of events that the cores of all heads have received."""
        return sum(head.events for head in self.heads)

    # --- candidates

    def stand(self, node: str) -> None:
        """Make a node a candidate."""
        until_s = self.world.clock.now_s + STANDS_FOR * self.world.conditions.succession_s
        self.candidates[node] = (Candidacy(self.claim), until_s)

    def withdraw(self, node: str) -> None:
        """Remove a candidate: its node is lost, or has a head."""
        self.candidates.pop(node, None)

    def vote(self, candidate: str, voter: str) -> None:
        """Count the vote of a node without a head; the candidate may thereby be elected. Withdraws a candidacy that is outdated."""
        candidacy, until_s = self.candidates[candidate]
        now_s, claim = self.world.clock.now_s, self.claim
        if now_s >= until_s or candidacy.claim.term != claim.term:
            self.withdraw(candidate)
            return
        candidacy.record_heartbeat(voter, now_s)
        if not candidacy.is_elected(now_s, 2 * self.world.conditions.heartbeat_s):
            return
        self.withdraw(candidate)
        successor = succession.succeeding(claim, candidate, f"{claim.term + 1} by {candidate}")
        if self.make(successor):
            self._succeed(claim, successor)

    def _succeed(self, before: Claim, claim: Claim) -> None:
        """Let the head with ``claim`` take over from the one of ``before``, with the lines of its journal that survive. Counts it."""
        self.successions += 1
        lines, world = self.surviving_lines(self.heads[before.reign - 1].journal), self.world
        state = succession.inherited(before, lines, _START, world.clock.now_s, self.step)
        self.heads.append(SimulatedCoordinator(world, self, claim.node, claim, state, self.step))
        self.newest.start()

    def surviving_lines(self, journal: Sequence[bytes]) -> list[bytes]:
        """Draw the lines of a journal that survive the loss of its machine: all (50 %), none (10 %), or a first part."""
        chance = self.random.random()
        if chance < 0.5:
            return list(journal)
        if chance < 0.6:
            return []
        if chance < 0.9:
            return list(journal[: max(0, len(journal) - int(self.random.expovariate(1 / 20)))])
        return list(journal[: self.random.randint(0, len(journal))])
