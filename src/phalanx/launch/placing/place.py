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
from itertools import chain, groupby
from typing import NamedTuple

from phalanx.launch.placing.topology import Domains, Topology, TopologyError


class Unit(NamedTuple):
    """Nodes that were placed together."""

    nodes: tuple[str, ...]
    domain: Domains
    """The narrowest domain that all its nodes are in."""

    @property
    def depth(self) -> int:
        """Number of levels, from the widest, at which all its nodes are in one domain: all levels if it is whole."""
        return len(self.domain)


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
    counts = [len(names) for names in topology.free_in_domains.values()]
    return sum(count // unit for count in counts) if whole else sum(counts) // unit


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
    free, needed = topology.free_in_domains, unit * units + spares
    count = sum(map(len, free.values()))
    if count < needed:
        raise TopologyError(
            f"{units} units of {unit} nodes and {spares} spares need {needed} nodes, and {count} of {len(topology.nodes)} are free: "
            "ask for fewer (--nodes, --spares), or wait"
        )
    depth = len(topology.levels)
    chosen = _keep(_cut(free, unit, depth), topology.nodes, units)
    torn = sum(one.depth < depth for one in chosen)
    if whole and torn:
        raise TopologyError(
            f"{torn} of {units} units of {unit} nodes would straddle domains of level {topology.levels[-1].name}: at most "
            f"{most_units(topology, unit, whole=True)} units fit whole. Ask for so many, take a smaller unit, or allow straddling"
        )
    return PlacedUnits(tuple(chosen), _spread(free, chosen, spares), depth)


def _cut(free: Mapping[Domains, Sequence[str]], unit: int, depth: int) -> list[Unit]:
    """All units that the free nodes of the narrowest domains give, cut bottom up."""
    found: list[Unit] = []
    # Fragments of the domains of one level: domain -> its nodes that are in no unit yet.
    fragments = free
    for level in range(depth, -1, -1):
        above: dict[Domains, list[Sequence[str]]] = {}
        for domain, names in fragments.items():
            whole = len(names) // unit * unit
            found += [Unit(tuple(names[first : first + unit]), domain) for first in range(0, whole, unit)]
            if whole < len(names) and level:
                above.setdefault(domain[:-1], []).append(names[whole:])
        # The biggest fragments first: fewer pieces make a unit.
        fragments = {
            domain: [name for piece in sorted(pieces, key=len, reverse=True) for name in piece]
            for domain, pieces in above.items()
        }
    return found


def _keep(candidates: Sequence[Unit], nodes: Mapping[str, Domains], units: int) -> list[Unit]:
    """The ``units`` best of the candidates, which come whole lowest first; in the order of the tree."""
    kept: list[Unit] = []
    for _, group in groupby(candidates, key=lambda one: one.depth):
        alike = list(group)
        room = units - len(kept)
        kept += alike if len(alike) <= room else _fullest(alike, candidates)[:room]
    kept.sort(key=lambda one: (nodes[one.nodes[0]], len(one.nodes[0]), one.nodes[0]))
    return kept


def _fullest(alike: Sequence[Unit], candidates: Sequence[Unit]) -> list[Unit]:
    """Units that are whole at the same level, those in the domains with most of all candidates first, widest level first."""
    held = Counter(one.domain for one in candidates)
    for domain, count in list(held.items()):
        for level in range(1, len(domain)):
            held[domain[:level]] += count

    def preference(one: Unit) -> list[tuple[int, str]]:
        return [(-held[one.domain[: level + 1]], name) for level, name in enumerate(one.domain)]

    return sorted(alike, key=preference)


def _spread(free: Mapping[Domains, Sequence[str]], chosen: Sequence[Unit], spares: int) -> tuple[str, ...]:
    """``spares`` of the free nodes that are in no unit: one of each domain in turn, those with most nodes in units first."""
    if not spares:
        return ()
    used = set(chain.from_iterable(one.nodes for one in chosen))
    left = {domain: [name for name in names if name not in used] for domain, names in free.items()}
    order = sorted(
        (domain for domain in left if left[domain]), key=lambda one: len(left[one]) - len(free[one])
    )
    turns = sorted(
        (turn, place, name) for place, domain in enumerate(order) for turn, name in enumerate(left[domain])
    )
    return tuple(name for _, _, name in turns[:spares])
