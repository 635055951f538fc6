"""Slot gradients added in tree order while the backward pass runs; each rank keeps its share of the sum.

What ranks that share a copy of the weights send each other after each backward pass (``reduce_scatter.py``) enters a tree, one for each
parameter group. After the last round, copies of the weights in other replicas exchange what is left of their trees, and share the sums
by an all-gather: the volume of an all-reduce when a replica's slots fill a whole subtree.

``Intake`` tells the reducers which slots the current backward pass computes; it is the only state they share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.mesh.mesh import Mesh
from phalanx.parallel.mesh.slots import Round
from phalanx.parallel.mesh.torch_compat import all_gather_single
from phalanx.parallel.reduction.slot_tree import Leaves, SlotTree, TreeNode

# Sums of nodes of the slots' tree that are rows of one tensor, a level of the tree at a time.
#
# ``SlotTree`` takes one node after another, as gradients arrive. Where all nodes are there at once, as after an exchange between replicas,
# that would be an addition, and a kernel launch, for each of them: thousands for every parameter group at two thousand replicas.
# The same additions in the same order of operands are a few launches for each of the tree's levels: the left children of a level are
# rows of the tensor, the right ones are others, and a sum takes the place of its left child.
#
# Which rows are added follows from the nodes alone, so it is worked out once for each layout and kept by the caller.

Rows = slice | Tensor
"""The numbers of some rows: a slice where they are evenly spaced, else int64 ``(rows,)``."""


@dataclass(frozen=True)
class LevelSums:
    """The additions that are possible among some nodes, and what is left of the nodes afterwards."""

    levels: tuple[tuple[Rows, Rows], ...]
    """For each level from the leaves up, the rows of left children, which become their parents, and those of right children."""
    left: tuple[tuple[TreeNode, int], ...]
    """The nodes that have no sibling here, from left to right, each with its row."""

    def add(self, rows: Tensor) -> None:
        """Adds up the nodes whose values are ``rows`` ``(nodes, elements)``, in place."""
        for first, second in self.levels:
            if isinstance(first, slice):
                rows[first].add_(rows[second])
            else:
                rows[first] = rows[first] + rows[second]


def level_sums(count: int, nodes: Sequence[TreeNode], device: torch.device) -> LevelSums:
    """Works out the additions among ``nodes`` of a tree of ``count`` leaves.

    Args:
        count: Leaves of the whole tree. A node without a right sibling moves up unchanged.
        nodes: They cover a contiguous range of leaves, from left to right.
        device: Of the rows.
    """
    top = (count - 1).bit_length()
    given: dict[int, list[tuple[int, int]]] = {}
    for row, (level, index) in enumerate(nodes):
        given.setdefault(level, []).append((index, row))
    levels: list[tuple[Rows, Rows]] = []
    left: list[tuple[TreeNode, int]] = []
    here: list[tuple[int, int]] = []  # (index, row) of this level's nodes
    for level in range(top):
        here = sorted([*here, *given.get(level, ())])
        row_of, pairs, above = dict(here), [], []
        for index, row in here:
            if index % 2 and index - 1 in row_of:
                continue  # it was added to its left sibling
            if index % 2 == 0 and index + 1 in row_of:
                pairs.append((row, row_of[index + 1]))
            elif index % 2 or (index + 1) << level < count:
                left.append(((level, index), row))
                continue
            above.append((index // 2, row))
        if pairs:
            first, second = zip(*pairs, strict=True)
            levels.append(_rows(first, second, device))
        here = above
    left += [((top, index), row) for index, row in [*here, *given.get(top, ())]]
    return LevelSums(tuple(levels), tuple(sorted(left, key=lambda node: node[0][1] << node[0][0])))


@functools.cache
def leaf_sums(count: int, leaves: range, device: torch.device) -> LevelSums:
    """The additions among neighboring leaves of a tree of ``count``."""
    return level_sums(count, [(0, leaf) for leaf in leaves], device)


def _rows(first: tuple[int, ...], second: tuple[int, ...], device: torch.device) -> tuple[Rows, Rows]:
    """Both as slices if both are evenly spaced, else both as tensors."""
    stride = first[1] - first[0] if len(first) > 1 else 1
    apart = second[0] - first[0]
    if all(row == first[0] + i * stride for i, row in enumerate(first)) and all(
        b - a == apart for a, b in zip(first, second, strict=True)
    ):
        end = stride * (len(first) - 1) + 1
        return slice(first[0], first[0] + end, stride), slice(second[0], second[0] + end, stride)
    return torch.tensor(first, device=device), torch.tensor(second, device=device)


def admit_all(name: str, gradient: Tensor) -> bool:  # noqa: ARG001
    """Lets every slot's gradient into its tree."""
    return True


@dataclass
class Intake:
    """State shared by the sums of all parameters of a model: the current round, and the gate before the trees."""

    round: Round = field(default_factory=lambda: Round((), 0, counts=False, last=False))
    slot_complete: bool = False
    """True if the next backward pass completes the slot's gradient; else its micro-batches still accumulate."""
    admit: Callable[[str, Tensor], bool] = admit_all
    """Called with the name of a parameter or group and a slot's gradient; ``False`` keeps it out of the tree."""


def add_in_place(left: Tensor, right: Tensor) -> Tensor:
    """Adds for a ``SlotTree``, in the memory of ``left``."""
    return left.add_(right)


@dataclass
class TreeReducer:
    """Sums one flat gradient over all slots of a step.

    Each parameter group has one, since their trees grow side by side.
    """

    name: str
    mesh: Mesh
    leaves: Leaves
    intake: Intake
    tree: SlotTree[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.tree = SlotTree(self.leaves.count, add_in_place)

    def push(self, gradients: Tensor) -> None:
        """Takes in this round's gradients ``(ranks, share)``, one of each rank, of the share that this rank owns."""
        leaves = self.leaves.of_round(self.intake.round)
        sums = leaf_sums(self.leaves.count, leaves, gradients.device)
        self.push_nodes(sums, gradients[: len(leaves)])

    def push_nodes(self, sums: LevelSums, rows: Tensor) -> None:
        """Takes in nodes of the tree whose values are ``rows`` ``(nodes, share)``, which are overwritten."""
        sums.add(rows)
        for node, row in sums.left:
            self.tree.push_node(node, rows[row])

    def keep(self) -> None:
        """Copies what the tree holds out of buffers that it shares with gradients already added."""
        self.tree.nodes = {
            node: value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
            for node, value in self.tree.nodes.items()
        }

    def finish(self, out: Tensor) -> None:
        """Writes the sum over all slots of the fleet into ``out``; the tree is empty afterwards."""
        if self.mesh.replicas == 1:
            out.copy_(self.tree.take_root())
            return
        nodes = [self.tree.nodes.pop(node) for node in self.leaves.forest(self.mesh.replica)]
        exchange(nodes, self.leaves, self.mesh, out)

    def take_alone(self, gradient: Tensor) -> None:
        """Takes in the gradient of a group that only this rank holds, and after the last round makes it the sum."""
        if not self.intake.admit(self.name, gradient):
            return
        # After the last round FSDP2 makes parameters' gradients from this buffer, so the tree needs its own copy. Gradients of earlier
        # rounds are dropped.
        last = self.intake.round.last
        self.push((gradient.clone() if last else gradient).unsqueeze(0))
        if last:
            self.finish(gradient)


def exchange(nodes: Sequence[Tensor], leaves: Leaves, mesh: Mesh, out: Tensor) -> None:
    """Adds up what all replicas' trees were left with and writes the sum into ``out``, on every replica.

    Replica *j* becomes responsible for the *j*-th piece: it receives that piece of every node that any replica was
    left with, adds them in tree order, and the pieces are gathered.

    Args:
        nodes: What this replica was left with, in the order of ``leaves.forest``; each contiguous, with as many
            elements as ``out``. Not needed afterwards.
        out: Contiguous.
    """
    replicas, flat = mesh.replicas, out.view(-1)
    piece = -(-flat.numel() // replicas)
    rows, sums = _of_all_replicas(leaves, out.device)
    # Step 1: replica j gets the j-th piece of every replica's nodes. Sent: (replicas, own nodes, piece); received, end to
    # end: (nodes of replica 0, piece), (nodes of replica 1, piece), ...
    received = out.new_empty((rows, piece))
    sent = _by_piece(nodes, replicas, piece)
    gets, gives = _counts(leaves, mesh.replica, piece)
    dist.all_to_all_single(received.view(-1), sent, gets, gives, group=mesh.replicate_group)
    # Step 2: the forests of all replicas together are the whole tree but for its top, which is added here.
    sums.add(received)
    ((_, root),) = sums.left
    # Step 3: all pieces to all replicas: (replicas * piece,), perhaps more than ``out`` has.
    whole = flat if flat.numel() == replicas * piece else out.new_empty(replicas * piece)
    all_gather_single(whole, received[root], mesh.replicate_group)
    if whole is not flat:
        flat.copy_(whole[: flat.numel()])


@functools.cache
def _of_all_replicas(leaves: Leaves, device: torch.device) -> tuple[int, LevelSums]:
    """The number of nodes that all replicas are left with, and the additions among them."""
    nodes = [node for replica in range(leaves.deal.replicas) for node in leaves.forest(replica)]
    return len(nodes), level_sums(leaves.count, nodes, device)


@functools.cache
def _counts(leaves: Leaves, replica: int, piece: int) -> tuple[list[int] | None, list[int] | None]:
    """How many elements ``replica`` gets from each replica and gives to each; ``None`` where all have equally many nodes.

    As long as there are replicas, so they are made once for a size of pieces, and left out where they can be: at thousands of replicas
    the lists cost more of the host's time than all else in an exchange.
    """
    replicas = leaves.deal.replicas
    held = [len(leaves.forest(other)) for other in range(replicas)]
    if len(set(held)) == 1:
        return None, None
    return [nodes * piece for nodes in held], [held[replica] * piece] * replicas


def _by_piece(nodes: Sequence[Tensor], replicas: int, piece: int) -> Tensor:
    """All nodes' first pieces, then all their second ones, and so on; padded with zeros at the end."""
    if len(nodes) == 1 and nodes[0].numel() == replicas * piece:
        return nodes[0].view(-1)
    arranged = nodes[0].new_zeros((replicas, len(nodes), piece))
    full, rest = divmod(nodes[0].numel(), piece)
    for position, node in enumerate(nodes):
        flat = node.view(-1)
        arranged[:full, position] = flat[: full * piece].view(full, piece)
        if rest:
            arranged[full, position, :rest] = flat[full * piece :]
    return arranged.view(-1)
