"""Placement of a run in a network: the tree of domains, the run's seats, and the choice of nodes.

Each node is in one domain of every level, from the widest to the narrowest. Core, pod and leaf switches of a fat tree, groups and routers
of a dragonfly, racks whose accelerators share NVLink: all are levels of such a tree. A domain's uplink carries ``share`` of what its nodes
can send at once (1: non-blocking); the domains of a *scale-up* level need no network inside. The tree prices neither collisions of flows
(ECMP) nor other tenants.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby, product
from operator import itemgetter
from typing import Literal, NamedTuple

from phalanx.run.layout import Layout

Domains = tuple[str, ...]
"""The domains of one node, widest first."""


class TopologyError(ValueError):
    """A topology cannot be read or does not fit the run; the message has the remedy."""


@dataclass(frozen=True)
class Level:
    """One level of the tree."""

    name: str
    """Such as "leaf" or "rack"."""
    share: float = 1.0
    """Fraction of its nodes' network rate that can leave a domain at once."""
    scale_up: bool = False
    """True if accelerators of a domain communicate over its own links (NVLink) and not over the network."""


@dataclass(frozen=True)
class Topology:
    """A network with the nodes in it."""

    levels: tuple[Level, ...]
    """Widest first; none where nothing is known but the nodes."""
    nodes: Mapping[str, Domains]
    """Node -> its domains, one for each level."""
    node_bytes_per_s: float = 0.0
    """Network rate of one node in one direction; 0 if unknown."""
    taken: frozenset[str] = field(default_factory=frozenset)
    """Nodes that are down, drained or used by others."""
    source: str = ""
    """Where it was read."""

    def __post_init__(self) -> None:
        """Raise ``TopologyError`` for a node without a domain of each level, a scale-up level that is not the
        narrowest, or a share outside of (0, 1].
        """
        for name, domains in self.nodes.items():
            if len(domains) != len(self.levels):
                raise TopologyError(
                    f"{self.source or 'topology'}: node {name} is in {len(domains)} domains ({'.'.join(domains) or 'none'}), and there are "
                    f"{len(self.levels)} levels ({', '.join(level.name for level in self.levels) or 'none'})"
                )
        if sum(level.scale_up for level in self.levels) > 1 or any(
            outer.scale_up for outer in self.levels[:-1]
        ):
            raise TopologyError(
                f"{self.source or 'topology'}: only the narrowest level can be a scale-up domain"
            )
        for level in self.levels:
            if not 0 < level.share <= 1:
                raise TopologyError(
                    f"{self.source or 'topology'}: level {level.name}: share = {level.share} is no fraction of a rate: "
                    "above 0 and at most 1"
                )

    @cached_property
    def free(self) -> tuple[str, ...]:
        """The nodes that can be used, by name."""
        return tuple(sorted(name for name in self.nodes if name not in self.taken))

    @cached_property
    def free_in_domains(self) -> Mapping[Domains, Sequence[str]]:
        """The nodes that are not taken, by narrowest domain. Names are sorted by length first, so that n9 comes
        before n10.

        Domains without one are left out.
        """
        names_by_domain: dict[Domains, list[str]] = {}
        # Neighbors are mostly listed together: one look-up for each run of them.
        for path, run in groupby(self.nodes.items(), key=itemgetter(1)):
            names_by_domain.setdefault(path, []).extend([name for name, _ in run if name not in self.taken])
        for names in names_by_domain.values():
            # Two stable sorts are faster than one sort by pairs of length and name.
            names.sort()
            names.sort(key=len)
        return {path: names_by_domain[path] for path in sorted(names_by_domain) if names_by_domain[path]}

    @cached_property
    def domain_nodes(self) -> Mapping[Domains, int]:
        """How many nodes the narrowest domains have, free or not."""
        return Counter(self.nodes.values())

    def only(self, names: Iterable[str]) -> Topology:
        """Return the same network where only ``names`` are free. Raises ``TopologyError`` for a node that is not in it."""
        chosen = frozenset(names)
        unknown = sorted(chosen - self.nodes.keys())
        if unknown:
            raise TopologyError(
                f"{self.source or 'topology'}: there is no node {', '.join(unknown[:4])}; there are "
                f"{', '.join(sorted(self.nodes)[:4])}, ..."
            )
        return replace(self, taken=frozenset(self.nodes.keys() - chosen))

    def with_rates(self, node_bytes_per_s: float, shares: Mapping[str, float]) -> Topology:
        """Return the same network with another rate of its nodes (bytes/s), and other shares of levels by name. Raises
        ``TopologyError`` for an unknown level."""
        unknown = sorted(shares.keys() - {level.name for level in self.levels})
        if unknown:
            names = ", ".join(level.name for level in self.levels) or "none"
            raise TopologyError(
                f"{self.source or 'topology'}: there is no level {unknown[0]!r}; there are {names}"
            )
        levels = tuple(replace(level, share=shares.get(level.name, level.share)) for level in self.levels)
        return replace(self, levels=levels, node_bytes_per_s=node_bytes_per_s)


def from_domains(domains: Mapping[str, Domains], source: str = "") -> Topology:
    """Return the topology of nodes that name their domains, widest first; levels are "level 1" and on.

    A node that names fewer than others, or none, is in a domain of its own on the levels below.
    """
    depth = max(map(len, domains.values()), default=0)
    levels = tuple(Level(f"level {number}") for number in range(1, depth + 1))
    filled = {
        name: (*path, *(f"{name} alone" for _ in range(depth - len(path)))) for name, path in domains.items()
    }
    return Topology(levels, filled, source=source)


# Seats of a run, and their orders along a network.
#
# A *seat* is a node's block of consecutive ranks, and the mesh is ``pipeline x replicate x shard x context x tensor``, tensor
# fastest. Seats that share the inner axes (tensor, context, a team of experts) are a *block* and stay together. Blocks are laid
# along the tree either by data (all blocks of a stage side by side) or by pipeline (the stages of a replica side by side). A
# unit is one or more consecutive blocks in this order.

Order = Literal["data", "pipeline"]


def block_seats(inner_ranks: int, stage_ranks: int, ranks_per_node: int) -> int:
    """Return the number of seats of ``inner_ranks`` consecutive ranks; 1 if one node holds them, or they fill no
    whole nodes or do not divide a stage.
    """
    if inner_ranks <= ranks_per_node:
        return 1
    is_whole = inner_ranks % ranks_per_node == 0 and stage_ranks % inner_ranks == 0
    return inner_ranks // ranks_per_node if is_whole else 1


def sequence(seats: int, stages: int, block: int, order: Order) -> list[int]:
    """Return the seats of a pipeline of ``stages`` in the order in which they are laid along the tree.

    For "pipeline", block by block, all stages of a block together. In their own order for "data", or if blocks do
    not divide them.
    """
    if order == "data" or seats % (stages * block):
        return list(range(seats))
    blocks = seats // stages // block
    return [
        (stage * blocks + number) * block + seat
        for number in range(blocks)
        for stage in range(stages)
        for seat in range(block)
    ]


@dataclass(frozen=True)
class Shape:
    """How a run's ranks divide into seats and blocks."""

    layout: Layout
    ranks_per_node: int

    @property
    def seats(self) -> int:
        """Nodes that hold ranks."""
        return -(-self.layout.ranks // self.ranks_per_node)

    @property
    def block(self) -> int:
        """Seats of one block: those that the axes inside a slot span; 1 where blocks do not end with a node."""
        inner = self.layout.model_ranks * self.layout.team
        return block_seats(inner, self.layout.ranks // self.layout.pipeline, self.ranks_per_node)

    def sequence(self, order: Order) -> list[int]:
        """The seats in the order in which they are laid along the tree."""
        return sequence(self.seats, self.layout.pipeline, self.block, order)

    def units(self, order: Order) -> Iterator[int]:
        """Yield the numbers of seats that make sense as a unit, ascending: a block and a stage, and for "pipeline"
        a pipeline of blocks, for "data" a replica.

        Only those that divide the seats.
        """
        layout, per_node = self.layout, self.ranks_per_node
        stage = max(1, layout.ranks // layout.pipeline // per_node)
        spans = {self.block, stage, self.block * layout.pipeline if order == "pipeline" else self.block}
        spans |= {max(1, layout.shard * layout.model_ranks // per_node)} if order == "data" else set()
        yield from sorted(span for span in spans if self.seats % span == 0 and span <= self.seats)


# Choice of nodes: complete units under the lowest switches, spares spread, units in the order of the tree.
#
# A *unit* is a number of nodes with most traffic among them. The algorithm is greedy. Each domain, lowest first, gives as many
# units as its free nodes suffice for. The remainders are joined one level up, largest first. This leaves the most units
# undivided at *every* level at once (tests compare with mixed-integer programs): ``floor(a/u) + floor(b/u) + floor((a mod u + b
# mod u)/u) = floor((a + b)/u)``.
#
# If fewer units are requested, those in the lowest domains are kept, in the fullest domains. Nodes without a unit are spares,
# so spares are where remainders are: all over the fleet, and near the nodes that they replace.


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


def most_units(topology: Topology, unit: int, *, no_straddling: bool = False) -> int:
    """The number of units that the free nodes give; only those inside one of the narrowest domains if ``no_straddling``."""
    counts = [len(names) for names in topology.free_in_domains.values()]
    return sum(count // unit for count in counts) if no_straddling else sum(counts) // unit


def place_units(
    topology: Topology, unit: int, units: int, spares: int = 0, *, no_straddling: bool = False
) -> PlacedUnits:
    """Choose the free nodes of ``units`` units of ``unit`` nodes each, in domains as narrow as possible, and
    ``spares`` more.

    Spares are taken where most units are. Raises ``TopologyError`` if too few nodes are free, or with
    ``no_straddling`` if a unit would straddle the narrowest domains.
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
    torn = sum(placed.depth < depth for placed in chosen)
    if no_straddling and torn:
        raise TopologyError(
            f"{torn} of {units} units of {unit} nodes would straddle domains of level {topology.levels[-1].name}: at most "
            f"{most_units(topology, unit, no_straddling=True)} units fit whole. Ask for so many, take a smaller unit, or allow straddling"
        )
    return PlacedUnits(tuple(chosen), _spread(free, chosen, spares), depth)


def _cut(free: Mapping[Domains, Sequence[str]], unit: int, depth: int) -> list[Unit]:
    """Return all units of ``unit`` nodes: from the free nodes of each narrowest domain, then of the rest at each
    wider level.

    Units come deepest first; larger fragments are used first.
    """
    units: list[Unit] = []
    # Fragments of the domains of one level: domain -> its nodes that are in no unit yet.
    fragments = free
    for level in range(depth, -1, -1):
        above: dict[Domains, list[Sequence[str]]] = {}
        for domain, names in fragments.items():
            count = len(names) // unit * unit
            units += [Unit(tuple(names[first : first + unit]), domain) for first in range(0, count, unit)]
            if count < len(names) and level:
                above.setdefault(domain[:-1], []).append(names[count:])
        # The biggest fragments first: fewer pieces make a unit.
        fragments = {
            domain: [name for piece in sorted(pieces, key=len, reverse=True) for name in piece]
            for domain, pieces in above.items()
        }
    return units


def _keep(candidates: Sequence[Unit], nodes: Mapping[str, Domains], units: int) -> list[Unit]:
    """Return the ``units`` best of the candidates, which come deepest first, in the order of the tree.

    Of equally deep ones, those in domains with most candidates win.
    """
    chosen: list[Unit] = []
    for _, group in groupby(candidates, key=lambda unit: unit.depth):
        alike = list(group)
        room = units - len(chosen)
        chosen += alike if len(alike) <= room else _fullest(alike, candidates)[:room]
    chosen.sort(key=lambda unit: (nodes[unit.nodes[0]], len(unit.nodes[0]), unit.nodes[0]))
    return chosen


def _fullest(alike: Sequence[Unit], candidates: Sequence[Unit]) -> list[Unit]:
    """Return units of the same depth, those in the domains with most of all candidates first, widest level first."""
    counts = Counter(unit.domain for unit in candidates)
    for domain, count in list(counts.items()):
        for level in range(1, len(domain)):
            counts[domain[:level]] += count

    def preference(unit: Unit) -> list[tuple[int, str]]:
        return [(-counts[unit.domain[: level + 1]], name) for level, name in enumerate(unit.domain)]

    return sorted(alike, key=preference)


def _spread(free: Mapping[Domains, Sequence[str]], chosen: Sequence[Unit], spares: int) -> tuple[str, ...]:
    """Return ``spares`` free nodes that are in no unit: one of each domain in turn, domains with most nodes in
    units first.

    Fewer if there are not so many.
    """
    if not spares:
        return ()
    used = set(chain.from_iterable(placed.nodes for placed in chosen))
    unused = {domain: [name for name in names if name not in used] for domain, names in free.items()}
    order = sorted(
        (domain for domain in unused if unused[domain]),
        key=lambda domain: len(unused[domain]) - len(free[domain]),
    )
    turns = sorted(
        (turn, place, name) for place, domain in enumerate(order) for turn, name in enumerate(unused[domain])
    )
    return tuple(name for _, _, name in turns[:spares])


# Names of nodes as Slurm's host lists, such as ``rack[01-12]n[1-4,7],login``.

_PART = re.compile(r"[^,\[\]]*(?:\[[^\]]*\][^,\[\]]*)*")
MOST_HOSTS = 1_000_000


def expanded(text: str) -> list[str]:
    """Return the hosts of a list like n[1-4,7], in its order.

    Raises ``ValueError`` if it is no such list, or a part of it names more than ``MOST_HOSTS``.
    """
    hosts: list[str] = []
    place = 0
    while place < len(text):
        match = _PART.match(text, place)
        if match is None or not match[0]:
            raise ValueError(f"{text!r} is no list of hosts like n[1-4,7]")
        hosts += _hosts(match[0], text)
        place = match.end() + 1
        if match.end() < len(text) and text[match.end()] != ",":
            raise ValueError(f"{text!r} is no list of hosts like n[1-4,7]")
    return hosts


def _hosts(part: str, text: str) -> Iterator[str]:
    """Yield the hosts of one part of a list, all combinations of its brackets.

    Raises ``ValueError`` if there are more than ``MOST_HOSTS``, or a bracket is malformed.
    """
    pieces = re.split(r"\[([^\]]*)\]", part)
    # Odd pieces were in brackets.
    choices = [list(_numbers(piece, text)) if k % 2 else [piece] for k, piece in enumerate(pieces)]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > MOST_HOSTS:
        raise ValueError(f"{text[:80]!r} names {count:,} hosts, more than {MOST_HOSTS:,}")
    yield from map("".join, product(*choices))


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """Yield the numbers of ranges like 1-4,7, padded with zeros as the first is. Raises ``ValueError``."""
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{text!r}: [{ranges}] is no list of numbers like [1-4,7]")
        span = range(int(first), int(last or first) + 1)
        if not span or len(span) > MOST_HOSTS:
            raise ValueError(f"{text!r}: {part} is no range of at most {MOST_HOSTS:,} numbers")
        yield from (f"{number:0{len(first)}d}" for number in span)


def folded(hosts: Iterable[str]) -> str:
    """Return a host list like n[1-4,7] of ``hosts``, in their order: neighbors whose last numbers follow each other
    become a range.
    """
    parts: list[str] = []
    for (head, tail, width), run in groupby(
        map(_split_number, hosts), key=lambda split: (split[0], split[2], split[3])
    ):
        if width < 0:
            parts += [head for _ in run]
            continue
        numbers = [number for _, number, _, _ in run]
        ranges = []
        for _, near in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
            together = [number for _, number in near]
            first, last = (f"{number:0{width}d}" for number in (together[0], together[-1]))
            ranges.append(first if len(together) == 1 else f"{first}-{last}")
        alone = len(ranges) == 1 and "-" not in ranges[0]
        parts.append(f"{head}{ranges[0]}{tail}" if alone else f"{head}[{','.join(ranges)}]{tail}")
    return ",".join(parts)


def _split_number(host: str) -> tuple[str, int, str, int]:
    """Split a name at its last number: the text before, the number, the text behind, and the padded width (0: none; -1: no number)."""
    match = re.fullmatch(r"(.*?)(\d+)(\D*)", host)
    if match is None:
        return host, 0, "", -1
    digits = match[2]
    return match[1], int(digits), match[3], len(digits) if digits.startswith("0") and len(digits) > 1 else 0
