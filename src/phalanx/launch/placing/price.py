"""Prices a placement: how long the busiest uplink of every level needs for a step's traffic, beside the time that the nodes' own NICs need.

Each rank of an axis's group sends as ``phalanx.plan.step_cost.traffic`` says; what it sends to a rank in another domain leaves its own
domain by the uplink. The price of a level is the largest number of bytes that leave one of its domains, over that domain's uplink; all
uplinks work at once, so the slowest counts. What the ranks of a node send to other nodes goes over the node's own NICs wherever those lie: if
no uplink needs longer than the busiest node's NICs, then no placement is better in this model, and that is the certificate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from phalanx.launch.placing.bound import least_nic_bytes
from phalanx.launch.placing.topology import Topology
from phalanx.plan.step_cost.traffic import Flow

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Price:
    """Seconds of one step in which the busiest link of each kind is at work."""

    nic_s: float
    """The busiest node's own links to the network."""
    bound_s: float
    """What no placement gets below, if every scale-up domain were whole and free (``bound.py``); ``nic_s`` where there are none."""
    uplink_s: Mapping[str, float]
    """Level -> its busiest domain's uplink."""
    busiest: Mapping[str, str]
    """Level -> that domain."""

    @property
    def slowest_s(self) -> float:
        """The slowest of them all."""
        return max([self.nic_s, *self.uplink_s.values()])

    @property
    def certified(self) -> bool:
        """True if nothing takes longer than the bound, so that no other placement is faster in this model."""
        return self.slowest_s <= self.bound_s * _ROUNDING


def price(topology: Topology, seats: Sequence[str], flows: Sequence[Flow], ranks_per_node: int) -> Price:
    """The price of giving seat *k*, ranks ``k * ranks_per_node`` and on, to node ``seats[k]``.

    ``topology.node_bytes_per_s`` must be known. The flows' ranks must be as many as the seats hold.
    """
    node = np.repeat(np.arange(len(seats)), ranks_per_node)
    domains = _domains(topology, seats)
    # Inside a scale-up domain nothing goes over the network.
    scale_up = bool(topology.levels) and topology.levels[-1].scale_up
    nic_bytes = leaving(flows, domains[-1][0][node] if scale_up else node, node).max(initial=0.0)
    bound_bytes = nic_bytes
    if scale_up:
        largest = max(Counter(topology.nodes.values()).values())
        bound_bytes = least_nic_bytes(flows, ranks_per_node, largest)
    uplink_s, busiest = {}, {}
    for level, (domain, names, nodes) in zip(topology.levels, domains, strict=True):
        capacity = nodes * topology.node_bytes_per_s * level.share
        seconds = leaving(flows, domain[node], domain[node], len(names)) / capacity
        worst = int(seconds.argmax()) if len(seconds) else 0
        uplink_s[level.name] = float(seconds[worst]) if len(seconds) else 0.0
        busiest[level.name] = names[worst] if len(names) else ""
    rate = topology.node_bytes_per_s
    return Price(float(nic_bytes) / rate, float(bound_bytes) / rate, uplink_s, busiest)


def _domains(topology: Topology, seats: Sequence[str]) -> list[tuple[Ints, list[str], Floats]]:
    """For each level: the number of every seat's domain, the domains' names, and how many nodes of the network each has."""
    found = []
    for depth in range(1, len(topology.levels) + 1):
        numbers: dict[tuple[str, ...], int] = {}
        where = [numbers.setdefault(topology.nodes[name][:depth], len(numbers)) for name in seats]
        sizes = np.zeros(len(numbers))
        for path in topology.nodes.values():
            number = numbers.get(path[:depth])
            if number is not None:
                sizes[number] += 1
        found.append((np.array(where, dtype=np.int64), [".".join(path) for path in numbers], sizes))
    return found


def leaving(flows: Sequence[Flow], near: Ints, owner: Ints, owners: int = 0) -> Floats:
    """Bytes that each owner's ranks send to ranks elsewhere, in one step.

    Args:
        flows: Groups of ranks, and what each sends.
        near: (ranks,) Ranks with the same number reach each other without the link that is asked about.
        owner: (ranks,) Who owns that link.
        owners: How many there are; 0 for as many as ``owner`` names.
    """
    ranks = np.arange(len(near), dtype=np.int64)
    total = np.zeros(owners or (int(owner.max(initial=-1)) + 1))
    for flow in flows:
        place, group = _places(ranks, flow)
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


def _places(ranks: Ints, flow: Flow) -> tuple[Ints, Ints]:
    """Each rank's place in its group, and the group's number."""
    block = flow.size * flow.stride
    return (ranks // flow.stride) % flow.size, ranks // block * flow.stride + ranks % flow.stride


def _company(group: Ints, near: Ints) -> Ints:
    """How many ranks of its group each rank has near it, itself included."""
    key = group * (int(near.max(initial=0)) + 1) + near
    _, number, counts = np.unique(key, return_inverse=True, return_counts=True)
    company: Ints = counts[number]
    return company
