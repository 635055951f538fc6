"""Small random networks and runs, on which the best of all placements can be computed, and the messages of their traffic one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from launch.placing.milp import Message, least_slowest_s
from phalanx.launch.placing import Domains, Level, Shape, Topology
from phalanx.run.layout import Layout
from phalanx_plan.step_cost.traffic import Flow, Pattern

LAYOUTS = ((1, 4, 1), (1, 6, 1), (1, 8, 1), (2, 2, 1), (2, 3, 1), (4, 2, 1), (1, 4, 2), (2, 2, 2))
"""Degrees of pipeline, shard and tensor."""
THIN = (0.25, 0.5, 1.0)
_MOST_OVER = 6
"""Free nodes that a network has beyond the run's seats, at most."""


@dataclass(frozen=True)
class SmallCase:
    """A run and a network for it."""

    topology: Topology
    shape: Shape
    flows: tuple[Flow, ...]

    def least_slowest_s(self) -> float:
        """Seconds that the slowest link needs in the best placement there is, by mixed-integer programming."""
        sent = [one for flow in self.flows for one in messages(flow, self.shape.layout.ranks)]
        per_node = self.shape.ranks_per_node
        between_seats = [(sender // per_node, receiver // per_node, size) for sender, receiver, size in sent]
        return least_slowest_s(self.topology, self.shape.seats, between_seats)


def messages(flow: Flow, ranks: int) -> Iterator[Message]:
    """Sender, receiver and bytes of every message of a flow, written down one by one."""
    for first in range(0, ranks, flow.size * flow.stride):
        for offset in range(flow.stride):
            group = [first + offset + place * flow.stride for place in range(flow.size)]
            for place, rank in enumerate(group):
                if flow.pattern == "ring":
                    yield rank, group[(place + 1) % flow.size], flow.sent_bytes
                elif flow.pattern == "all_to_all":
                    for other in group:
                        if other != rank:
                            yield rank, other, flow.sent_bytes / (flow.size - 1)
                else:
                    for neighbor in (place - 1, place + 1):
                        if 0 <= neighbor < flow.size:
                            yield rank, group[neighbor], flow.sent_bytes


def small_tree(random: Random, needed: int, *, levels: Sequence[Level]) -> Topology:
    """A random tree of one domain to three at each level, some of its nodes taken, with enough free ones and few more."""
    while True:
        paths: list[Domains] = [()]
        for _ in levels:
            paths = [(*path, str(number)) for path in paths for number in range(random.randint(1, 3))]
        nodes = {f"{'.'.join(path)}n{k}": path for path in paths for k in range(random.randint(1, 4))}
        taken = frozenset(name for name in nodes if random.random() < 0.15)
        if needed <= len(nodes) - len(taken) <= needed + _MOST_OVER:
            return Topology(tuple(levels), nodes, 1.0, taken)


def small_case(seed: int) -> SmallCase:
    """The case of a seed: 4 to 8 seats under pods and leaves or racks, some with thin uplinks."""
    random = Random(seed)
    pipeline, shard, tensor = random.choice(LAYOUTS)
    layout = Layout(pipeline=pipeline, shard=shard, tensor=tensor)
    per_node = random.choice((1, tensor)) if layout.ranks // tensor >= 4 else 1
    # An even exchange has many optima, which a solver goes through one by one: only few ranks do it.
    patterns: tuple[Pattern, ...] = ("ring", "all_to_all") if layout.ranks < 8 else ("ring",)
    found = [Flow("shard", random.choice(patterns), shard, tensor, random.choice((1.0, 10.0)))]
    if tensor > 1:
        found.append(Flow("tensor", "ring", tensor, 1, random.choice((1.0, 30.0))))
    if pipeline > 1:
        found.append(Flow("pipeline", "chain", pipeline, shard * tensor, random.choice((1.0, 10.0))))
    shape = Shape(layout, per_node)
    levels = Level("pod", random.choice(THIN)), Level("leaf", random.choice(THIN), random.random() < 0.3)
    return SmallCase(small_tree(random, shape.seats, levels=levels), shape, tuple(found))
