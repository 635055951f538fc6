"""The planner as the core needs it: what given nodes cost a run, which degree to halve first, how long a step takes.

The planner is a package of its own (``phalanx.plugins``, group ``phalanx.planners``). A run starts and recovers without one: nodes are
taken in the order of the network's tree then, and no price is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx.hardware.cluster import Cluster, HardwareError
from phalanx.launch.placing import Order, Topology, TopologyError
from phalanx.plugins import load_plugin
from phalanx.run.smaller_degrees import Axis
from phalanx.run.spec import RunSpec


class PlannerError(ValueError):
    """The planner has no answer for this run; the message has the reason and the remedy."""


@dataclass(frozen=True)
class PricedNodes:
    """The best order of a run's ranks on some nodes, with its price."""

    unit: int
    """Nodes that lie together."""
    order: Order
    slowest_s: float
    """Seconds of a step that the busiest link needs."""
    lost_s: float
    """Seconds of a step beyond what the nodes' own links need."""
    certified: bool
    """True if no other nodes would be faster in the planner's model."""
    sentence: str
    """The price in words."""


@dataclass(frozen=True)
class FirstHalved:
    """The degree whose half gives the shorter step where too few ranks are left."""

    axis: Axis
    ranks: int
    """Ranks of one replica with half of that degree."""
    step_s: Mapping[Axis, float]
    """The estimated step for each degree that may be halved."""


class Planner(Protocol):
    """A planner. All methods raise ``PlannerError`` where a run has no price, and ``HardwareError`` for an unknown cluster."""

    def price_of(self, spec: RunSpec, topology: Topology, nodes: Sequence[str]) -> PricedNodes:
        """Return the price of a run of ``fleet.nodes`` nodes on ``nodes``; those beyond are spares.

        Raises ``TopologyError`` where they are too few, or one is not in the network.
        """

    def best_placement(self, spec: RunSpec, read_topology: Callable[[], Topology]) -> PricedNodes:
        """Return the best placement on the free nodes of a network, which is read only for a run that has a price.

        Raises ``TopologyError`` where there is none.
        """

    def first_halved(self, spec: RunSpec, cluster: Cluster) -> FirstHalved | None:
        """Return the degree to halve first, for a resolved model; ``None`` where at most one degree may fall."""

    def step_terms(self, spec: RunSpec, ranks: int, cluster: str) -> tuple[float, Mapping[str, float]]:
        """Return the seconds of a step of the run's own layout, and of each of its terms."""


def installed_planner() -> Planner:
    """Return the planner that is installed as a plugin. Raises ``PlannerError`` with the command that installs one."""
    planner: Planner | None = load_plugin("phalanx.planners", "phalanx")
    if planner is None:
        raise PlannerError("no planner is installed: pip install --force-reinstall --no-deps phalanx-train")
    return planner


def price_or_reason(price: Callable[[Planner], PricedNodes]) -> tuple[PricedNodes | None, str]:
    """Return (price, "") of nodes by the installed planner, or (None, the reason for which they have none)."""
    try:
        return price(installed_planner()), ""
    except (TopologyError, PlannerError, HardwareError) as error:
        return None, str(error)


def too_slow(spec: RunSpec, nodes: PricedNodes) -> str:
    """Return why nodes of this price are not to be used: they lose more than ``launch.most_lost_ms``; empty if they may be used."""
    limit_ms = spec.launch.most_lost_ms
    if not limit_ms or 1e3 * nodes.lost_s <= limit_ms:
        return ""
    return f"these nodes lose more of a step than launch.most_lost_ms = {limit_ms:g}: {nodes.sentence}. Take others, or allow more"


def loses_more(before_s: float | None, after_s: float) -> bool:
    """Return True if a fleet loses more of a step with the nodes that join it, beyond rounding; also without a
    price before.

    Both are seconds lost in a step. A fleet that is too slow already is not made so by the nodes that join it.
    """
    return before_s is None or after_s > before_s * (1 + 1e-9)
