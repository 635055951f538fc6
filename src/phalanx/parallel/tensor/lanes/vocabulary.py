"""The embedding in lanes: rows of the vocabulary, of which tensor ranks have some.

A token's vector comes from the one rank that has its row, and from the others zeros: their sum is exact in any order. The
gradient of a row is the sum over its tokens in the order that PyTorch's kernel takes, and tokens without a row here have no
part in it, so that it does not depend on how many rows there are.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.autograd import FunctionContext, apply_function
from phalanx.parallel.tensor.sequence_comm import SequenceComm


class _RowsContext(FunctionContext, Protocol):
    count: int


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _RowsContext, weight: Tensor, row: Tensor) -> Tensor:
        ctx.count = len(weight)
        ctx.save_for_backward(row)
        absent = (row == len(weight)).unsqueeze(-1)
        # Zeros of one sign, as sums with other ranks' zeros have.
        return F.embedding(row % len(weight), weight).masked_fill(absent, 0).add_(0.0)

    @staticmethod
    def backward(ctx: _RowsContext, *upstream: Tensor) -> tuple[Tensor, None]:
        (row,) = ctx.saved_tensors
        # The row behind the last is that of tokens whose gradient nobody wants.
        padding = ctx.count
        gradient = torch.ops.aten.embedding_dense_backward(
            upstream[0].contiguous(), row, ctx.count + 1, padding, False
        )
        return gradient[: ctx.count], None


class LanedEmbedding(nn.Embedding):
    """An embedding of which this rank has the rows from ``start`` on."""

    def __init__(self, whole: nn.Embedding, start: int, comm: SequenceComm | None) -> None:
        """Takes over the parameter of ``whole``, cut already."""
        super().__init__(1, 1, device="meta")
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.weight, self.start, self.comm = whole.weight, start, comm

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``(b, s)`` of the whole vocabulary to ``(b, s / ranks, d)``."""
        found = self.found(tokens)
        return found if self.comm is None else self.comm.sum_scatter(found)

    def found(self, tokens: Tensor) -> Tensor:
        """The vectors ``(b, s, d)`` of tokens ``(b, s)`` that have a row here, and zeros for the others."""
        count = self.weight.shape[0]
        row = tokens - self.start
        row = row.masked_fill((row < 0) | (row >= count), count)
        return apply_function(_Rows, self.weight, row)
