"""Ranks layouts by what they cost on a given network: the step where all is near, and what the busiest uplink adds to it.

A search prices the network as if nothing but a node's own links were slow. Which layout is best also depends on where its ranks can lie: one
that sends little between stages fits a network that is thin between pods, one whose units are too large for a rack tears them. So the best of the
search and the best of every family that lost are placed one by one, and ranked again with the seconds that their placement adds. How a
layout is placed and priced is not known here (``Placer``; ``phalanx.launch.placed_layout`` is one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from phalanx.plan.search.room import LEAST_ROOM, free_share, with_room_first
from phalanx.plan.search.search import FAMILIES, RunnerUp, SearchResult, ranking_key, why_slower
from phalanx.plan.step_cost.estimate import Estimate, estimates
from phalanx.plan.workload.planned_layout import PlannedLayout
from phalanx.plan.workload.stacks import Job

PLACED = 48
"""Layouts that a search hands over to be placed, beside the best of every family."""
UPLINKS = "uplinks"
"""The term of a step that a placement adds."""


@dataclass(frozen=True)
class NetworkCost:
    """The best placement of one layout, and what it costs."""

    added_s: float
    """Seconds of a step that the busiest link needs beyond what no placement gets below; computing may hide a part."""
    units: int
    unit_nodes: int
    """Nodes of a unit, which are kept together."""
    order: str
    """Neighbors along the network: "data" or "pipeline"."""
    straddling: int
    """Units that are in more than one of the narrowest domains."""
    busiest: str
    """The level and domain whose uplink is busiest; empty if no link is slower than a node's own."""


Placer = Callable[[Job, PlannedLayout], NetworkCost]
"""Places a layout; raises ``ValueError`` if the network has too few nodes for it."""


def with_uplinks(found: Estimate, cost: NetworkCost) -> Estimate:
    """The estimate with the seconds that its placement adds, as a term of its own."""
    time = {**found.time, UPLINKS: cost.added_s}
    return replace(found, time=time, closed_form_s=found.closed_form_s + cost.added_s)


def ranked_on_network(
    job: Job, found: SearchResult, objective: str, top: int, placer: Placer
) -> tuple[SearchResult, Mapping[PlannedLayout, NetworkCost]]:
    """The result of a search, ranked again with the cost of placements, and these; layouts that cannot be placed are left out.

    Raises:
        ValueError: None of the layouts can be placed; the message is that of the best one.
    """
    losers = [one.layout for one in found.runners_up if one.slower != float("inf")]
    known = {one.layout: one for one in found.best}
    others = [layout for layout in dict.fromkeys(losers) if layout not in known]
    known |= {one.layout: one for one in (estimates(job, others) if others else ())}
    costs: dict[PlannedLayout, NetworkCost] = {}
    problem: ValueError | None = None
    for layout in known:
        try:
            costs[layout] = placer(job, layout)
        except ValueError as error:
            problem = problem or error
    placed = [with_uplinks(known[layout], cost) for layout, cost in costs.items()]
    if not placed:
        raise problem or ValueError("there is no layout to place")

    def key(one: Estimate) -> float:
        return ranking_key(one, objective)

    ranked = with_room_first(sorted(placed, key=lambda one: (key(one), one.step_s)), key)
    again = replace(
        found,
        best=ranked[:top],
        runners_up=tuple(_runners_up(ranked, key, found.runners_up)),
        roomy=next((one for one in ranked if free_share(one) >= LEAST_ROOM), None),
    )
    return again, costs


def _runners_up(
    ranked: Iterable[Estimate], key: Callable[[Estimate], float], before: Iterable[RunnerUp]
) -> Iterator[RunnerUp]:
    """The best of every family that lost, with the placements; what does not fit stays as it was."""
    winner, *others = ranked
    mine = _families_of(winner.layout)
    best: dict[str, Estimate] = {}
    for one in sorted(others, key=key):
        for name, value in _families_of(one.layout).items():
            if value != mine[name]:
                best.setdefault(f"{name}={value}", one)
    for family, one in best.items():
        yield RunnerUp(family, one.layout, why_slower(winner, one), one.step_s / winner.step_s - 1)
    yield from (one for one in before if one.slower == float("inf") and one.family not in best)


def _families_of(layout: PlannedLayout) -> Mapping[str, str]:
    """The families that a layout belongs to: a field and its value."""
    values = {name: getattr(layout, name) for name in FAMILIES}
    return {name: value if isinstance(value, str) else str(int(value)) for name, value in values.items()}
