"""Describes a network as a tree of domains: each node lies in one domain of every level, from the widest to the narrowest.

Core, pod and leaf switches of a fat tree, groups and routers of a dragonfly, racks whose accelerators share NVLink: all are levels of such a
tree. A domain's uplink carries ``share`` of what its nodes can send at once (1: non-blocking); the domains of a *scale-up* level need no
network inside. The tree prices neither collisions of flows (ECMP) nor other tenants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter

Domains = tuple[str, ...]
"""The domains of one node, widest first."""


class TopologyError(ValueError):
    """A topology cannot be read or does not fit the run; the message says what to change."""


@dataclass(frozen=True)
class Level:
    """One level of the tree."""

    name: str
    """As in "leaf" or "rack"."""
    share: float = 1.0
    """Fraction of its nodes' network rate that can leave a domain at once."""
    scale_up: bool = False
    """True if accelerators of a domain talk over its own links (NVLink) and not over the network."""


@dataclass(frozen=True)
class Topology:
    """A network with the nodes in it."""

    levels: tuple[Level, ...]
    """Widest first; none where nothing is known but the nodes."""
    nodes: Mapping[str, Domains]
    """Node -> its domains, one for each level."""
    node_bytes_per_s: float = 0.0
    """Network rate of one node in one direction; 0 if the source does not say."""
    taken: frozenset[str] = field(default_factory=frozenset)
    """Nodes that are down, drained or used by others."""
    source: str = ""
    """Where it was read."""

    def __post_init__(self) -> None:
        for name, domains in self.nodes.items():
            if len(domains) != len(self.levels):
                raise TopologyError(
                    f"{self.source or 'topology'}: node {name} lies in {len(domains)} domains ({'.'.join(domains) or 'none'}), and there are "
                    f"{len(self.levels)} levels ({', '.join(level.name for level in self.levels) or 'none'})"
                )
        if sum(level.scale_up for level in self.levels) > 1 or any(one.scale_up for one in self.levels[:-1]):
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
        """The nodes that can be used by narrowest domain, both in the order of their names: a shorter one first, so that n9 comes before n10."""
        found: dict[Domains, list[str]] = {}
        # Neighbors are mostly listed together: one look-up for each run of them.
        for path, run in groupby(self.nodes.items(), key=itemgetter(1)):
            found.setdefault(path, []).extend([name for name, _ in run if name not in self.taken])
        for names in found.values():
            # Two stable sorts by what is there are quicker than one by pairs.
            names.sort()
            names.sort(key=len)
        return {path: found[path] for path in sorted(found) if found[path]}

    @cached_property
    def domain_nodes(self) -> Mapping[Domains, int]:
        """How many nodes the narrowest domains have, free or not."""
        return Counter(self.nodes.values())

    def only(self, names: Iterable[str]) -> Topology:
        """The same network where nothing is free but ``names``. Raises ``TopologyError`` for a node that is not in it."""
        wanted = frozenset(names)
        unknown = sorted(wanted - self.nodes.keys())
        if unknown:
            raise TopologyError(
                f"{self.source or 'topology'}: there is no node {', '.join(unknown[:4])}; there are "
                f"{', '.join(sorted(self.nodes)[:4])}, ..."
            )
        return replace(self, taken=frozenset(self.nodes.keys() - wanted))

    def with_rates(self, node_bytes_per_s: float, shares: Mapping[str, float]) -> Topology:
        """The same network with another rate of its nodes, and other shares of levels by name."""
        unknown = sorted(shares.keys() - {level.name for level in self.levels})
        if unknown:
            names = ", ".join(level.name for level in self.levels) or "none"
            raise TopologyError(
                f"{self.source or 'topology'}: there is no level {unknown[0]!r}; there are {names}"
            )
        levels = tuple(replace(level, share=shares.get(level.name, level.share)) for level in self.levels)
        return replace(self, levels=levels, node_bytes_per_s=node_bytes_per_s)


def from_domains(domains: Mapping[str, Domains], source: str = "") -> Topology:
    """A topology of nodes that name their domains themselves; one that names fewer lies in a domain of its own below."""
    depth = max(map(len, domains.values()), default=0)
    levels = tuple(Level(f"level {number}") for number in range(1, depth + 1))
    filled = {
        name: (*path, *(f"{name} alone" for _ in range(depth - len(path)))) for name, path in domains.items()
    }
    return Topology(levels, filled, source=source)
