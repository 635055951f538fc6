"""Verifies what an engine really gave: what the best order of ranks on it costs beside what the network could do, and whether to start.

Schedulers treat a wish for near nodes as a wish: Slurm's ``--switches`` gives up after a timeout, and blocks can be torn. Nobody notices but
the bill. So every start prices its nodes with the same model as the placement (``price.py``), and says it or refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.launch.placing import Order, Shape, Topology, TopologyError
from phalanx_plan.placing.choose import Choice, choices
from phalanx_plan.step_cost.traffic import Flow


@dataclass(frozen=True)
class Verdict:
    """What the given nodes are worth to the run."""

    best: Choice
    """The best order of ranks on them."""
    lost_s: float
    """Seconds of a step by which the slowest uplink exceeds what the nodes' own links need; computing may hide a part."""
    levels: tuple[str, ...]
    """Levels whose uplinks are too slow, the slowest first."""

    @property
    def good(self) -> bool:
        """True if no other nodes would be faster in this model."""
        return self.best.price.certified

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, with its cost in milliseconds of a step."""
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
            f"{units}{torn}: up to {1e3 * self.lost_s:.3g} ms of a step are lost on the way ({worst}; what the network could do: "
            f"{1e3 * cost.bound_s:.3g} ms)"
        )


def verify(
    topology: Topology,
    given: Sequence[str],
    shape: Shape,
    flows: Sequence[Flow],
    *,
    unit: int = 0,
    order: Order | None = None,
    whole: bool = False,
) -> Verdict:
    """The verdict on the nodes ``given``, of which those beyond the run's seats are spares.

    Raises:
        TopologyError: They are too few, one is not in the topology, or (``whole``) units are torn.
    """
    if len(set(given)) < shape.seats:
        raise TopologyError(
            f"{len(set(given))} nodes were given, and the run's ranks need {shape.seats}: ask for more nodes, or set fleet.nodes"
        )
    inside = topology.only(given)
    spares = len(inside.free) - shape.seats
    best = choices(inside, shape, flows, spares, unit=unit, order=order, whole=whole)[0]
    cost = best.price
    slow = [level for level, seconds in cost.uplink_s.items() if seconds > cost.bound_s]
    slow.sort(key=lambda level: -cost.uplink_s[level])
    return Verdict(best, max(0.0, cost.slowest_s - cost.bound_s), tuple(slow))
