"""The heads of a hostile world: who leads, who has been superseded, and what befalls the claims and journals between them.

Heads and candidates share a register of claims, as they do on the storage of a real fleet (``phalanx.fleet.core.succession``). A head runs
on a node's machine and is lost with it, or is started again by its launcher, there or nowhere. It may fall between its claim and its
commands, stand still while another takes over, or be cut off from most nodes. With its machine, the end of its journal may be lost, or
all of it. The oracle of this part: no epoch is begun by two heads.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from phalanx.fleet.core import decide as core
from phalanx.fleet.core import succession
from phalanx.fleet.core.invariants import BrokenInvariant
from phalanx.fleet.core.succession import Candidacy, Claim
from phalanx.run.peers.fencing import FencingToken
from phalanx.simulate.hostile.coordinator import HeadWorld, SimulatedCoordinator

STANDS_FOR = 2
"""A candidate withdraws after so many times the patience of the fleet."""
_START = FencingToken(0, "")


class Heads:
    """Every head that has led, the claims that they made, and the candidates of now."""

    def __init__(self, world: HeadWorld, step: core.CoreStep, draw: random.Random) -> None:
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
        """Makes a claim; False if its term has been claimed."""
        if claim.term != len(self.claims) + 1:
            return False
        self.claims.append(claim)
        return True

    # --- heads

    @property
    def newest(self) -> SimulatedCoordinator:
        """The head that made the newest claim, dead or alive."""
        return self.heads[self.claim.reign - 1]

    def first(self, node: str) -> None:
        """The run's first head starts on the machine of ``node``; on none of the fleet's if that is empty."""
        state = core.initial_state(self.world.conditions.settings, 0.0, _START)
        claim = succession.first_claim(state, node, "first")
        self.make(claim)
        self.heads.append(SimulatedCoordinator(self.world, self, node, claim, state, self.step))
        self.newest.start()

    def lose_machine(self, node: str) -> None:
        """A machine is lost, with the head or the candidate on it."""
        self.withdraw(node)
        for head in self.heads:
            if head.node == node:
                head.lose_machine()

    def machine_is_back(self, node: str) -> None:
        """A machine has come back; some launchers come back with it, and start their head again."""
        for head in self.heads:
            if head.node == node and head.gone and self.random.random() < 0.5:
                head.come_back()

    def make_peace(self) -> None:
        """Ends all faults of heads. Where no node can succeed the lost head, somebody starts it again."""
        for head in self.heads:
            head.falls = ""
            head.go_on()
        newest = self.newest
        if newest.gone and not self.claim.voters:
            newest.come_back()
        newest.start()

    def leading(self) -> list[SimulatedCoordinator]:
        """The heads that answer: more than one, while an earlier one has not noticed that it was superseded."""
        return [head for head in self.heads if head.up]

    def begins(self, head: SimulatedCoordinator) -> None:
        """Notes that a head begins an epoch. Raises BrokenInvariant if another has begun that one, or a later one."""
        epoch, reign = head.state.epoch, head.claim.reign
        newest = max(self.begun_by, default=-1)
        if self.begun_by.get(epoch, reign) != reign or (epoch < newest and self.begun_by[newest] != reign):
            raise BrokenInvariant(
                f"reign {reign} began epoch {epoch}, and reign {self.begun_by[newest]} epoch {newest}"
            )
        self.begun_by[epoch] = reign

    @property
    def events(self) -> int:
        """Number of events that the cores of all heads have seen."""
        return sum(head.events for head in self.heads)

    # --- candidates

    def stand(self, node: str) -> None:
        """A node becomes a candidate."""
        until_s = self.world.clock.now_s + STANDS_FOR * self.world.conditions.succession_s
        self.candidates[node] = (Candidacy(self.claim), until_s)

    def withdraw(self, node: str) -> None:
        """A node is no candidate any more: it is lost, or has a head."""
        self.candidates.pop(node, None)

    def vote(self, candidate: str, voter: str) -> None:
        """A node without a head has attached to a candidate, which may thereby be elected."""
        candidacy, until_s = self.candidates[candidate]
        now_s, claim = self.world.clock.now_s, self.claim
        if now_s >= until_s or candidacy.claim.term != claim.term:
            self.withdraw(candidate)
            return
        candidacy.heard(voter, now_s)
        if not candidacy.is_elected(now_s, 2 * self.world.conditions.heartbeat_s):
            return
        self.withdraw(candidate)
        successor = succession.succeeding(claim, candidate, f"{claim.term + 1} by {candidate}")
        if self.make(successor):
            self._succeed(claim, successor)

    def _succeed(self, before: Claim, claim: Claim) -> None:
        """The head that has made ``claim`` takes over from the one of ``before``."""
        self.successions += 1
        lines, world = self.left_of(self.heads[before.reign - 1].journal), self.world
        state = succession.inherited(before, lines, _START, world.clock.now_s, self.step)
        self.heads.append(SimulatedCoordinator(world, self, claim.node, claim, state, self.step))
        self.newest.start()

    def left_of(self, journal: Sequence[bytes]) -> list[bytes]:
        """What is left of a journal after its machine was lost: most often all of it, else a first part, or nothing."""
        chance = self.random.random()
        if chance < 0.5:
            return list(journal)
        if chance < 0.6:
            return []
        if chance < 0.9:
            return list(journal[: max(0, len(journal) - int(self.random.expovariate(1 / 20)))])
        return list(journal[: self.random.randint(0, len(journal))])
