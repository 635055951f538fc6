"""Placements of a run in a network: their price, the best of them, and an assessment of allocated nodes.

Each rank of an axis's group sends the bytes of ``phalanx_plan.step_cost.traffic``. Bytes to a rank in another domain leave their own
domain by the uplink. The price of a level is the largest number of bytes that leave one of its domains, over that domain's uplink. All
uplinks work at once, so the slowest counts. Bytes to other nodes always use the node's own NICs. If no uplink needs longer than the
busiest node's NICs, no placement is better in this model. That is the certificate.

A larger unit keeps more traffic below a switch and leaves more nodes unused. ``choices`` gives both figures for every choice, so that
users decide on shape and placement together.

Schedulers treat a request for near nodes as a preference: Slurm's ``--switches`` gives up after a timeout, and blocks can be split.
Only the bill shows it. So every start prices its nodes with the same model (``verify``), and reports the price or refuses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from phalanx.launch.placing import (
    Domains,
    Order,
    PlacedUnits,
    Shape,
    Topology,
    TopologyError,
    most_units,
    place_units,
)
from phalanx_plan.step_cost.traffic import Flow

# Choice of a placement: the unit, and the order of a run's seats along the network.


@dataclass(frozen=True)
class Choice:
    """One way to place a run, with its price."""

    unit: int
    order: Order
    placement: PlacedUnits
    seats: tuple[str, ...]
    """The node of each seat."""
    price: Price
    usable_nodes: int
    """Free nodes that units could use without straddling a domain."""


def choices(
    topology: Topology,
    shape: Shape,
    flows: Sequence[Flow],
    spares: int = 0,
    *,
    unit: int = 0,
    order: Order | None = None,
    no_straddling: bool = False,
) -> list[Choice]:
    """Return all placements of the run, best first: by the slowest link (seconds to three digits), then by unit and order.

    Args:
        topology: The network, with the rate of its nodes.
        shape: The run's seats.
        flows: Traffic of the run.
        spares: Nodes beside those that hold ranks.
        unit: Nodes of a unit; 0 tries all sizes.
        order: Order of ranks; None tries both, or only "data" without a pipeline.
        no_straddling: Exclude placements with a unit that straddles the narrowest domains.

    Raises:
        TopologyError: There are too few nodes, ``unit`` does not divide the seats, or no placement meets these
            conditions.
    """
    ranked: list[Choice] = []
    refused: TopologyError | None = None
    orders: tuple[Order, ...] = ("data", "pipeline") if shape.layout.pipeline > 1 else ("data",)
    for placement_order in orders if order is None else (order,):
        sequence = shape.sequence(placement_order)
        for size in shape.units(placement_order) if not unit else (unit,):
            if shape.seats % size:
                raise TopologyError(
                    f"a unit of {size} nodes does not divide the run's {shape.seats}: take one of "
                    f"{', '.join(map(str, _divisors(shape.seats)))}"
                )
            try:
                placed = place_units(topology, size, shape.seats // size, spares, no_straddling=no_straddling)
            except TopologyError as error:
                refused = error
                continue
            seats = [""] * shape.seats
            for name, seat in zip(placed.nodes, sequence, strict=True):
                seats[seat] = name
            usable = size * most_units(topology, size, no_straddling=True)
            cost = price(topology, seats, flows, shape.ranks_per_node)
            ranked.append(Choice(size, placement_order, placed, tuple(seats), cost, usable))
    if not ranked:
        raise refused or TopologyError("there is no placement")
    return sorted(ranked, key=lambda choice: (_rounded(choice.price.slowest_s), choice.unit, choice.order))


def _rounded(seconds: float) -> float:
    """Round to three digits: smaller differences mean nothing in a model."""
    return 0.0 if seconds <= 0 else round(seconds, 2 - math.floor(math.log10(seconds)))


def _divisors(number: int) -> list[int]:
    """Return the twelve smallest divisors, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0][:12]


# Lower bounds, over all placements, on the time that the nodes' own links need in a step. A certificate compares with them.
#
# A node sends the same bytes in every placement, except for those that stay inside its scale-up domain. A domain has a maximal number of
# nodes, so a group of ranks on more nodes spans several domains. In an even exchange among n ranks in p parts, the ranks of the smallest
# part send to n - floor(n / p) others. Around a ring or along a chain, some node sends to the next domain. The bound is the sum of two
# terms: the bytes that every node must send, and the most that some node must send in addition. It holds for every placement, and can be
# below the best one (tests compare both with a mixed-integer program).


def least_nic_bytes(flows: Sequence[Flow], ranks_per_node: int, domain_nodes: int) -> float:
    """Return a lower bound on the bytes that the busiest node sends to other scale-up domains in a step.

    Args:
        flows: Groups of ranks with the bytes that each rank sends; every rank is in a group of each flow.
        ranks_per_node: Consecutive ranks that share a node.
        domain_nodes: Nodes of the largest scale-up domain.
    """
    every, beyond = 0.0, 0.0
    for flow in flows:
        each, some = _node_bytes(flow, ranks_per_node, domain_nodes)
        every += each
        beyond = max(beyond, some - each)
    return every + beyond


def _node_bytes(flow: Flow, ranks_per_node: int, domain_nodes: int) -> tuple[float, float]:
    """Return lower bounds on the bytes of one flow sent to other domains: by every node, and by the busiest node.

    Both are 0 if a domain can hold a complete group; a ring or chain must leave the domain at some node only.
    """
    # Most ranks of one group that fit in one domain.
    most_ranks = domain_nodes * min(flow.size, -(-ranks_per_node // flow.stride))
    if flow.size <= most_ranks:
        return 0.0, 0.0
    # If groups fill the same nodes, all ranks of a node send the same.
    alike = flow.stride % ranks_per_node == 0 or ranks_per_node % flow.stride == 0
    if flow.pattern == "all_to_all":
        to_each = flow.sent_bytes / (flow.size - 1)
        smallest = flow.size // -(-flow.size // most_ranks)
        each = ranks_per_node * to_each * (flow.size - most_ranks)
        some = ranks_per_node * to_each * (flow.size - smallest) if alike else each
        return each, max(each, some)
    return 0.0, flow.sent_bytes * (min(flow.stride, ranks_per_node) if alike else 1)


Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Price:
    """Seconds of one step in which the busiest link of each kind is at work."""

    nic_s: float
    """The busiest node's own links to the network."""
    bound_s: float
    """Lower bound over all placements, with complete and free scale-up domains (``least_nic_bytes``); ``nic_s`` without such domains."""
    uplink_s: Mapping[str, float]
    """Level -> its busiest domain's uplink."""
    busiest: Mapping[str, str]
    """Level -> that domain."""
    left_bytes: Mapping[str, float]
    """Level -> bytes that leave its domains in a step, in total."""

    @property
    def slowest_s(self) -> float:
        """Seconds of the slowest link."""
        return max([self.nic_s, *self.uplink_s.values()])

    @property
    def certified(self) -> bool:
        """True if no link takes longer than the bound, so that no other placement is faster in this model."""
        return self.slowest_s <= self.bound_s * _ROUNDING


def price(topology: Topology, seats: Sequence[str], flows: Sequence[Flow], ranks_per_node: int) -> Price:
    """Price a placement that gives seat *k*, ranks ``k * ranks_per_node`` and on, to node ``seats[k]``.

    ``topology.node_bytes_per_s`` must be known. The flows must cover exactly the ranks of the seats. Returns the
    seconds of a step that NICs and the busiest uplink of each level need, and the lower bound, without any contention
    between flows.
    """
    domains = _domains(topology, seats)
    by_seat, by_rank = _between_seats(flows, ranks_per_node)
    each = np.arange(len(seats))

    def sent(domain: Ints, owner: Ints, owners: int) -> Floats:
        """Return the bytes of all flows that leave their domain, by owner; all three arrays are over seats."""
        total = leaving(by_seat, domain, owner, owners)
        if by_rank:
            domain, owner = (np.repeat(numbers, ranks_per_node) for numbers in (domain, owner))
            total = total + leaving(by_rank, domain, owner, owners)
        return total

    # Traffic inside a scale-up domain does not use the network.
    scale_up = bool(topology.levels) and topology.levels[-1].scale_up
    nic_bytes = sent(domains[-1][0] if scale_up else each, each, len(seats)).max(initial=0.0)
    bound_bytes = nic_bytes
    if scale_up:
        bound_bytes = least_nic_bytes(flows, ranks_per_node, max(topology.domain_nodes.values()))
    uplink_s, busiest, left_bytes = {}, {}, {}
    for level, (domain, names, nodes) in zip(topology.levels, domains, strict=True):
        capacity = nodes * topology.node_bytes_per_s * level.share
        away = sent(domain, domain, len(names))
        seconds, left_bytes[level.name] = away / capacity, float(away.sum())
        worst = int(seconds.argmax()) if len(seconds) else 0
        uplink_s[level.name] = float(seconds[worst]) if len(seconds) else 0.0
        busiest[level.name] = names[worst] if len(names) else ""
    rate = topology.node_bytes_per_s
    return Price(float(nic_bytes) / rate, float(bound_bytes) / rate, uplink_s, busiest, left_bytes)


def _domains(topology: Topology, seats: Sequence[str]) -> list[tuple[Ints, list[str], Floats]]:
    """Return, for each level: the domain number of every seat, the domains' names, and each domain's number of nodes in the network."""
    numbers: dict[Domains, int] = {}
    narrowest = np.array(
        [numbers.setdefault(topology.nodes[name], len(numbers)) for name in seats], dtype=np.int64
    )
    per_level = []
    for depth in range(1, len(topology.levels) + 1):
        wider: dict[Domains, int] = {}
        above = np.array([wider.setdefault(path[:depth], len(wider)) for path in numbers], dtype=np.int64)
        sizes = np.zeros(len(wider))
        for path, count in topology.domain_nodes.items():
            number = wider.get(path[:depth])
            if number is not None:
                sizes[number] += count
        per_level.append((above[narrowest], [".".join(path) for path in wider], sizes))
    return per_level


def _between_seats(flows: Sequence[Flow], ranks_per_node: int) -> tuple[list[Flow], list[Flow]]:
    """Convert flows to flows between seats, and return the others, which only ranks can express, as the second list.

    Flows inside a seat are left out. A seat whose ranks have their groups in the same seats sends the sum of its
    ranks.
    """
    by_seat, by_rank = [], []
    for flow in flows:
        span = flow.size * flow.stride
        if flow.stride % ranks_per_node == 0:
            together = replace(
                flow, stride=flow.stride // ranks_per_node, sent_bytes=flow.sent_bytes * ranks_per_node
            )
            by_seat.append(together)
        elif span > ranks_per_node and span % ranks_per_node == 0 and ranks_per_node % flow.stride == 0:
            # Consecutive seats hold some ranks of each group. Only the outer ranks send to the next seat, or all to all.
            size, sent = span // ranks_per_node, flow.stride * flow.sent_bytes
            if flow.pattern == "all_to_all":
                sent = ranks_per_node * flow.sent_bytes * (flow.size - flow.size // size) / (flow.size - 1)
            by_seat.append(Flow(flow.axis, flow.pattern, size, 1, sent))
        elif span > ranks_per_node or ranks_per_node % span:
            by_rank.append(flow)
    return by_seat, by_rank


def leaving(flows: Sequence[Flow], near: Ints, owner: Ints, owners: int = 0) -> Floats:
    """Return the bytes that each owner's ranks send over its link in one step, shape (owners,).

    A ring sends to the next rank of its group, a chain to both neighbors, an all-to-all in equal parts to all others.

    Args:
        flows: Groups of ranks with the bytes that each rank sends.
        near: (ranks,) Ranks with the same number reach each other without using the link.
        owner: (ranks,) Number of the link's owner.
        owners: Number of owners; 0 for as many as ``owner`` names.
    """
    ranks = np.arange(len(near), dtype=np.int64)
    total = np.zeros(owners or (int(owner.max(initial=-1)) + 1))
    for flow in flows:
        # Each rank's index in its group, and the group's number.
        block = flow.size * flow.stride
        place, group = (ranks // flow.stride) % flow.size, ranks // block * flow.stride + ranks % flow.stride
        if flow.pattern == "all_to_all":
            away = flow.size - _company(group, near)
            sent = flow.sent_bytes * away / (flow.size - 1)
        else:
            following = ranks + np.where(place + 1 < flow.size, flow.stride, -(flow.size - 1) * flow.stride)
            crosses = near != near[following]
            if flow.pattern == "chain":
                crosses &= place + 1 < flow.size
                back = np.zeros(len(ranks), dtype=bool)
                back[following[crosses]] = True
                sent = flow.sent_bytes * (crosses.astype(float) + back)
            else:
                sent = flow.sent_bytes * crosses
        total += np.bincount(owner, weights=sent, minlength=len(total))
    return total


def _company(group: Ints, near: Ints) -> Ints:
    """Count, for each rank, the ranks of its group with its number in ``near``, itself included; shape (ranks,)."""
    key = group * (int(near.max(initial=0)) + 1) + near
    _, number, counts = np.unique(key, return_inverse=True, return_counts=True)
    company: Ints = counts[number]
    return company


# Assessment of allocated nodes.


@dataclass(frozen=True)
class PlacementAssessment:
    """Assessment of the nodes that a run was allocated."""

    best: Choice
    """The best order of ranks on these nodes."""
    lost_s: float
    """Seconds of a step that the slowest link needs beyond the lower bound of the network; computation may hide a part."""
    levels: tuple[str, ...]
    """Levels whose uplinks need more than the lower bound, the slowest first."""

    @property
    def good(self) -> bool:
        """True if no other nodes would be faster in this model."""
        return self.best.price.certified

    @property
    def sentence(self) -> str:
        """The assessment in one sentence: units, units that straddle, and milliseconds of a step lost on the slow levels."""
        cost, placed = self.best.price, self.best.placement
        units = f"{len(placed.units)} units of {self.best.unit} {'node' if self.best.unit == 1 else 'nodes'}"
        torn = f", {placed.straddling} of them torn" if placed.straddling else ""
        if self.good:
            return f"{units}{torn}: no other nodes would be faster (links of a node: {1e3 * cost.nic_s:.3g} ms a step)"
        worst = ", ".join(
            f"{level} {cost.busiest[level]}: {1e3 * cost.uplink_s[level]:.3g} ms" for level in self.levels
        )
        worst = worst or f"links of a node: {1e3 * cost.nic_s:.3g} ms"
        return (
            f"{units}{torn}: up to {1e3 * self.lost_s:.3g} ms of a step are lost on the way ({worst}; lower bound of the network: "
            f"{1e3 * cost.bound_s:.3g} ms)"
        )


def verify(
    topology: Topology,
    nodes: Sequence[str],
    shape: Shape,
    flows: Sequence[Flow],
    *,
    unit: int = 0,
    order: Order | None = None,
    no_straddling: bool = False,
) -> PlacementAssessment:
    """Assess a run's placement on ``nodes``; nodes beyond the run's seats are spares.

    The loss is the seconds that the slowest link needs beyond the lower bound. ``unit`` of 0 and ``order`` None take
    the best.

    Raises:
        TopologyError: There are too few nodes, one is not in the topology, ``unit`` does not divide the seats, or a unit
            straddles a domain with ``no_straddling``.
    """
    if len(set(nodes)) < shape.seats:
        raise TopologyError(
            f"{len(set(nodes))} nodes were allocated, and the run's ranks need {shape.seats}: ask for more nodes, or set fleet.nodes"
        )
    inside = topology.only(nodes)
    spares = len(inside.free) - shape.seats
    best = choices(inside, shape, flows, spares, unit=unit, order=order, no_straddling=no_straddling)[0]
    cost = best.price
    slow = [level for level, seconds in cost.uplink_s.items() if seconds > cost.bound_s]
    slow.sort(key=lambda level: -cost.uplink_s[level])
    return PlacementAssessment(best, max(0.0, cost.slowest_s - cost.bound_s), tuple(slow))
