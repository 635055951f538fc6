"""Chooses the unit and the order in which a run's seats are laid along the network, by what each choice costs.

A larger unit keeps more traffic below a switch and leaves more nodes over: both are told for every choice, so that shape and placement can
be decided together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.launch.placing import Order, PlacedUnits, Shape, Topology, TopologyError, most_units, place_units
from phalanx_plan.placing.price import Price, price
from phalanx_plan.step_cost.traffic import Flow


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
    """Nodes of the free ones that units which straddle no domain could use."""


def choices(
    topology: Topology,
    shape: Shape,
    flows: Sequence[Flow],
    spares: int = 0,
    *,
    unit: int = 0,
    order: Order | None = None,
    whole: bool = False,
) -> list[Choice]:
    """All ways to place the run, the best first: by the slowest link, then by the number of usable nodes.

    Args:
        topology: The network, with the rate of its nodes.
        shape: The run's seats.
        flows: Its traffic.
        spares: Nodes beside those that hold ranks.
        unit: Only units of so many nodes; 0 for any.
        order: Only this order.
        whole: Only placements without a unit that straddles the narrowest domains.

    Raises:
        TopologyError: There are too few nodes, or no placement is as asked for.
    """
    found: list[Choice] = []
    refused: TopologyError | None = None
    orders: tuple[Order, ...] = ("data", "pipeline") if shape.layout.pipeline > 1 else ("data",)
    for one in orders if order is None else (order,):
        sequence = shape.sequence(one)
        for size in shape.units(one) if not unit else (unit,):
            if shape.seats % size:
                raise TopologyError(
                    f"a unit of {size} nodes does not divide the run's {shape.seats}: take one of "
                    f"{', '.join(map(str, _divisors(shape.seats)))}"
                )
            try:
                placed = place_units(topology, size, shape.seats // size, spares, whole=whole)
            except TopologyError as error:
                refused = error
                continue
            seats = [""] * shape.seats
            for name, seat in zip(placed.nodes, sequence, strict=True):
                seats[seat] = name
            usable = size * most_units(topology, size, whole=True)
            cost = price(topology, seats, flows, shape.ranks_per_node)
            found.append(Choice(size, one, placed, tuple(seats), cost, usable))
    if not found:
        raise refused or TopologyError("there is no placement")
    return sorted(found, key=lambda one: (_rounded(one.price.slowest_s), one.unit, one.order))


def _rounded(seconds: float) -> float:
    """Three digits: what differs by less in a model is alike."""
    return 0.0 if seconds <= 0 else round(seconds, 2 - math.floor(math.log10(seconds)))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0][:12]
