"""Collectives of sequence parallelism, and sums in the order of a binary tree over the ranks that share each matrix.

Sequence parallelism (Korthikanti et al., arXiv 2205.05198). Between the divided matrices a rank has a contiguous piece of the
sequence. Before them the pieces are gathered; after them the partial products are reduce-scattered along the sequence. Each of the
two is the other's backward pass. Replicated parameters that see only a piece of the sequence, or some of the heads, get the sum of
the ranks' gradients.

On a CPU the calling thread waits in a collective, which the clock measures. In compiled code nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.hardware.local.device import CommClock
from phalanx.model.autograd import FunctionContext, apply_function, apply_function_of_many
from phalanx.model.layers.dense import aligned
from phalanx.parallel.torch_compat import exchange_along, gather_along, sum_over, sum_scatter_along

# Sums in the order of a binary tree over an index, and the inverse: a tensor with several readers, which adds their gradients
# in this order.
#
# A floating-point sum depends on its order. In a binary tree over 2^k summands, a rank with an aligned run of 2^j neighbors
# adds them locally, and the upper levels of the same tree remain. So the bits do not depend on the distribution of the summands
# (``phalanx.parallel.reduction.tree`` does the same with slots). A node's sum is rounded to the summands' dtype.


def sum_in_tree(summands: Tensor) -> Tensor:
    """Return the sum ``(...)`` over the first dimension of ``(2^k, ...)``, with all additions of a level at once."""
    while len(summands) > 1:
        summands = summands[0::2] + summands[1::2]  # (half as many, ...)
    return summands[0]


def add_in_tree(summands: Iterable[Tensor], add: Callable[[Tensor, Tensor], Tensor] = torch.add) -> Tensor:
    """Return the sum of 2^k ``summands``, which are read one by one; at most k + 1 tensors are in memory at any time."""
    subtrees: list[
        tuple[int, Tensor]
    ] = []  # (size, sum) of each subtree, like the digits of a binary counter
    for summand in summands:
        size, node = 1, summand
        while subtrees and subtrees[-1][0] == size:
            size, node = 2 * size, add(subtrees.pop()[1], node)
        subtrees.append((size, node))
    ((_, total),) = subtrees
    return total


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # noqa: ARG004
        return aligned(x)

    @staticmethod
    def backward(ctx: object, *upstream: Tensor) -> Tensor:  # noqa: ARG004
        return aligned(upstream[0])


def dense(x: Tensor) -> Tensor:
    """Return ``x`` contiguous and aligned in memory, and likewise its gradient.

    Kernels may add in another order if rows have gaps or begin within a cache line, like those of a slice of a larger tensor.
    """
    return apply_function(_Dense, x)


def forked(x: Tensor, count: int) -> Iterator[Tensor]:
    """Yield 2^k views of ``x``, whose gradients are added in a tree.

    Each view is made on demand. Backward visits the computations in reverse order. So it adds the gradients of a subtree before it
    reaches the next, and keeps at most k + 1 of them.
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
    """Return two views of ``x``; their gradients are added as left plus right."""
    left, right = apply_function_of_many(_Twice, x)
    return left, right


_SEQUENCE = 1
"""The sequence dimension of hidden states ``(b, s, d)``, which is divided."""


@dataclass(frozen=True)
class SequenceComm:
    """Collectives, with gradients, over the ranks that share each matrix."""

    group: dist.ProcessGroup
    clock: CommClock
    order: Literal["library", "ranks", "tree"] = "library"
    """Order of sums: the library's; in ``total`` that of the ranks; or in all of them that of a binary tree over the ranks."""

    def gather(self, piece: Tensor) -> Tensor:
        """Return the full sequence ``(b, s, d)`` from the ranks' pieces ``(b, s / ranks, d)``; gradients are summed."""
        return apply_function(_Gather, piece, self)

    def sum_scatter(self, partial: Tensor) -> Tensor:
        """Return this rank's piece ``(b, s / ranks, d)`` of the sum of the ranks' ``(b, s, d)``; gradients are gathered."""
        return apply_function(_SumScatter, partial, self)

    def sum_gradients(self, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the same tensors, with gradients that are the sums of the ranks' gradients, in fp32, by one collective for all."""
        return apply_function_of_many(_SumGradients, self, *parameters)

    def total(self, statistics: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors of one shape, without a gradient. A collective. ``order`` selects the
        order of additions: by rank, in a tree, or the library's.
        """
        if self.order == "ranks":
            first, *others = self.stack(statistics).unbind()  # (...) each, by rank
            return sum(others, first)
        if self.order == "tree":
            return sum_in_tree(self.stack(statistics))  # (ranks, ...) to (...)
        with self.waiting():
            return sum_over(statistics, self.group)

    def stack(self, statistics: Tensor) -> Tensor:
        """Return every rank's tensor, ``(ranks, ...)``, without a gradient."""
        with self.waiting():
            return gather_along(statistics.unsqueeze(0).contiguous(), 0, self.group)

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context that measures the time of a collective."""
        return nullcontext() if torch.compiler.is_compiling() else self.clock.measure()


def _gathered(piece: Tensor, comm: SequenceComm) -> Tensor:
    with comm.waiting():
        return gather_along(piece.contiguous(), _SEQUENCE, comm.group)  # (b, s, d)


def _sum_scattered(partial: Tensor, comm: SequenceComm) -> Tensor:
    """Return this rank's piece along the sequence of the sum of the ranks' ``partial``. A collective.

    The order of additions is a tree over the ranks with ``comm.order == "tree"``, otherwise that of the library.
    """
    if comm.order == "tree":
        with comm.waiting():
            pieces = exchange_along(partial, _SEQUENCE, comm.group)  # (ranks, b, s / ranks, d)
        return sum_in_tree(pieces)  # (b, s / ranks, d)
    with comm.waiting():
        return sum_scatter_along(partial.contiguous(), _SEQUENCE, comm.group)  # (b, s / ranks, d)


class _Context(FunctionContext, Protocol):
    comm: SequenceComm


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, piece: Tensor, comm: SequenceComm) -> Tensor:
        ctx.comm = comm
        return _gathered(piece, comm)

    @staticmethod
    def backward(ctx: _Context, *upstream: Tensor) -> tuple[Tensor, None]:
        return _sum_scattered(upstream[0], ctx.comm), None


class _SumScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, partial: Tensor, comm: SequenceComm) -> Tensor:
        ctx.comm = comm
        return _sum_scattered(partial, comm)

    @staticmethod
    def backward(ctx: _Context, *upstream: Tensor) -> tuple[Tensor, None]:
        return _gathered(upstream[0], ctx.comm), None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, comm: SequenceComm, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.comm = comm
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: _Context, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the sums of the ranks' gradients, in one fp32 message. A collective."""
        flat = torch.cat([gradient.flatten().float() for gradient in upstream])  # (elements of all,)
        # (elements of a parameter,) each
        sums = torch.split(ctx.comm.total(flat), [gradient.numel() for gradient in upstream])
        pairs = zip(sums, upstream, strict=True)
        return None, *(part.view_as(gradient).to(gradient.dtype) for part, gradient in pairs)
