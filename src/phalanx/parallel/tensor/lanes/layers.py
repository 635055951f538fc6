"""A layer in lanes: its heads or inner elements in as many equal parts as the run fixes, each computed by itself.

Attention and the feed-forward layer are sums over their heads and inner elements, of which a lane has as many as every other. So the
layer's result is the sum of the lanes' results, and the gradient of what they all read the sum of theirs: two sums in tree order,
on a rank first and then across ranks. Everything in between has a lane's shapes, whoever computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from phalanx.model.autograd import FunctionContext, apply_function, apply_function_of_many
from phalanx.model.layers.linear import Linear
from phalanx.parallel.tensor.lanes.pieces import InPieces
from phalanx.parallel.tensor.lanes.shares import SharedParameter, in_place_of
from phalanx.parallel.tensor.sequence_comm import SequenceComm
from phalanx.parallel.tensor.tree_sums import add_in_tree, dense, forked


class _ColumnsContext(FunctionContext, Protocol):
    pass


class _ColumnProduct(torch.autograd.Function):
    """``x W^T`` for some columns of a wider matrix; for the product they are copied together, so that their distance in
    memory, which depends on how many lanes are on the rank, has no say in what the kernel does."""

    @staticmethod
    def forward(ctx: _ColumnsContext, x: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(x, columns)
        return torch.mm(x.flatten(0, -2), columns.contiguous().t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: _ColumnsContext, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        x, columns = ctx.saved_tensors
        gradient, rows = upstream[0].flatten(0, -2), x.flatten(0, -2)
        return torch.mm(gradient, columns.contiguous()).view_as(x), torch.mm(gradient.t(), rows)


class LaneOutput(Linear):
    """The last matrix of a layer, which a lane has some inputs of; its bias is added to the lanes' sum and not here."""

    def __init__(self, whole: Linear) -> None:
        """Takes over the parameters of ``whole``."""
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.weight, self.bias, self.product = whole.weight, whole.bias, whole.product

    def forward(self, x: Tensor) -> Tensor:
        """``(b, s, inputs / lanes)`` to ``(b, s, outputs)``."""
        if self.product is None:
            return apply_function(_ColumnProduct, x, self.weight)
        return self.product(x, self.weight.contiguous())

    def add_bias(self, y: Tensor) -> Tensor:
        """``(b, s, outputs)`` to the same, with the bias."""
        return y + self.bias


class _CutContext(FunctionContext, Protocol):
    dim: int


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _CutContext, whole: Tensor, dim: int, parts: int) -> tuple[Tensor, ...]:
        ctx.dim = dim
        return whole.chunk(parts, dim)

    @staticmethod
    def backward(ctx: _CutContext, *upstream: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat(upstream, ctx.dim), None, None


@dataclass(frozen=True)
class LaneParameter:
    """A parameter of a layer in lanes, of which this rank has the part for its own lanes."""

    owner: nn.Module
    attribute: str
    dim: int = 0
    parts: int = 1
    """Different parts that this rank's lanes have of it along ``dim``; fewer than lanes where neighbors share a part."""
    shared: SharedParameter | None = None
    """Its shares, as many as lanes have the same part; ``None`` if each lane has a part of its own."""

    def of_lanes(self) -> list[Tensor]:
        """The tensor of each lane."""
        whole = (self.owner.get_parameter(self.attribute),) if self.shared is None else self.shared.now()
        if self.parts == 1:
            return list(whole)
        cut = [apply_function_of_many(_Cut, share, self.dim, self.parts) for share in whole]
        return [share[part] for part in range(self.parts) for share in cut]


@dataclass(frozen=True)
class LanedLayer:
    """Takes the place of the ``forward`` of a layer."""

    by_tokens: Callable[[Tensor], tuple[Tensor, ...]]
    """What all heads, or inner elements, read of each token by itself: ``(b, s, ...)`` each."""
    by_heads: Callable[..., Tensor]
    """From that and the context, the share ``(b, s, d)`` of the result that belongs to those whose weights the layer sees."""
    parameters: Sequence[LaneParameter]
    lanes: int
    """The lanes of this rank."""
    comm: SequenceComm | None
    """To the ranks with the other lanes."""
    add_bias: InPieces | None
    """Adds the bias of the result, if it has one."""

    def __call__(self, x: Tensor, *context: Tensor | None) -> Tensor:
        """``(b, s / ranks, d)`` to the same; ``context`` is what the layer wants to know of whole sequences."""
        inputs = self.by_tokens(x)
        if self.comm is not None:  # all by one gather: (b, s, ...) each
            together = inputs[0] if len(inputs) == 1 else torch.cat(inputs, -1)
            inputs = torch.split(self.comm.gather(together), [part.shape[-1] for part in inputs], -1)
        whole = dense(add_in_tree(self._results(tuple(map(dense, inputs)), context)))  # (b, s, d)
        y = whole if self.comm is None else self.comm.sum_scatter(whole)
        return y if self.add_bias is None else self.add_bias(y)

    def _results(self, inputs: tuple[Tensor, ...], context: tuple[Tensor | None, ...]) -> Iterator[Tensor]:
        owners = [(parameter.owner, parameter.attribute) for parameter in self.parameters]
        by_lane = zip(*(parameter.of_lanes() for parameter in self.parameters), strict=True)
        read = zip(*(forked(x, self.lanes) for x in inputs), strict=True)
        for tensors, own in zip(by_lane, read, strict=True):
            with in_place_of(owners, tensors):
                result = self.by_heads(own, *context)
            yield result
