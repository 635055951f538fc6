"""A layer in lanes: its heads or inner elements in as many equal parts as the run fixes, and the products of these lanes.

Attention and the feed-forward layer are sums over their heads and inner elements, of which a lane has as many as every other. So the
layer's result is the sum of the lanes' results, and the gradient of what they all read the sum of theirs: two sums in tree order,
on a rank first and then across ranks. Everything in between has a lane's shapes, whoever computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.autograd import FunctionContext, apply_function, apply_function_of_many
from phalanx.model.layers.dense import Linear, aligned
from phalanx.parallel.tensor.lanes.shares import InPieces, Owners, SharedParameter, in_place_of
from phalanx.parallel.tensor.sequence_comm import SequenceComm, add_in_tree, dense, forked

# Products of lanes that have some rows of one matrix: their gradients are written side by side into one tensor.
#
# A rank computes the gradient of each lane's rows by itself. To copy them together afterwards would read and write all weights' gradients once
# more in every micro-batch, on one rank with all lanes as much memory as the model has. The operations, and so the bits, are those of ``F.linear``:
# a library may add in another order where a result begins within a cache line (of oneMKL:
# https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-macos/2024-0/obtaining-numerically-reproducible-results.html), so rows are
# written side by side where those of each lane begin as memory of their own would, and copied together elsewhere.

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
    """``phalanx.model.layers.dense.Affine`` of a matrix of which each lane has some rows; a layer says which lane it computes."""

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


class _ColumnsContext(FunctionContext, Protocol):
    pass


class _ColumnProduct(torch.autograd.Function):
    """``x W^T`` for some columns of a wider matrix; for the product they are copied together, so that their distance in
    memory, which depends on how many lanes are on the rank, has no say in what the kernel does."""

    @staticmethod
    def forward(ctx: _ColumnsContext, x: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(x, columns)
        return torch.mm(x.flatten(0, -2), aligned(columns).t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: _ColumnsContext, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        x, columns = ctx.saved_tensors
        gradient, rows = upstream[0].flatten(0, -2), x.flatten(0, -2)
        return torch.mm(gradient, aligned(columns)).view_as(x), torch.mm(gradient.t(), rows)


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
        return self.product(x, aligned(self.weight))

    def add_bias(self, y: Tensor) -> Tensor:
        """``(b, s, outputs)`` to the same, with the bias."""
        return y + self.bias


class _CutContext(FunctionContext, Protocol):
    dim: int
    gradient: WholeGradient | None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _CutContext, whole: Tensor, dim: int, parts: int, gradient: WholeGradient | None
    ) -> tuple[Tensor, ...]:
        ctx.dim, ctx.gradient = dim, gradient
        own = whole.chunk(parts, dim)
        # Rows are multiplied where they lie; columns are copied together for each product.
        return own if dim else tuple(map(aligned, own))

    @staticmethod
    def backward(ctx: _CutContext, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        whole = None if ctx.gradient is None else ctx.gradient.of_parts(upstream)
        return torch.cat(upstream, ctx.dim) if whole is None else whole, None, None, None


@dataclass(frozen=True)
class LaneParameter:
    """A parameter of a layer in lanes, of which this rank has the part for its own lanes."""

    owner: nn.Module
    attribute: str
    dim: int = 0
    parts: int = 1
    """Different parts that this rank's lanes have of it along ``dim``; fewer than lanes where neighbors share a part."""
    shared: SharedParameter | None = None
    """Its shares: for each context tile as many as lanes have the same part; ``None`` if each lane has a part of its own, and the
    run has no tiles."""
    tiles: int = 1
    """Context tiles of this rank; 1 if the run has none."""
    rows: LaneRows | None = None
    """Lets the lanes' products write their rows of its gradient side by side; ``None`` if something else is done with it."""

    def of_lanes(self) -> list[list[Tensor]]:
        """The tensor of each lane, for each tile."""
        whole = (self.owner.get_parameter(self.attribute),) if self.shared is None else self.shared.now()
        sharers = len(whole) // self.tiles
        by_share = [
            (share,)
            if self.parts == 1
            else apply_function_of_many(
                _Cut, share, self.dim, self.parts, None if self.rows is None else self.rows.begun(self.parts)
            )
            for share in whole
        ]
        return [
            [by_share[tile * sharers + sharer][part] for tile in range(self.tiles)]
            for part in range(self.parts)
            for sharer in range(sharers)
        ]


class LaneResult(Protocol):
    """Computes a layer's result for one lane."""

    def __call__(
        self,
        owners: Owners,
        tensors: Sequence[Sequence[Tensor]],
        inputs: tuple[Tensor, ...],
        *context: object,
    ) -> Tensor:
        """The lane's share ``(b, s, d)`` of the result, from ``inputs`` ``(b, s, ...)`` of all tokens of this context rank.

        ``tensors`` are the lane's for each context tile, in the order of ``owners``; ``context`` is what the layer wants to know of
        whole sequences.
        """
        ...


@dataclass(frozen=True)
class OnWholeSequence:
    """The ``LaneResult`` of a sequence that is not in context tiles."""

    by_heads: Callable[..., Tensor]

    def __call__(
        self,
        owners: Owners,
        tensors: Sequence[Sequence[Tensor]],
        inputs: tuple[Tensor, ...],
        *context: object,
    ) -> Tensor:
        """See ``LaneResult``."""
        (own,) = tensors
        with in_place_of(owners, own):
            return self.by_heads(inputs, *context)


@dataclass(frozen=True)
class TileByTile:
    """The ``LaneResult`` of a layer that sees a token at a time, for a sequence in context tiles."""

    by_heads: Callable[[tuple[Tensor, ...]], Tensor]

    def __call__(
        self,
        owners: Owners,
        tensors: Sequence[Sequence[Tensor]],
        inputs: tuple[Tensor, ...],
        *context: object,
    ) -> Tensor:
        """See ``LaneResult``."""
        assert not context, "a layer of tokens asks nothing of whole sequences"
        results = []
        for own, read in zip(tensors, in_tiles(inputs, len(tensors)), strict=True):
            with in_place_of(owners, own):
                results.append(dense(self.by_heads(read)))
        return torch.cat(results, 1)


def in_tiles(inputs: tuple[Tensor, ...], tiles: int) -> Iterator[tuple[Tensor, ...]]:
    """Tensors ``(b, s, ...)`` that lie by tile, one tile after the other, each without gaps in memory."""
    for parts in zip(*(x.chunk(tiles, 1) for x in inputs), strict=True):
        yield tuple(map(dense, parts))


@dataclass(frozen=True)
class LanedLayer:
    """Takes the place of the ``forward`` of a layer."""

    by_tokens: Callable[[Tensor], tuple[Tensor, ...]]
    """What all heads, or inner elements, read of each token by itself: ``(b, s, ...)`` each."""
    result: LaneResult
    """From that and the context, the share ``(b, s, d)`` of the result that belongs to a lane's heads or inner elements."""
    parameters: Sequence[LaneParameter]
    lanes: int
    """The lanes of this rank."""
    comm: SequenceComm | None
    """To the ranks with the other lanes."""
    add_bias: InPieces | None
    """Adds the bias of the result, if it has one."""

    def __call__(self, x: Tensor, *context: object) -> Tensor:
        """``(b, s / ranks, d)`` to the same; ``context`` is what the layer wants to know of whole sequences."""
        inputs = self.by_tokens(x)
        if self.comm is not None:  # all by one gather: (b, s, ...) each
            together = inputs[0] if len(inputs) == 1 else torch.cat(inputs, -1)
            inputs = torch.split(self.comm.gather(together), [part.shape[-1] for part in inputs], -1)
        whole = dense(add_in_tree(self._results(tuple(map(dense, inputs)), context)))  # (b, s, d)
        y = whole if self.comm is None else self.comm.sum_scatter(whole)
        return y if self.add_bias is None else self.add_bias(y)

    def _results(self, inputs: tuple[Tensor, ...], context: tuple[object, ...]) -> Iterator[Tensor]:
        owners = [(parameter.owner, parameter.attribute) for parameter in self.parameters]
        by_lane = zip(*(parameter.of_lanes() for parameter in self.parameters), strict=True)
        read = zip(*(forked(x, self.lanes) for x in inputs), strict=True)
        for lane, (of_lane, own) in enumerate(zip(by_lane, read, strict=True)):
            for parameter in self.parameters:
                if parameter.rows is not None:
                    parameter.rows.lane = lane
            by_tile = list(zip(*of_lane, strict=True))
            yield self.result(owners, by_tile, own, *context)
