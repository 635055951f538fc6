"""A layer in lanes: its heads or inner elements are cut into a fixed number of equal parts.

Attention and the feed-forward layer are sums over their heads and inner elements. So the layer's result is the sum of the lanes'
results, and the gradient of the shared input is the sum of the lanes' gradients. Both are sums in tree order, first on a rank and
then across ranks. All tensors in between have the shapes of one lane, on any rank.
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
# A rank computes the gradient of each lane's rows separately. Concatenating them afterwards would read and write all weight gradients
# once more in every micro-batch. The operations, and so the bits, are those of ``F.linear``. A library may add in another order if a
# result begins within a cache line (oneMKL:
# https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-macos/2024-0/obtaining-numerically-reproducible-results.html).
# So rows are written side by side only if each lane's rows are aligned like separate memory, and concatenated otherwise.

_ALIGNMENT = 256
"""Bytes: the largest alignment on which a matrix library's choice of kernel depends (cuBLASLt:
https://docs.nvidia.com/cuda/cublas/#cublasltmatmulpreferenceattributes-t; on a CPU it is a cache line).
"""


@dataclass(eq=False)
class WholeGradient:
    """Gradient of a matrix ``(rows, columns)`` in one micro-batch, in which each lane writes its rows."""

    parts: int
    """Number of lanes."""
    _memory: tuple[Tensor, ...] = ()
    _written: set[int] = field(default_factory=set)

    def part(self, lane: int, rows: Tensor) -> Tensor:
        """Return uninitialized memory, shaped as ``rows``, for the gradient of a lane's rows: its part of the full
        gradient's memory.

        A lane's second call before ``of_parts`` gets memory of its own, since the first may still be needed; so do rows
        whose bytes are no multiple of ``_ALIGNMENT``.
        """
        if lane in self._written or rows.numel() * rows.element_size() % _ALIGNMENT:
            return torch.empty_like(rows)
        if not self._memory:
            # (rows, columns) for each lane
            self._memory = rows.new_empty(self.parts * rows.shape[0], rows.shape[1]).chunk(self.parts)
        self._written.add(lane)
        return self._memory[lane]

    def of_parts(self, parts: Sequence[Tensor]) -> Tensor | None:
        """Return the full gradient if ``parts`` are in its memory; else ``None``. Releases the memory."""
        memory, self._memory, self._written = self._memory, (), set()
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
        return torch.mm(x.flatten(0, -2), rows.t()).view(*x.shape[:-1], -1)  # (..., outputs of the lane)

    @staticmethod
    def backward(ctx: _RowsContext, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients of the input and of the lane's rows; the latter is written into the full matrix's gradient."""
        x, rows = ctx.saved_tensors
        slope = upstream[0].flatten(0, -2)  # (tokens, outputs of the lane)
        # (outputs of the lane, inputs)
        own = torch.mm(slope.t(), x.flatten(0, -2), out=ctx.gradient.part(ctx.lane, rows))
        return torch.mm(slope, rows).view_as(x), own, None, None


@dataclass(eq=False)
class LaneRows:
    """``phalanx.model.layers.dense.Affine`` of a matrix of which each lane has some rows. The layer sets the current ``lane``."""

    lane: int = 0
    _gradient: WholeGradient | None = None

    def new_gradient(self, parts: int) -> WholeGradient:
        """Start a forward pass; return the gradient in which its lanes will write."""
        self._gradient = WholeGradient(parts)
        return self._gradient

    def __call__(self, x: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        """``(..., inputs)`` to ``(..., outputs of the lane)``."""
        if self._gradient is None or bias is not None:
            return F.linear(x, rows, bias)
        return apply_function(_RowsProduct, x, rows, self._gradient, self.lane)


class _ColumnProduct(torch.autograd.Function):
    """``x W^T`` for some columns of a wider matrix.

    The columns are copied before the product. So the choice of kernel does not depend on their stride, which grows with the rank's lanes.
    """

    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(x, columns)
        return torch.mm(x.flatten(0, -2), aligned(columns).t()).view(*x.shape[:-1], -1)  # (..., outputs)

    @staticmethod
    def backward(ctx: FunctionContext, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        x, columns = ctx.saved_tensors
        # (tokens, outputs), (tokens, inputs of the lane)
        gradient, rows = upstream[0].flatten(0, -2), x.flatten(0, -2)
        return torch.mm(gradient, aligned(columns)).view_as(x), torch.mm(gradient.t(), rows)


class LaneOutput(Linear):
    """Last matrix of a layer, of which a lane has some inputs. Its bias is added to the lanes' sum, not here."""

    def __init__(self, linear: Linear) -> None:
        """Take over the parameters of ``linear``."""
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias, self.product = linear.weight, linear.bias, linear.product

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
        ctx: _CutContext, tensor: Tensor, dim: int, parts: int, gradient: WholeGradient | None
    ) -> tuple[Tensor, ...]:
        """Cut ``tensor`` into ``parts`` along ``dim``. Parts along rows are aligned in memory. ``gradient`` is the
        memory of the full gradient, if the lanes write it.
        """
        ctx.dim, ctx.gradient = dim, gradient
        own = tensor.chunk(parts, dim)  # (..., n_dim / parts, ...) each
        # Rows are multiplied in place; columns are copied for each product.
        return own if dim else tuple(map(aligned, own))

    @staticmethod
    def backward(ctx: _CutContext, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = None if ctx.gradient is None else ctx.gradient.of_parts(upstream)
        # (..., n_dim, ...)
        return torch.cat(upstream, ctx.dim) if gradient is None else gradient, None, None, None


@dataclass(frozen=True)
class LaneParameter:
    """A parameter of a layer in lanes, of which this rank has the part for its own lanes."""

    owner: nn.Module
    attribute: str
    dim: int = 0
    parts: int = 1
    """Number of different parts along ``dim`` that this rank's lanes use; fewer than lanes if neighbors share a part."""
    shared: SharedParameter | None = None
    """Its shares: for each context tile, one for each lane with the same part. ``None`` without tiles if each lane has its own part.
    """
    tiles: int = 1
    """Number of context tiles on this rank; 1 if the run has none."""
    rows: LaneRows | None = None
    """Writes the lanes' rows of its gradient side by side; ``None`` if that is not possible."""

    def of_lanes(self) -> list[list[Tensor]]:
        """Return, for each lane, its tensor for each tile: parts of the parameter, or of the shares that several
        lanes or tiles have of it.
        """
        shares = (self.owner.get_parameter(self.attribute),) if self.shared is None else self.shared.now()
        sharers = len(shares) // self.tiles
        by_share = [
            (share,)
            if self.parts == 1
            else apply_function_of_many(
                _Cut,
                share,
                self.dim,
                self.parts,
                None if self.rows is None else self.rows.new_gradient(self.parts),
            )
            for share in shares
        ]
        return [
            [by_share[tile * sharers + sharer][part] for tile in range(self.tiles)]
            for part in range(self.parts)
            for sharer in range(sharers)
        ]


class LaneResult(Protocol):
    """Function that computes a layer's result for one lane."""

    def __call__(
        self,
        owners: Owners,
        tensors: Sequence[Sequence[Tensor]],
        inputs: tuple[Tensor, ...],
        *context: object,
    ) -> Tensor:
        """Return the lane's share ``(b, s, d)`` of the result, from ``inputs`` ``(b, s, ...)`` of all tokens of this context rank.

        ``tensors`` are the lane's for each context tile, in the order of ``owners``. ``context`` holds the layer's arguments that
        cover full sequences.
        """
        ...


@dataclass(frozen=True)
class OnWholeSequence:
    """``LaneResult`` of a sequence without context tiles."""

    by_heads: Callable[..., Tensor]

    def __call__(
        self,
        owners: Owners,
        tensors: Sequence[Sequence[Tensor]],
        inputs: tuple[Tensor, ...],
        *context: object,
    ) -> Tensor:
        """Return the lane's share ``(b, s, d)`` of the layer's result, with the lane's ``tensors`` in place of the
        parameters of ``owners``.
        """
        (own,) = tensors
        with in_place_of(owners, own):
            return self.by_heads(inputs, *context)


@dataclass(frozen=True)
class TileByTile:
    """``LaneResult`` of a token-wise layer for a sequence in context tiles."""

    by_heads: Callable[[tuple[Tensor, ...]], Tensor]

    def __call__(
        self,
        owners: Owners,
        tensors: Sequence[Sequence[Tensor]],
        inputs: tuple[Tensor, ...],
        *context: object,
    ) -> Tensor:
        """Return the lane's share ``(b, s, d)`` of the layer's result, computed tile by tile.

        The inputs ``(b, s, ...)`` are cut into ``len(tensors)`` tiles along s. Each is computed with its own entry of ``tensors`` in
        place of the parameters of ``owners``, and the results are concatenated. ``context`` must be empty.
        """
        assert not context, "a token-wise layer has no arguments of full sequences"
        results = []
        for own, tokens in zip(tensors, in_tiles(inputs, len(tensors)), strict=True):
            with in_place_of(owners, own):
                results.append(dense(self.by_heads(tokens)))
        return torch.cat(results, 1)  # (b, s, d)


def in_tiles(inputs: tuple[Tensor, ...], tiles: int) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors ``(b, s, ...)``, ordered by tile, into tiles; each is contiguous."""
    for parts in zip(*(x.chunk(tiles, 1) for x in inputs), strict=True):  # (b, s / tiles, ...) each
        yield tuple(map(dense, parts))


@dataclass(frozen=True)
class LanedLayer:
    """Replacement for the ``forward`` of a layer."""

    by_tokens: Callable[[Tensor], tuple[Tensor, ...]]
    """Token-wise computation of the inputs of all heads or inner elements: ``(b, s, ...)`` each."""
    result: LaneResult
    """Computes from these inputs and the context a lane's share ``(b, s, d)`` of the result."""
    parameters: Sequence[LaneParameter]
    lanes: int
    """Number of lanes on this rank."""
    comm: SequenceComm | None
    """Collectives over the ranks with the other lanes."""
    add_bias: InPieces | None
    """Adds the bias of the result; ``None`` if there is none."""

    def __call__(self, x: Tensor, *context: object) -> Tensor:
        """Apply the layer to ``x`` ``(b, s / ranks, d)``: gather its inputs, add the lanes' results in a tree,
        scatter the sum, and add the bias. The result has the shape of ``x``. ``context`` has the layer's arguments
        that cover full sequences.
        """
        inputs = self.by_tokens(x)
        if self.comm is not None:  # one gather for all inputs
            # (b, s / ranks, sum of the widths)
            packed = inputs[0] if len(inputs) == 1 else torch.cat(inputs, -1)
            inputs = torch.split(
                self.comm.gather(packed), [part.shape[-1] for part in inputs], -1
            )  # (b, s, ...) each
        total = dense(add_in_tree(self._results(tuple(map(dense, inputs)), context)))  # (b, s, d)
        y = total if self.comm is None else self.comm.sum_scatter(total)  # (b, s / ranks, d)
        return y if self.add_bias is None else self.add_bias(y)

    def _results(self, inputs: tuple[Tensor, ...], context: tuple[object, ...]) -> Iterator[Tensor]:
        """Yield each lane's result in turn, computed with its own parts of the parameters."""
        owners = [(parameter.owner, parameter.attribute) for parameter in self.parameters]
        by_lane = zip(*(parameter.of_lanes() for parameter in self.parameters), strict=True)
        lane_inputs = zip(*(forked(x, self.lanes) for x in inputs), strict=True)
        for lane, (of_lane, inputs_of_lane) in enumerate(zip(by_lane, lane_inputs, strict=True)):
            for parameter in self.parameters:
                if parameter.rows is not None:
                    parameter.rows.lane = lane
            by_tile = list(zip(*of_lane, strict=True))
            yield self.result(owners, by_tile, inputs_of_lane, *context)
