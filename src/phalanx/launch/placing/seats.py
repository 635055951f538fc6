"""The seats of a run, and the orders in which they can be laid along a network.

A *seat* is a node's block of consecutive ranks, and the mesh is ``pipeline x replicate x shard x context x tensor``, tensor fastest. Seats
that share the inner axes (tensor, context, a team of experts) are a *block* and stay together. Blocks are laid along the tree either by
data (all blocks of a stage side by side) or by pipeline (the stages of a replica side by side), and a unit is one or more blocks that
follow each other so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from phalanx.run.layout import Layout

Order = Literal["data", "pipeline"]


def block_seats(inner_ranks: int, stage_ranks: int, ranks_per_node: int) -> int:
    """Seats of ``inner_ranks`` consecutive ranks; 1 where they fill no whole nodes, or do not divide a stage."""
    if inner_ranks <= ranks_per_node:
        return 1
    whole = inner_ranks % ranks_per_node == 0 and stage_ranks % inner_ranks == 0
    return inner_ranks // ranks_per_node if whole else 1


def sequence(seats: int, stages: int, block: int, order: Order) -> list[int]:
    """The seats of a pipeline of ``stages`` in the order in which they are laid along the tree, a block together."""
    if order == "data" or seats % (stages * block):
        return list(range(seats))
    blocks = seats // stages // block
    return [
        (stage * blocks + number) * block + seat
        for number in range(blocks)
        for stage in range(stages)
        for seat in range(block)
    ]


@dataclass(frozen=True)
class Shape:
    """How a run's ranks divide into seats and blocks."""

    layout: Layout
    ranks_per_node: int

    @property
    def seats(self) -> int:
        """Nodes that hold ranks."""
        return -(-self.layout.ranks // self.ranks_per_node)

    @property
    def block(self) -> int:
        """Seats of one block: those that the axes inside a slot span; 1 where blocks do not end with a node."""
        inner = self.layout.model_ranks * self.layout.team
        return block_seats(inner, self.layout.ranks // self.layout.pipeline, self.ranks_per_node)

    def sequence(self, order: Order) -> list[int]:
        """The seats in the order in which they are laid along the tree."""
        return sequence(self.seats, self.layout.pipeline, self.block, order)

    def units(self, order: Order) -> Iterator[int]:
        """Numbers of seats that make sense as a unit, ascending: they divide the seats, and are whole blocks."""
        layout, per_node = self.layout, self.ranks_per_node
        stage = max(1, layout.ranks // layout.pipeline // per_node)
        spans = {self.block, stage, self.block * layout.pipeline if order == "pipeline" else self.block}
        spans |= {max(1, layout.shard * layout.model_ranks // per_node)} if order == "data" else set()
        yield from sorted(span for span in spans if self.seats % span == 0 and span <= self.seats)
