"""Slot gradients added in tree order during the backward pass; each rank keeps its share of the sum.

The gradients that ranks with one copy of the weights exchange after each backward pass (``reduce_scatter.py``) enter a tree, one for
each parameter group. After the last round, replicas exchange the remaining nodes of their trees, and share the sums by an
all-gather. The volume is that of an all-reduce if a replica's slots fill a complete subtree.

The additions are those of one binary tree over the slots (``SlotTree``).

``Intake`` has the current round of slots; it is the only state that the reducers share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.divisions import Deal, Round
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.torch_compat import all_gather_single

# The tree in which the gradients of slots are added: the same additions on any number of ranks.
#
# Floating-point addition is not associative. If each rank summed its own slots, and the ranks' sums were then added, the result would
# depend on the number of ranks. Here slot gradients are the leaves of one binary tree over the slot index, and every addition is a node
# of that tree: ``node(level + 1, i) = node(level, 2 i) + node(level, 2 i + 1)``. The additions depend neither on the ranks that compute
# the slots nor on the order in which gradients arrive. A node without a right sibling (the number of slots is no power of two) moves up
# unchanged.
#
# All functions here work on integers. Only ``SlotTree`` is mutable; it can add values of any type.

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
        """Return the leaves of one round of a replica: one from each rank that has a share, in their order; fewer in
        a round that is not full.
        """
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


# Sums of tree nodes that are rows of one tensor, one level of the tree at a time.
#
# ``SlotTree`` takes one node after another, as gradients arrive. After an exchange between replicas, all nodes are there at once, and
# it would launch one kernel for each: thousands for every parameter group at two thousand replicas. The same additions take a few
# launches for each level. Left and right children of a level are rows of the tensor, and a sum replaces its left child.
#
# The rows follow from the nodes alone, so they are computed once for each layout and cached by the caller.

Rows = slice | Tensor
"""Row indices: a slice if they are evenly spaced, else int64 ``(rows,)``."""


@dataclass(frozen=True)
class LevelSums:
    """Additions that are possible among some nodes, and the remaining nodes."""

    levels: tuple[tuple[Rows, Rows], ...]
    """For each level from the leaves up, the rows of left children, which become their parents, and those of right children."""
    remaining: tuple[tuple[TreeNode, int], ...]
    """The nodes without a sibling, from left to right, each with its row."""

    def add(self, rows: Tensor) -> None:
        """Add up the nodes with values ``rows`` ``(nodes, elements)``, in place, level by level; the rows of
        ``remaining`` then have the results.
        """
        for first, second in self.levels:
            if isinstance(first, slice):
                rows[first].add_(rows[second])
            else:
                rows[first] = rows[first] + rows[second]


def level_sums(count: int, nodes: Sequence[TreeNode], device: torch.device) -> LevelSums:
    """Return the additions among ``nodes`` of a tree of ``count`` leaves, level by level as pairs of rows, and the
    nodes that remain without a sibling, from left to right, with their rows.

    Args:
        count: Leaves of the full tree. A node without a right sibling moves up unchanged.
        nodes: They cover a contiguous range of leaves, from left to right.
        device: Device of the rows.
    """
    top = (count - 1).bit_length()
    nodes_of_level: dict[int, list[tuple[int, int]]] = {}
    for row, (level, index) in enumerate(nodes):
        nodes_of_level.setdefault(level, []).append((index, row))
    levels: list[tuple[Rows, Rows]] = []
    remaining: list[tuple[TreeNode, int]] = []
    current: list[tuple[int, int]] = []  # (index, row) of this level's nodes
    for level in range(top):
        current = sorted([*current, *nodes_of_level.get(level, ())])
        row_of, pairs, parents = dict(current), [], []
        for index, row in current:
            if index % 2 and index - 1 in row_of:
                continue  # it was added to its left sibling
            if index % 2 == 0 and index + 1 in row_of:
                pairs.append((row, row_of[index + 1]))
            elif index % 2 or (index + 1) << level < count:
                remaining.append(((level, index), row))
                continue
            parents.append((index // 2, row))
        if pairs:
            first, second = zip(*pairs, strict=True)
            levels.append(_rows(first, second, device))
        current = parents
    remaining += [((top, index), row) for index, row in [*current, *nodes_of_level.get(top, ())]]
    return LevelSums(tuple(levels), tuple(sorted(remaining, key=lambda node: node[0][1] << node[0][0])))


@functools.cache
def leaf_sums(count: int, leaves: range, device: torch.device) -> LevelSums:
    """Compute the additions among neighboring leaves of a tree of ``count``."""
    return level_sums(count, [(0, leaf) for leaf in leaves], device)


def _rows(first: tuple[int, ...], second: tuple[int, ...], device: torch.device) -> tuple[Rows, Rows]:
    """Return the row numbers ``first`` and ``second`` as two slices if both are evenly spaced in the same way, else as tensors."""
    stride = first[1] - first[0] if len(first) > 1 else 1
    apart = second[0] - first[0]
    if all(row == first[0] + i * stride for i, row in enumerate(first)) and all(
        b - a == apart for a, b in zip(first, second, strict=True)
    ):
        end = stride * (len(first) - 1) + 1
        return slice(first[0], first[0] + end, stride), slice(second[0], second[0] + end, stride)
    return torch.tensor(first, device=device), torch.tensor(second, device=device)


def admit_all(name: str, gradient: Tensor) -> bool:  # noqa: ARG001
    """Admit every slot's gradient to its tree."""
    return True


@dataclass
class Intake:
    """State shared by the sums of all parameters of a model: the current round, and the filter before the trees."""

    round: Round = field(default_factory=lambda: Round((), 0, counts=False, last=False))
    slot_complete: bool = False
    """True if the next backward pass completes the slot's gradient; else its micro-batches still accumulate."""
    admit: Callable[[str, Tensor], bool] = admit_all
    """Called with the name of a parameter or group and a slot's gradient; ``False`` keeps it out of the tree."""


def add_in_place(left: Tensor, right: Tensor) -> Tensor:
    """``SlotTree`` addition in the memory of ``left``."""
    return left.add_(right)


def _add_to_wider(left: Tensor, right: Tensor) -> Tensor:
    """``SlotTree`` addition in the memory of ``left``, or in new memory if ``left`` is a leaf in a narrower dtype."""
    return left.add_(right) if left.dtype == right.dtype else left + right


@dataclass
class TreeReducer:
    """Sums one flat gradient over all slots of a step. Each parameter group has one."""

    name: str
    mesh: Mesh
    leaves: Leaves
    intake: Intake
    tree: SlotTree[Tensor] = field(init=False)
    """Sums of the share that this rank owns."""
    unsharded: SlotTree[Tensor] = field(init=False)
    """Sums of this rank's own slots with all shares, if its slots are contiguous."""

    def __post_init__(self) -> None:
        self.tree = SlotTree(self.leaves.count, add_in_place)
        self.unsharded = SlotTree(self.leaves.count, _add_to_wider)

    def clear(self) -> None:
        """Discard the sums of an aborted step."""
        self.tree.nodes.clear()
        self.unsharded.nodes.clear()

    def push(self, gradients: Tensor) -> None:
        """Push this round's gradients ``(ranks, share)``, one of each rank, for the share that this rank owns."""
        leaves = self.leaves.of_round(self.intake.round)
        sums = leaf_sums(self.leaves.count, leaves, gradients.device)
        self.push_nodes(sums, gradients[: len(leaves)])

    def push_nodes(self, sums: LevelSums, rows: Tensor) -> None:
        """Push nodes of the tree with values ``rows`` ``(nodes, share)``, which are overwritten."""
        sums.add(rows)
        for node, row in sums.remaining:
            self.tree.push_node(node, rows[row])

    def keep(self) -> None:
        """Copy those of the tree's nodes that are views of larger buffers, so that the buffers can be freed."""
        self.tree.nodes = {
            node: value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
            for node, value in self.tree.nodes.items()
        }

    def finish(self, out: Tensor) -> None:
        """Write the sum over all slots of the fleet into ``out``, and empty the tree.

        A collective if there are several replicas.
        """
        if self.mesh.replicas == 1:
            out.copy_(self.tree.take_root())
            return
        nodes = [self.tree.nodes.pop(node) for node in self.leaves.forest(self.mesh.replica)]
        exchange(nodes, self.leaves, self.mesh, out)

    def take_alone(self, gradient: Tensor) -> None:
        """Take in the gradient of a group that only this rank has; after the last round replace it by the sum."""
        if not self.intake.admit(self.name, gradient):
            return
        # The gradients that FSDP2 makes of this buffer are dropped, until the last round: then they are made of the sum. The buffer may
        # itself be a node of the tree: ``finish`` has read or sent all nodes before it writes.
        self.push(gradient.unsqueeze(0))
        if self.intake.round.last:
            self.finish(gradient)


def exchange(nodes: Sequence[Tensor], leaves: Leaves, mesh: Mesh, out: Tensor) -> None:
    """Add up the remaining nodes of all replicas' trees and write the sum into ``out``, on every replica. A collective.

    Replica *j* is responsible for the *j*-th piece. It receives that piece of every remaining node of all replicas and adds them in tree
    order. Then the pieces are gathered.

    Args:
        nodes: This replica's remaining nodes, in the order of ``leaves.forest``; each contiguous, with as many elements as ``out``.
            Their memory may be reused.
        leaves: Leaves of the tree.
        mesh: The mesh of the model.
        out: Contiguous.
    """
    replicas, flat = mesh.replicas, out.view(-1)  # flat: (elements,)
    piece = -(-flat.numel() // replicas)
    rows, sums = _of_all_replicas(leaves, out.device)
    # Step 1: replica j gets the j-th piece of every replica's nodes. Sent: (replicas, own nodes, piece). Received, concatenated:
    # (nodes of replica 0, piece), (nodes of replica 1, piece), ...
    received = out.new_empty((rows, piece))
    sent = _by_piece(nodes, replicas, piece)
    receive_counts, send_counts = _counts(leaves, mesh.replica, piece)
    # (nodes of all replicas * piece,), (replicas * own nodes * piece,)
    dist.all_to_all_single(received.view(-1), sent, receive_counts, send_counts, group=mesh.replicate_group)
    # Step 2: the forests of all replicas are the full tree except its top, which is added here.
    sums.add(received)
    ((_, root),) = sums.remaining
    # Step 3: all-gather the pieces: (replicas * piece,), padded beyond the size of ``out``.
    gathered = flat if flat.numel() == replicas * piece else out.new_empty(replicas * piece)
    all_gather_single(gathered, received[root], mesh.replicate_group)
    if gathered is not flat:
        flat.copy_(gathered[: flat.numel()])


@functools.cache
def _of_all_replicas(leaves: Leaves, device: torch.device) -> tuple[int, LevelSums]:
    """Return the number of remaining nodes of all replicas, and the additions among them."""
    nodes = [node for replica in range(leaves.deal.replicas) for node in leaves.forest(replica)]
    return len(nodes), level_sums(leaves.count, nodes, device)


@functools.cache
def _counts(leaves: Leaves, replica: int, piece: int) -> tuple[list[int] | None, list[int] | None]:
    """Return the numbers of elements that ``replica`` receives from and sends to each replica; both ``None`` if all
    have equally many nodes.

    The lists are as long as there are replicas, so they are cached, and omitted where possible. At thousands of
    replicas they cost more host time than the rest of an exchange.
    """
    replicas = leaves.deal.replicas
    node_counts = [len(leaves.forest(other)) for other in range(replicas)]
    if len(set(node_counts)) == 1:
        return None, None
    return [nodes * piece for nodes in node_counts], [node_counts[replica] * piece] * replicas


def _by_piece(nodes: Sequence[Tensor], replicas: int, piece: int) -> Tensor:
    """Return all nodes' first pieces, then all their second pieces, and so on; padded with zeros at the end: ``(replicas * nodes * piece,)``."""
    if len(nodes) == 1 and nodes[0].numel() == replicas * piece:
        return nodes[0].view(-1)  # (replicas * piece,)
    arranged = nodes[0].new_zeros((replicas, len(nodes), piece))
    full, remainder = divmod(nodes[0].numel(), piece)
    for position, node in enumerate(nodes):
        flat = node.view(-1)  # (elements,)
        arranged[:full, position] = flat[: full * piece].view(full, piece)  # (full, piece)
        if remainder:
            arranged[full, position, :remainder] = flat[full * piece :]
    return arranged.view(-1)  # (replicas * nodes * piece,)
