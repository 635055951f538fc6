"""A fleet with too few ranks: the degree that it halves first, and the step after it has lost a node and has no spare.

A run in lanes and context tiles may go on with a smaller tensor degree or with a smaller context degree, and has the same bits with either
(``phalanx.run.smaller_degrees``). Which of them gives the shorter step depends on the model, its sequences and the network: tensor ranks gather and add
hidden states in every layer, context ranks exchange keys and values and every weight's gradient. Two estimates answer it in milliseconds.
The answer becomes a field of the run (``fleet.halve_first``) before its fleet starts, so that coordinator and workers need no planner to agree.

Slots are whole: what is added up inside one has an order, so its micro-batches are computed by one rank, one after the other, and
idle ranks cannot take some of them without changing bits. On ``d`` data-parallel ranks a rank computes up to ``ceil(slots / d)`` of
them, and if ``l`` ranks leave, the step takes ``ceil(slots / (d - l)) / ceil(slots / d)`` times as long: twice with as many slots as
ranks, whatever their number. More slots come closer to ``d / (d - l)``; each costs an exchange of gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.hardware.cluster import Cluster
from phalanx.launch.planner import FirstHalved
from phalanx.parallel.mesh.slots import Deal
from phalanx.run.layout import Layout, replica_ranks
from phalanx.run.smaller_degrees import halves
from phalanx.run.spec import RunSpec
from phalanx_plan.search.layout_text import estimate_written
from phalanx_plan.workload.candidates import divisors


def first_halved(spec: RunSpec, cluster: Cluster) -> FirstHalved | None:
    """The quick answer for a run with its model resolved, on accelerators of ``cluster``; ``None`` where at most one degree may fall.

    Raises ``ValueError`` where nothing can be estimated: for a model of one's own, or a format that the accelerator has not got.
    """
    ways = halves(spec)
    if len(ways) < 2:
        return None
    ranks = {replica_ranks(parallel) for parallel in ways.values()}
    (half,) = ranks
    here = replace(cluster, accelerators=half)
    estimates = {
        axis: estimate_written(replace(spec, parallel=parallel), here, half)
        for axis, parallel in ways.items()
    }
    # Memory enough first, then the shorter step; tensor among equals.
    best = min(estimates, key=lambda axis: (not estimates[axis].fits, estimates[axis].step_s))
    return FirstHalved(best, half, {axis: estimate.step_s for axis, estimate in estimates.items()})


# A lost node.


MUCH = 1.5
"""How much longer a step may take after a loss before it is worth a note."""


@dataclass(frozen=True)
class LostNode:
    """The fleet after a node has left it."""

    left: int
    """Data-parallel ranks."""
    slowdown: float
    """Time of a step over that of the whole fleet's."""


def lost_node(layout: Layout, ranks_per_node: int, slots: int) -> LostNode | None:
    """The fleet of ``layout`` with the ranks of one node less, which leave by whole replicas or teams; ``None`` if none is left."""
    unit = layout.shard if layout.replicate > 1 else layout.team
    each = layout.pipeline * layout.model_ranks * unit
    left = (layout.data_ranks * layout.pipeline * layout.model_ranks - ranks_per_node) // each
    if left <= 0:
        return None
    before = Deal(slots, layout.replicate, layout.shard, layout.team)
    shard = layout.shard if layout.replicate > 1 else left * unit
    after = Deal(slots, left if layout.replicate > 1 else 1, shard, layout.team)
    return LostNode(left * unit, after.most_rounds / before.most_rounds)


def better_slots(layout: Layout, ranks_per_node: int, slots: int, most: int) -> int | None:
    """The least number of slots above ``slots``, a divisor of ``most``, with which a lost node costs at most ``MUCH``; or ``None``.

    ``most`` is the number of micro-batches of a step: a slot has at least one.
    """
    for number in divisors(most):
        if number <= slots or number % layout.data_ranks:
            continue
        found = lost_node(layout, ranks_per_node, number)
        if found is not None and found.slowdown <= MUCH:
            return number
    return None


def lost_node_notes(layout: Layout, ranks_per_node: int, slots: int, most: int) -> tuple[str, ...]:
    """A note for the user if a lost node costs more than ``MUCH`` and more slots would mend that; arguments as above."""
    found = lost_node(layout, ranks_per_node, slots)
    if found is None or found.slowdown <= MUCH:
        return ()
    better = better_slots(layout, ranks_per_node, slots, most)
    if better is None:
        return ()
    mended = lost_node(layout, ranks_per_node, better)
    assert mended is not None
    return (
        f"without a spare, a lost node leaves {found.left:,} of {layout.data_ranks:,} data-parallel ranks, and a step takes "
        f"{found.slowdown:.3g} times as long: {slots:,} slots are dealt whole. With train.slots = {better} it takes "
        f"{mended.slowdown:.3g} times as long",
    )
