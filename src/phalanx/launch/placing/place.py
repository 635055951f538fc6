"""Chooses nodes for a run in a tree of domains: whole units under the lowest switches, spares spread, units in the order of the tree.

A *unit* is a number of nodes that talk most to each other. The algorithm is greedy, and leaves as many units whole at *every* level at once as
there can be: in every domain as many units are cut as its free nodes give, the lowest domains first, and what is left over is joined one
level up, the biggest fragments first. No unit is lost so, since
``floor(a/u) + floor(b/u) + floor((a mod u + b mod u)/u) = floor((a + b)/u)`` (tests compare with mixed-integer programs). If fewer units are
wanted, those that are whole lowest are kept, in the fullest domains. Whatever belongs to no unit is a spare, so spares lie where fragments
are: all over the fleet, and near what they replace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from phalanx.launch.placing.topology import Domains, Topology, TopologyError


@dataclass(frozen=True)
class Unit:
    """Nodes that were placed together."""

    nodes: tuple[str, ...]
    depth: int
    """Number of levels, from the widest, at which all its nodes are in one domain: all levels if it is whole."""


@dataclass(frozen=True)
class PlacedUnits:
    """The nodes of a run."""

    units: tuple[Unit, ...]
    """In the order of the tree: neighbors are near each other."""
    spares: tuple[str, ...]
    levels: int
    """Levels of the topology."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of all units, in order."""
        return tuple(name for unit in self.units for name in unit.nodes)

    @property
    def straddling(self) -> int:
        """Number of units that are in more than one of the narrowest domains."""
        return sum(unit.depth < self.levels for unit in self.units)


def most_units(topology: Topology, unit: int, *, whole: bool = False) -> int:
    """The number of units that the free nodes give; only those inside one of the narrowest domains if ``whole``."""
    if not whole or not topology.levels:
        return len(topology.free) // unit
    return sum(count // unit for count in Counter(topology.nodes[name] for name in topology.free).values())


def place_units(
    topology: Topology, unit: int, units: int, spares: int = 0, *, whole: bool = False
) -> PlacedUnits:
    """Chooses the nodes of ``units`` units of ``unit`` nodes, and ``spares`` more.

    Args:
        topology: The network; only its free nodes are used.
        unit: Nodes of one unit.
        units: How many.
        spares: Nodes beside them; they are taken where most units are.
        whole: Refuses units that straddle the narrowest domains.

    Raises:
        TopologyError: There are too few nodes.
    """
    free, needed = topology.free, unit * units + spares
    if len(free) < needed:
        raise TopologyError(
            f"{units} units of {unit} nodes and {spares} spares need {needed} nodes, and {len(free)} of {len(topology.nodes)} are free: "
            "ask for fewer (--nodes, --spares), or wait"
        )
    candidates = _cut({name: topology.nodes[name] for name in free}, unit, len(topology.levels))
    chosen = _keep(candidates, topology, units)
    straddling = [one for one in chosen if one.depth < len(topology.levels)]
    if whole and straddling:
        level = topology.levels[-1].name
        raise TopologyError(
            f"{len(straddling)} of {units} units of {unit} nodes would straddle domains of level {level}: at most "
            f"{most_units(topology, unit, whole=True)} units fit whole. Ask for so many, take a smaller unit, or allow straddling"
        )
    used = {name for one in chosen for name in one.nodes}
    left = [name for name in free if name not in used]
    return PlacedUnits(tuple(chosen), _spread(left, topology.nodes, used, spares), len(topology.levels))


def _cut(nodes: Mapping[str, Domains], unit: int, depth: int) -> list[Unit]:
    """All units that the nodes give, cut bottom up."""
    found: list[Unit] = []
    # Fragments of the domains of one level: domain -> its nodes that are in no unit yet.
    # By length first, so that n9 comes before n10.
    ordered = sorted(nodes, key=lambda name: (nodes[name], len(name), name))
    fragments: dict[Domains, list[str]] = {
        domain: list(names) for domain, names in groupby(ordered, key=nodes.__getitem__)
    }
    for level in range(depth, -1, -1):
        above: dict[Domains, list[list[str]]] = {}
        for domain, names in fragments.items():
            count = len(names) // unit
            found += [Unit(tuple(names[k * unit : (k + 1) * unit]), level) for k in range(count)]
            rest = names[count * unit :]
            if rest and level:
                above.setdefault(domain[: level - 1], []).append(rest)
        # The biggest fragments first: fewer pieces make a unit.
        fragments = {
            domain: [name for piece in sorted(pieces, key=len, reverse=True) for name in piece]
            for domain, pieces in above.items()
        }
    return found


def _keep(candidates: Sequence[Unit], topology: Topology, units: int) -> list[Unit]:
    """The ``units`` best candidates, in the order of the tree: whole lowest, then in the domains with most units, widest level first."""
    held = Counter(
        topology.nodes[one.nodes[0]][:level] for one in candidates for level in range(1, one.depth + 1)
    )

    def rank(one: Unit) -> tuple[int, tuple[tuple[int, str], ...]]:
        path = topology.nodes[one.nodes[0]]
        return -one.depth, tuple((-held[path[: level + 1]], path[level]) for level in range(one.depth))

    kept = sorted(candidates, key=rank)[:units]
    return sorted(kept, key=lambda one: (topology.nodes[one.nodes[0]], len(one.nodes[0]), one.nodes))


def _spread(
    left: Sequence[str], nodes: Mapping[str, Domains], used: set[str], spares: int
) -> tuple[str, ...]:
    """``spares`` of the nodes that are left: one of each domain in turn, those with most nodes in units first."""
    if len(left) == spares:
        return tuple(left)
    load = Counter(nodes[name] for name in used)
    by_domain: dict[Domains, list[str]] = {}
    for name in left:
        by_domain.setdefault(nodes[name], []).append(name)
    order = sorted(by_domain, key=lambda domain: (-load[domain], domain))
    turns = sorted(
        (
            (turn, place, name)
            for place, domain in enumerate(order)
            for turn, name in enumerate(by_domain[domain])
        ),
    )
    return tuple(name for _, _, name in turns[:spares])
