"""The step of a fleet that has lost a node and has no spare: how much longer, and which number of slots would help.

Slots are whole: what is added up inside one has an order, so its micro-batches are computed by one rank, one after the other, and
idle ranks cannot take some of them without changing bits. On ``d`` data-parallel ranks a rank computes up to ``ceil(slots / d)`` of
them, and if ``l`` ranks leave, the step takes ``ceil(slots / (d - l)) / ceil(slots / d)`` times as long: twice with as many slots as
ranks, whatever their number. More slots come closer to ``d / (d - l)``; each costs an exchange of gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.parallel.mesh.slots import Deal
from phalanx.plan.workload.candidates import divisors
from phalanx.run.layout import Layout

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
