"""What the choice of spares is worth: who sits where in a simulated fleet, beside a fleet that takes any spare.

Nodes of a *unit* talk most. After a fault the core gives a seat to the spare that is nearest to the rest of its unit; every other choice tears
more units, whose traffic then goes over the uplinks of switches and halls until the seat changes again. Both fleets lose and regain the same
nodes at the same times. The core decides for the one; for the other a vacant seat goes to a spare that is drawn at random.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.fleet.core.epochs.seating import common_levels

Domains = tuple[str, ...]


@dataclass(frozen=True)
class NetworkUse:
    """What a network has to do in a step, for given seats; or that on average over time."""

    step_s: float
    """Seconds that it needs."""
    left_bytes: tuple[float, ...] = ()
    """For each level, widest first: what leaves its domains."""


StepCost = Callable[[Sequence[str]], NetworkUse]
"""Prices given seats."""


@dataclass(frozen=True)
class SeatsKept:
    """How well a fleet kept its units together."""

    replaced: int
    """Seats that another node took."""
    replaced_near: tuple[float, ...]
    """For each level, widest first: the share of these whose new node is in the domain of the old one."""
    torn_units: tuple[float, ...]
    """For each level, widest first: units that were in more than one domain, on average over time."""
    most_torn_units: tuple[int, ...]
    """The same at the worst moment."""
    network: NetworkUse
    """What the network had to do in a step, on average over time; nothing if that was not asked for."""


class Seating:
    """Follows the seats of one fleet."""

    def __init__(self, domains: Mapping[str, Domains], unit: int, step_cost: StepCost | None) -> None:
        self.domains, self.unit, self.step_cost = domains, unit, step_cost
        self.levels = len(next(iter(domains.values())))
        self.seats: list[str] = []
        self.since_s = self.elapsed_s = 0.0
        self.use, self.total_s, self.total_bytes = NetworkUse(0.0), 0.0, list[float]()
        """What the network does now, and the sum of that over seconds."""
        self.replaced = 0
        self.near = [0] * self.levels
        self.depths: list[int] = []
        """Unit -> number of levels, from the widest, at which it is whole."""
        self.torn_s = [0.0] * self.levels
        self.most = [0] * self.levels

    def _torn(self) -> list[int]:
        return [sum(depth <= level for depth in self.depths) for level in range(self.levels)]

    def advance(self, now_s: float) -> None:
        """Counts the time since the last change."""
        passed_s, self.since_s = now_s - self.since_s, now_s
        if self.seats:
            self.elapsed_s += passed_s
            self.total_s += passed_s * self.use.step_s
            before = self.total_bytes or [0.0] * len(self.use.left_bytes)
            self.total_bytes = [
                total + passed_s * left for total, left in zip(before, self.use.left_bytes, strict=True)
            ]
            self.torn_s = [
                total + passed_s * torn for total, torn in zip(self.torn_s, self._torn(), strict=True)
            ]

    def seated(self, now_s: float, seats: Sequence[str]) -> None:
        """From now on the seats are these."""
        self.advance(now_s)
        for old, new in zip(self.seats, seats, strict=False):
            if old != new:
                self.replaced += 1
                near = common_levels(self.domains[old], self.domains[new])
                self.near = [count + (near > level) for level, count in enumerate(self.near)]
        before, self.seats = self.seats, list(seats)
        if before == self.seats:
            return
        units = [self.seats[first : first + self.unit] for first in range(0, len(self.seats), self.unit)]
        self.depths = [
            min(common_levels(self.domains[unit[0]], self.domains[name]) for name in unit) for unit in units
        ]
        self.most = list(map(max, self.most, self._torn()))
        if self.step_cost is not None:
            self.use = self.step_cost(self.seats)

    def result(self) -> SeatsKept:
        """What was counted."""
        time_s, replaced = max(self.elapsed_s, 1e-9), max(self.replaced, 1)
        return SeatsKept(
            replaced=self.replaced,
            replaced_near=tuple(count / replaced for count in self.near),
            torn_units=tuple(total / time_s for total in self.torn_s),
            most_torn_units=tuple(self.most),
            network=NetworkUse(self.total_s / time_s, tuple(total / time_s for total in self.total_bytes)),
        )


class SpareStudy:
    """The seats that the core gives, and those of a fleet that takes any spare."""

    def __init__(
        self, domains: Mapping[str, Domains], unit: int, seed: int, step_cost: StepCost | None = None
    ) -> None:
        self.chosen, self.drawn = (Seating(domains, unit, step_cost) for _ in range(2))
        self.random = random.Random(seed)

    def seated(self, now_s: float, seats: Sequence[str], spares: set[str]) -> None:
        """The core has dealt ``seats`` and has ``spares`` left: all other nodes are lost, in both fleets."""
        self.chosen.seated(now_s, seats)
        self.drawn.seated(now_s, self._any_spares(seats, spares))

    def _any_spares(self, seats: Sequence[str], spares: set[str]) -> list[str]:
        """The other fleet's seats, as many as ``seats``: who is there keeps theirs, vacant ones go to any node that is free."""
        usable = spares.union(seats)
        before = self.drawn.seats or list(seats)
        kept = [name if name in usable else "" for name in before[: len(seats)]]
        kept += [""] * (len(seats) - len(kept))
        free = sorted(usable.difference(kept))
        drawn = iter(self.random.sample(free, kept.count("")))
        return [name or next(drawn) for name in kept]

    def results(self, now_s: float) -> dict[str, SeatsKept]:
        """What was counted until now, for the nearest spares and for any."""
        for one in (self.chosen, self.drawn):
            one.advance(now_s)
        return {"nearest spare": self.chosen.result(), "any spare": self.drawn.result()}
