"""Adds up nodes of the slots' tree that lie in the rows of one tensor, a level of the tree at a time.

``SlotTree`` takes one node after another, as gradients arrive. Where all nodes are there at once, as after an exchange between replicas,
that would be an addition, and a kernel launch, for each of them: thousands for every parameter group at two thousand replicas.
The same additions in the same order of operands are a few launches for each of the tree's levels: the left children of a level are
rows of the tensor, the right ones are others, and a sum takes the place of its left child.

Which rows are added follows from the nodes alone, so it is worked out once for each layout and kept by the caller.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.parallel.reduction.slot_tree import TreeNode

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
