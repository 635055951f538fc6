"""The best placement there is, as a mixed-integer program: an oracle for small trees that shares nothing with the algorithm.

A seat lies in exactly one of the narrowest domains, and a domain takes no more seats than it has free nodes. A message crosses the uplink of a
domain if its sender lies inside and its receiver does not. All of that is linear in the variables "seat lies in domain", so HiGHS (Huangfu and
Hall, Math. Prog. Comp. 2018; through ``scipy.optimize.milp``) finds the optimum with a proof.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from phalanx.launch.placing import Domains, Topology

Message = tuple[int, int, float]
"""The seat that sends, the seat that receives, and bytes."""


@dataclass
class Program:
    """Variables with bounds and linear constraints, collected one by one; what is minimized is a sum of variables."""

    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    objective: list[float] = field(default_factory=list)
    rows: list[dict[int, float]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def variable(self, upper: float = np.inf, *, whole: bool = False, cost: float = 0.0) -> int:
        """A variable between 0 and ``upper``; its number."""
        self.upper.append(upper)
        self.whole.append(whole)
        self.objective.append(cost)
        return len(self.upper) - 1

    def require(self, row: dict[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        """Bounds a linear combination of variables."""
        self.rows.append(row)
        self.low.append(low)
        self.high.append(high)

    def least(self) -> float:
        """The optimum, proven within HiGHS's tolerance."""
        entries = [(row, column, value) for row, one in enumerate(self.rows) for column, value in one.items()]
        rows, columns, values = zip(*entries, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(len(self.rows), len(self.upper)))
        found = milp(
            self.objective,
            integrality=self.whole,
            bounds=Bounds(0, self.upper),
            constraints=LinearConstraint(matrix, self.low, self.high),
            options={"mip_rel_gap": 0.0},
        )
        assert found.status == 0, found.message
        return float(found.fun)


def least_slowest_s(topology: Topology, seats: int, messages: Iterable[Message]) -> float:
    """Seconds that the slowest link needs in the best of all placements.

    Args:
        topology: The network, with the rate of its nodes.
        seats: How many nodes hold ranks.
        messages: Everything that seats send in a step; what a seat sends to itself uses no link.
    """
    sent: dict[tuple[int, int], float] = defaultdict(float)
    for sender, receiver, size in messages:
        if sender != receiver:
            sent[sender, receiver] += size
    program = Program()
    slowest = program.variable(cost=1.0)
    sizes = Counter(path[:depth] for path in topology.nodes.values() for depth in range(1, len(path) + 1))
    from_seat: dict[int, dict[int, float]] = {seat: {} for seat in range(seats)}
    scale_up = topology.levels[-1].scale_up
    for domain, lies in _seats_in_domains(program, topology, seats).items():
        level = topology.levels[len(domain) - 1]
        uplink = {slowest: -sizes[domain] * topology.node_bytes_per_s * level.share}
        for (sender, receiver), size in sent.items():
            # At least 1 if the sender lies inside and the receiver does not.
            crosses = program.variable(1.0)
            row = {crosses: 1.0}
            for sign, seat in ((-1.0, sender), (1.0, receiver)):
                for variable in lies[seat]:
                    row[variable] = row.get(variable, 0.0) + sign
            program.require(row, low=0.0)
            uplink[crosses] = size
            if scale_up and level is topology.levels[-1]:
                from_seat[sender][crosses] = size
        program.require(uplink, high=0.0)
    for seat, row in from_seat.items():
        # Without a scale-up domain everything that a node sends uses its own links.
        fixed = 0.0 if scale_up else sum(size for (sender, _), size in sent.items() if sender == seat)
        program.require(
            {slowest: topology.node_bytes_per_s} | {one: -size for one, size in row.items()}, low=fixed
        )
    return program.least()


def _seats_in_domains(program: Program, topology: Topology, seats: int) -> dict[Domains, list[list[int]]]:
    """For every domain and seat the variables of which one is 1 if the seat lies in the domain."""
    free = Counter(topology.nodes[name] for name in topology.free)
    lies: dict[Domains, list[list[int]]] = defaultdict(lambda: [[] for _ in range(seats)])
    narrowest = {path: [program.variable(1.0, whole=True) for _ in range(seats)] for path in sorted(free)}
    for seat in range(seats):
        program.require({variables[seat]: 1.0 for variables in narrowest.values()}, 1.0, 1.0)
    for path, variables in narrowest.items():
        program.require(dict.fromkeys(variables, 1.0), high=free[path])
        for depth in range(1, len(path) + 1):
            for seat, variable in enumerate(variables):
                lies[path[:depth]][seat].append(variable)
    return dict(lies)


def fewest_torn(topology: Topology, unit: int, units: int) -> tuple[int, ...]:
    """For each level, widest first, how few of ``units`` units of ``unit`` nodes lie in no single domain of it: each level by itself."""
    return tuple(_fewest_torn(topology, unit, units, depth) for depth in range(1, len(topology.levels) + 1))


def _fewest_torn(topology: Topology, unit: int, units: int, depth: int) -> int:
    program = Program()
    free = Counter(topology.nodes[name][:depth] for name in topology.free)
    taken: dict[Domains, dict[int, float]] = {domain: {} for domain in free}
    for _ in range(units):
        # How many of the unit's nodes lie in each domain, and whether all of them do.
        nodes = {domain: program.variable(unit, whole=True) for domain in free}
        program.require(dict.fromkeys(nodes.values(), 1.0), unit, unit)
        for domain, held in nodes.items():
            all_there = program.variable(1.0, whole=True, cost=-1.0)
            program.require({held: 1.0, all_there: -float(unit)}, low=0.0)
            taken[domain][held] = 1.0
    for domain, row in taken.items():
        program.require(row, high=free[domain])
    return units + round(program.least())
