"""Products of lanes that have some rows of one matrix: their gradients are written side by side into one tensor.

A rank computes the gradient of each lane's rows by itself. To copy them together afterwards would read and write all weights' gradients once
more in every micro-batch, on one rank with all lanes as much memory as the model has. The operations, and so the bits, are those of ``F.linear``:
a library may add in another order where a result begins within a cache line (of oneMKL:
https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-macos/2024-0/obtaining-numerically-reproducible-results.html), so rows are
written side by side where those of each lane begin as memory of their own would, and copied together elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.autograd import FunctionContext, apply_function

_ALIGNMENT = 256
"""Bytes: the largest alignment by which a library of products chooses among its ways (cuBLASLt's,
https://docs.nvidia.com/cuda/cublas/#cublasltmatmulpreferenceattributes-t; on a processor it is a cache line)."""


@dataclass(eq=False)
class WholeGradient:
    """The gradient of a matrix ``(rows, columns)`` of which each lane writes its rows, in one micro-batch."""

    parts: int
    """Lanes."""
    _memory: tuple[Tensor, ...] = ()
    _given: set[int] = field(default_factory=set)

    def part(self, lane: int, rows: Tensor) -> Tensor:
        """Memory for the gradient of a lane's ``rows``; if it is asked for again, by itself, since the first may still be needed."""
        if lane in self._given or rows.numel() * rows.element_size() % _ALIGNMENT:
            return torch.empty_like(rows)
        if not self._memory:
            self._memory = rows.new_empty(self.parts * rows.shape[0], rows.shape[1]).chunk(self.parts)
        self._given.add(lane)
        return self._memory[lane]

    def of_parts(self, parts: Sequence[Tensor]) -> Tensor | None:
        """The whole gradient, if ``parts`` are what lies in its memory; else ``None``. Gives the memory up."""
        memory, self._memory, self._given = self._memory, (), set()
        pairs = zip(memory, parts, strict=False)
        if len(memory) != len(parts) or any(own.data_ptr() != part.data_ptr() for own, part in pairs):
            return None
        first = memory[0]
        return first.as_strided((sum(part.shape[0] for part in memory), first.shape[1]), first.stride())


class _RowsContext(FunctionContext, Protocol):
    gradient: WholeGradient
    lane: int


class _RowsProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _RowsContext, x: Tensor, rows: Tensor, gradient: WholeGradient, lane: int) -> Tensor:
        ctx.save_for_backward(x, rows)
        ctx.gradient, ctx.lane = gradient, lane
        return torch.mm(x.flatten(0, -2), rows.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: _RowsContext, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, rows = ctx.saved_tensors
        slope = upstream[0].flatten(0, -2)
        own = torch.mm(slope.t(), x.flatten(0, -2), out=ctx.gradient.part(ctx.lane, rows))
        return torch.mm(slope, rows).view_as(x), own, None, None


@dataclass(eq=False)
class LaneRows:
    """``phalanx.model.layers.linear.Affine`` of a matrix of which each lane has some rows; a layer says which lane it computes."""

    lane: int = 0
    _gradient: WholeGradient | None = None

    def begun(self, parts: int) -> WholeGradient:
        """What lanes write their gradients to, of the forward pass that begins now."""
        self._gradient = WholeGradient(parts)
        return self._gradient

    def __call__(self, x: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        """``(..., inputs)`` to ``(..., outputs of the lane)``."""
        if self._gradient is None or bias is not None:
            return F.linear(x, rows, bias)
        return apply_function(_RowsProduct, x, rows, self._gradient, self.lane)
