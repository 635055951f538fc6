"""Collectives of sequence parallelism, between the ranks that share each matrix.

Sequence parallelism (Korthikanti et al., arXiv 2205.05198): between the divided matrices a rank holds a contiguous piece of
the sequence; before them the pieces are gathered, after them the partial products are summed and divided along the
sequence again. Each of the two is the other's backward pass. Parameters that are whole on every rank, but see only a piece
of the sequence or some of the heads, get the sum of the ranks' gradients.

On a CPU the calling thread waits in a collective, which the clock counts; in compiled code it cannot, and nothing is
counted there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.model.autograd import FunctionContext, apply_function, apply_function_of_many
from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.mesh.torch_compat import exchange_along, gather_along, sum_over, sum_scatter_along
from phalanx.parallel.tensor.tree_sums import sum_in_tree

_SEQUENCE = 1
"""The dimension of hidden states ``(b, s, d)`` that is divided."""


@dataclass(frozen=True)
class SequenceComm:
    """Collectives, with gradients, over the ranks that share each matrix."""

    group: dist.ProcessGroup
    clock: CommClock
    order: Literal["library", "ranks", "tree"] = "library"
    """The order of sums: the library's; in ``total`` that of the ranks; or in all of them that of a binary tree over the ranks."""

    def gather(self, piece: Tensor) -> Tensor:
        """The whole sequence ``(b, s, d)`` from the ranks' pieces ``(b, s / ranks, d)``; gradients are summed."""
        return apply_function(_Gather, piece, self)

    def sum_scatter(self, partial: Tensor) -> Tensor:
        """This rank's piece ``(b, s / ranks, d)`` of the sum of the ranks' ``(b, s, d)``; gradients are gathered."""
        return apply_function(_SumScatter, partial, self)

    def sum_gradients(self, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The same tensors, whose gradients are the sums of the ranks', in fp32, by one collective for all."""
        return apply_function_of_many(_SumGradients, self, *parameters)

    def total(self, statistics: Tensor) -> Tensor:
        """The sum of the ranks' tensors, without a gradient."""
        if self.order == "ranks":
            first, *others = self.stack(statistics).unbind()
            return sum(others, first)
        if self.order == "tree":
            return sum_in_tree(self.stack(statistics))
        with self.waiting():
            return sum_over(statistics, self.group)

    def stack(self, statistics: Tensor) -> Tensor:
        """Every rank's tensor, ``(ranks, ...)``, without a gradient."""
        with self.waiting():
            return gather_along(statistics.unsqueeze(0).contiguous(), 0, self.group)

    def waiting(self) -> AbstractContextManager[None]:
        """A context to measure the time of a collective."""
        return nullcontext() if torch.compiler.is_compiling() else self.clock.measure()


def _gathered(piece: Tensor, comm: SequenceComm) -> Tensor:
    with comm.waiting():
        return gather_along(piece.contiguous(), _SEQUENCE, comm.group)


def _sum_scattered(partial: Tensor, comm: SequenceComm) -> Tensor:
    if comm.order == "tree":
        with comm.waiting():
            pieces = exchange_along(partial, _SEQUENCE, comm.group)
        return sum_in_tree(pieces)
    with comm.waiting():
        return sum_scatter_along(partial.contiguous(), _SEQUENCE, comm.group)


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
        flat = torch.cat([gradient.flatten().float() for gradient in upstream])
        sums = torch.split(ctx.comm.total(flat), [gradient.numel() for gradient in upstream])
        pairs = zip(sums, upstream, strict=True)
        return None, *(part.view_as(gradient).to(gradient.dtype) for part, gradient in pairs)
