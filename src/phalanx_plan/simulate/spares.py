"""Value of the choice of spares: the seats of a simulated fleet, compared with a fleet that takes any spare.

Nodes of a *unit* communicate most. After a fault the core gives a seat to the spare nearest to the rest of its unit. Any other choice
splits more units, whose traffic then crosses the uplinks of switches and halls until the seat changes again. Both fleets lose and regain the same
nodes at the same times. The core decides for one fleet; in the other a vacant seat goes to a random spare.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.fleet.core.epochs.seating import common_levels

Domains = tuple[str, ...]


@dataclass(frozen=True)
class NetworkUse:
    """Network use of a step for given seats, or its average over time."""

    step_s: float
    """Seconds of a step that the network needs."""
    left_bytes: tuple[float, ...] = ()
    """For each level, widest first: bytes that leave its domains."""


StepCost = Callable[[Sequence[str]], NetworkUse]
"""Function that prices given seats."""


@dataclass(frozen=True)
class SeatsKept:
    """How well a fleet kept its units together."""

    replaced: int
    """Seats that another node took."""
    replaced_near: tuple[float, ...]
    """For each level, widest first: share of replaced seats whose new node is in the domain of the old one."""
    torn_units: tuple[float, ...]
    """For each level, widest first: units that were in more than one domain, on average over time."""
    most_torn_units: tuple[int, ...]
    """``torn_units`` at the worst moment."""
    network: NetworkUse
    """Network use of a step, on average over time; zero without a ``StepCost``."""


class Seating:
    """Record of the seats of one fleet."""

    def __init__(self, domains: Mapping[str, Domains], unit: int, step_cost: StepCost | None) -> None:
        """Begin without seats. ``domains`` are those of each node, ``unit`` the nodes of a unit; ``step_cost`` None prices nothing."""
        self.domains, self.unit, self.step_cost = domains, unit, step_cost
        self.levels = len(next(iter(domains.values())))
        self.seats: list[str] = []
        self.since_s = self.elapsed_s = 0.0
        self.use, self.total_s, self.total_bytes = NetworkUse(0.0), 0.0, list[float]()
        """Current network use, and its sum over seconds."""
        self.replaced = 0
        self.near = [0] * self.levels
        self.depths: list[int] = []
        """Unit -> number of levels, from the widest, within which it is in one domain."""
        self.torn_s = [0.0] * self.levels
        self.most = [0] * self.levels

    def _torn(self) -> list[int]:
        """Return, for each level, the number of units that are not within one of its domains."""
        return [sum(depth <= level for depth in self.depths) for level in range(self.levels)]

    def advance(self, now_s: float) -> None:
        """Add the time from the last change until ``now_s`` to the time sums of step cost, traffic and torn units;
        none before seats are set.
        """
        passed_s, self.since_s = now_s - self.since_s, now_s
        if self.seats:
            self.elapsed_s += passed_s
            self.total_s += passed_s * self.use.step_s
            before = self.total_bytes or [0.0] * len(self.use.left_bytes)
            self.total_bytes = [
                total + passed_s * leaving_bytes
                for total, leaving_bytes in zip(before, self.use.left_bytes, strict=True)
            ]
            self.torn_s = [
                total + passed_s * torn for total, torn in zip(self.torn_s, self._torn(), strict=True)
            ]

    def record_seats(self, now_s: float, seats: Sequence[str]) -> None:
        """Record the node in each seat from ``now_s`` on; count replacements, and the domains that they stay in.

        Changed seats get new units and, with a ``step_cost``, a new price.
        """
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
        """Return the averages over time until the last ``advance``, and the shares of replacements that stay in each level's domain."""
        time_s, replaced = max(self.elapsed_s, 1e-9), max(self.replaced, 1)
        return SeatsKept(
            replaced=self.replaced,
            replaced_near=tuple(count / replaced for count in self.near),
            torn_units=tuple(total / time_s for total in self.torn_s),
            most_torn_units=tuple(self.most),
            network=NetworkUse(self.total_s / time_s, tuple(total / time_s for total in self.total_bytes)),
        )


class SpareStudy:
    """Comparison of the core's seats with those of a fleet that takes any spare."""

    def __init__(
        self, domains: Mapping[str, Domains], unit: int, seed: int, step_cost: StepCost | None = None
    ) -> None:
        """Begin without seats, for the fleet with chosen spares and for the compared one with random spares."""
        self.chosen, self.drawn = (Seating(domains, unit, step_cost) for _ in range(2))
        self.random = random.Random(seed)

    def record_seats(self, now_s: float, seats: Sequence[str], spares: set[str]) -> None:
        """Record the core's ``seats`` from ``now_s`` on, and give the compared fleet seats of its own.

        Only nodes in ``seats`` and ``spares`` are alive. The compared fleet fills vacant seats with random living nodes.
        """
        self.chosen.record_seats(now_s, seats)
        self.drawn.record_seats(now_s, self._any_spares(seats, spares))

    def _any_spares(self, seats: Sequence[str], spares: set[str]) -> list[str]:
        """Return the compared fleet's seats, as many as ``seats``: living nodes keep theirs, random free nodes take vacant ones."""
        usable = spares.union(seats)
        before = self.drawn.seats or list(seats)
        kept = [name if name in usable else "" for name in before[: len(seats)]]
        kept += [""] * (len(seats) - len(kept))
        free = sorted(usable.difference(kept))
        drawn = iter(self.random.sample(free, kept.count("")))
        return [name or next(drawn) for name in kept]

    def results(self, now_s: float) -> dict[str, SeatsKept]:
        """Return the results until now, for the nearest spares and for any spares."""
        for seating in (self.chosen, self.drawn):
            seating.advance(now_s)
        return {"nearest spare": self.chosen.result(), "any spare": self.drawn.result()}
