"""The tree in which the gradients of slots are added: the same additions on any number of ranks.

Floating-point addition is not associative. If each rank summed its own slots, and the ranks' sums were then added, the result would
depend on the number of ranks. Here slot gradients are the leaves of one binary tree over the slot index, and every addition is a node
of that tree: ``node(level + 1, i) = node(level, 2 i) + node(level, 2 i + 1)``. The additions depend neither on the ranks that compute
the slots nor on the order in which gradients arrive. A node without a right sibling (the number of slots is no power of two) moves up
unchanged.

All functions here work on integers. Only ``SlotTree`` is mutable; it can add values of any type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from phalanx.parallel.mesh.slots import Deal, Round

T = TypeVar("T")

TreeNode = tuple[int, int]
"""A node of the tree: (level, index); level 0 has the slots."""


@dataclass(frozen=True)
class Leaves:
    """Leaves of the tree in which one kind of parameter's gradients are added: ``per_hand`` for each team's hand.

    Dense parameters have one leaf for each slot and context rank, since context ranks see different parts of a slot. Experts have one
    for each set of tokens that a rank computes at once.
    """

    deal: Deal
    per_hand: int

    @property
    def count(self) -> int:
        """Number of leaves in a step."""
        return self.deal.slots // self.deal.team * self.per_hand

    def of_round(self, current: Round) -> range:
        """Return the leaves of one round of a replica: one from each rank that has a share, in their order."""
        team, first = self.deal.team, current.slots[0]
        assert first is not None, "a round begins with a slot"
        hands = current.assigned // team
        return range(first // team * self.per_hand, (first // team + hands) * self.per_hand)

    def forest(self, replica: int) -> list[TreeNode]:
        """Return the nodes that remain after a replica has added all it can of its own leaves, from left to right."""
        hands = self.deal.hands_of_replica(replica)
        return list(_forest(self.count, range(hands.start * self.per_hand, hands.stop * self.per_hand)))

    def forests_of_ranks(self, replica: int) -> tuple[tuple[TreeNode, ...], ...]:
        """Return the nodes that remain after each shard rank of a contiguous deal has added its own leaves."""
        return _forests_of_ranks(self, replica)


@functools.cache
def _forests_of_ranks(leaves: Leaves, replica: int) -> tuple[tuple[TreeNode, ...], ...]:
    deal = leaves.deal
    runs = (deal.slots_of_rank(replica, rank) for rank in range(deal.shard_ranks))
    return tuple(_forest(leaves.count, run) for run in runs)


@functools.cache
def _forest(count: int, leaves: range) -> tuple[TreeNode, ...]:
    """Return the nodes that remain after all of ``leaves`` were added, from left to right. Cached."""
    tree: SlotTree[None] = SlotTree(count, lambda _left, _right: None)
    for leaf in leaves:
        tree.push(leaf, None)
    return tuple(sorted(tree.nodes, key=lambda node: node[1] << node[0]))


@dataclass
class SlotTree(Generic[T]):
    """Adds slots as they arrive, in the order that the tree fixes.

    Args:
        slots: Number of leaves.
        add: ``add(left, right)``; may reuse the memory of ``left``.
    """

    slots: int
    add: Callable[[T, T], T]
    nodes: dict[TreeNode, T] = field(default_factory=dict)

    def push(self, slot: int, value: T) -> None:
        """Add one slot's value to the tree."""
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} is outside 0..{self.slots - 1}")
        self.push_node((0, slot), value)

    def push_node(self, node: TreeNode, value: T) -> None:
        """Add a node that was summed elsewhere.

        Merge it with its sibling, and so on upwards, while siblings are in the tree. Raises ``ValueError`` if it was
        added before.
        """
        assert 0 <= node[0] <= self.root_node[0], "the level exists in the tree"
        assert 0 <= node[1] << node[0] < self.slots, "a node covers a leaf"
        if node in self.nodes:
            raise ValueError(f"node {node} was given twice")
        while node != self.root_node:
            level, index = node
            sibling = (level, index ^ 1)
            if index % 2 == 0 and (index + 1) << level >= self.slots:
                pass  # there is no right sibling: the node moves up as it is
            elif sibling in self.nodes:
                other = self.nodes.pop(sibling)
                value = self.add(value, other) if index % 2 == 0 else self.add(other, value)
            else:
                break
            node = (level + 1, index // 2)
        assert node not in self.nodes, "a sum takes the place of its two parts"
        self.nodes[node] = value

    @property
    def root_node(self) -> TreeNode:
        """The node that is the sum of all slots."""
        return ((self.slots - 1).bit_length(), 0)

    def take_root(self) -> T:
        """Remove and return the sum of all slots. Raise ``ValueError`` while slots are missing."""
        if set(self.nodes) != {self.root_node}:
            raise ValueError(f"slots are missing: the tree of {self.slots} holds nodes {sorted(self.nodes)}")
        return self.nodes.pop(self.root_node)
