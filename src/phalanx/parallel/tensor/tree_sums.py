"""Sums in the order of a binary tree over an index, and their opposite: one tensor read by several, whose gradients are so added.

A sum of floating-point numbers depends on its order. In a binary tree over 2^k summands, whoever holds an aligned run of 2^j
neighbors adds these up by itself, and what is left are the upper levels of the same tree: so the result has the same bits
whoever holds which summands (``phalanx.parallel.mesh.slots`` does so with the slots of a batch). A node's sum is rounded to the
summands' dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from phalanx.model.autograd import apply_function, apply_function_of_many
from phalanx.model.layers.dense import aligned


def sum_in_tree(summands: Tensor) -> Tensor:
    """The sum ``(...)`` over the first dimension of ``(2^k, ...)``, all additions of a level at once."""
    while len(summands) > 1:
        summands = summands[0::2] + summands[1::2]
    return summands[0]


def add_in_tree(summands: Iterable[Tensor], add: Callable[[Tensor, Tensor], Tensor] = torch.add) -> Tensor:
    """The sum of 2^k ``summands``, each taken in as it comes: at any time at most k + 1 tensors are held."""
    held: list[tuple[int, Tensor]] = []  # sizes of subtrees and their sums, as the digits of a binary counter
    for summand in summands:
        size, node = 1, summand
        while held and held[-1][0] == size:
            size, node = 2 * size, add(held.pop()[1], node)
        held.append((size, node))
    ((_, total),) = held
    return total


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # noqa: ARG004
        return aligned(x)

    @staticmethod
    def backward(ctx: object, *upstream: Tensor) -> Tensor:  # noqa: ARG004
        return aligned(upstream[0])


def dense(x: Tensor) -> Tensor:
    """``x`` without gaps in memory and begun at a boundary, and so its gradient: kernels may add in another order where rows are apart, or
    begin within a cache line, as those of a piece of a larger tensor do."""
    return apply_function(_Dense, x)


def forked(x: Tensor, count: int) -> Iterator[Tensor]:
    """``x`` under 2^k names, whose gradients are added in a tree.

    Each name is made when it is asked for. Backward, which goes through what was computed in the reverse order, then adds the
    gradients of a subtree before it comes to the next, and holds at most k + 1 of them.
    """
    if count == 1:
        yield x
        return
    left, right = twice(x)
    yield from forked(left, count // 2)
    yield from forked(right, count // 2)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        return x.view_as(x), x.view_as(x)

    @staticmethod
    def backward(ctx: object, *upstream: Tensor) -> Tensor:  # noqa: ARG004
        left, right = upstream
        return left + right


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two names for ``x``; their gradients are added as left plus right."""
    left, right = apply_function_of_many(_Twice, x)
    return left, right
