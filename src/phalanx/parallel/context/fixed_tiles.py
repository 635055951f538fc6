"""Attention in context tiles: a tile's computation and its order of summation depend on the tile's number alone.

A tile's queries attend, in this order, to the keys before their head piece, those of the head piece, those before the tail piece,
and those of the tail piece. These are the four blocks of scores of a rank of ``phalanx.parallel.context.exchange`` if there were as
many ranks as tiles. So results and query gradients need no sum over tiles. Gradients of keys and values are summed over tiles in
tree order: first on a rank, then over the ranks, each of which receives those of its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.hardware.local.device import CommClock
from phalanx.model.autograd import FunctionContext, apply_function_of_many, uncompiled
from phalanx.model.layers.attention.attend import Score, sink_gradient, with_sinks
from phalanx.model.layers.attention.attention import Attention, Cache, Documents
from phalanx.model.layers.attention.mla import MlaAttention
from phalanx.parallel.context.exchange import head_tail_mask_rule, pack, tiles, unpack
from phalanx.parallel.context.tiles import MaskRule, SavedAttention, Tile, attend_tiles, differentiate_tiles
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.tensor.lanes.layers import in_tiles
from phalanx.parallel.tensor.lanes.shares import Owners, SharedParameter, in_place_of
from phalanx.parallel.tensor.sequence_comm import SequenceComm, add_in_tree, dense, sum_in_tree
from phalanx.parallel.torch_compat import exchange_along, gather_along
from phalanx.run.spec import RunSpec

# Context tiles: their tokens, their order, and sums over the tiles of all ranks that share a sequence.
#
# The sequence is cut into ``2 t`` equal pieces. Tile ``k`` of ``t`` is piece ``k`` from the head and piece ``2 t - 1 - k`` from
# the tail. So all tiles have the same area of scores under a causal mask (``phalanx.parallel.context.exchange``). For every
# context degree ``c``, rank ``r`` has the ``t / c`` consecutive tiles from ``r t / c`` on, which are the leaves of a subtree.
# It keeps its tokens in the order of tiles.


def tiled_positions(seq_len: int, tiles: int, context: int, rank: int) -> Tensor:
    """Return the token positions of rank ``rank`` of ``context``, by tile: ``(seq_len / context,)``, int64."""
    return by_tile(torch.arange(seq_len), tiles, dim=0).chunk(context)[rank]  # (seq_len / context,)


def by_tile(sequence: Tensor, tiles: int, dim: int) -> Tensor:
    """Reorder dimension ``dim``, which spans the full sequence, from the order of positions to the order of tiles."""
    pieces = sequence.chunk(2 * tiles, dim)  # (..., s / (2 tiles), ...) each
    return torch.cat([pieces[at] for tile in range(tiles) for at in (tile, -1 - tile)], dim)  # (..., s, ...)


def by_position(tiled: Tensor, tiles: int, dim: int) -> Tensor:
    """Inverse of ``by_tile``."""
    pieces = tiled.chunk(2 * tiles, dim)  # (..., s / (2 tiles), ...) each
    return torch.cat((*pieces[0::2], *reversed(pieces[1::2])), dim)  # (..., s, ...)


@dataclass(frozen=True)
class RankTiles:
    """The context tiles of a rank: ``tile_numbers``, consecutive, out of ``count``."""

    count: int
    """Number of tiles of the full sequence."""
    ranks: int
    """Number of ranks that share the sequence."""
    rank: int
    """Number of this rank among them."""
    comm: SequenceComm
    """Collectives over these ranks, adding in tree order; not used if there is one rank."""

    @property
    def tile_numbers(self) -> range:
        """The numbers of this rank's tiles."""
        per_rank = self.count // self.ranks
        return range(self.rank * per_rank, (self.rank + 1) * per_rank)

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors."""
        return tensor if self.ranks == 1 else self.comm.total(tensor)

    def share_of_total(self, sums: Sequence[Tensor]) -> Sequence[Tensor]:
        """Sum ``sums`` over the ranks in tree order. Return the totals in the elements that this rank reports, and
        zeros elsewhere. A collective; one rank gets ``sums`` back.

        Each rank reports an equal part of every tensor, always the same part of the same parameter. So the reports of
        all ranks add up to the exact sum, also after the reports of several micro-batches are added. The zeros are
        negative, because adding a positive one would turn a negative zero into a positive one.
        """
        if self.ranks == 1:
            return sums
        # Row r has the elements that rank r reports: (ranks, elements / ranks) for each tensor.
        rows = [self._by_reporter(part) for part in sums]
        with self.comm.waiting():
            received = exchange_along(torch.cat(rows, 1), 0, self.comm.group)  # (ranks, 1, elements)
        # (elements / ranks,) for each tensor
        totals = torch.split(sum_in_tree(received)[0], [row.shape[1] for row in rows])
        reports = []
        for row, total, like in zip(rows, totals, sums, strict=True):
            report = torch.full_like(row, -0.0)
            report[self.rank] = total
            reports.append(report.flatten()[: like.numel()].view_as(like))  # (...), as `like`
        return reports

    def _by_reporter(self, tensor: Tensor) -> Tensor:
        """Return a tensor as one row for each rank, padded with zeros."""
        flat = tensor.flatten()  # (elements,)
        return F.pad(flat, (0, -len(flat) % self.ranks)).view(self.ranks, -1)  # (ranks, elements / ranks)


def rank_tiles(spec: RunSpec, mesh: Mesh, clock: CommClock) -> RankTiles | None:
    """Return the context tiles of this rank; ``None`` without ``model.context_tiles``."""
    if not spec.model.context_tiles:
        return None
    comm = SequenceComm(mesh.context_group, clock, "tree")
    return RankTiles(spec.model.context_tiles, mesh.layout.context, mesh.context_rank, comm)


class _TiledContext(FunctionContext, Protocol):
    core: TiledCore


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _TiledContext, core: TiledCore, documents: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Attend tile by tile over the gathered keys and values; save inputs, results and log-sum-exps for backward."""
        queries, keys, values, sinks = _split(tensors, len(core.ranks.tile_numbers))
        full_keys_values = core.gather(keys, values)
        results = [
            core.attend(*tile, *full_keys_values, documents)
            for tile in zip(core.ranks.tile_numbers, queries, sinks, strict=True)
        ]
        outs = tuple(out.to(queries[0].dtype) for out, _ in results)  # per tile: (b, h, s, v)
        ctx.save_for_backward(documents, *tensors, *outs, *(lse for _, lse in results))
        ctx.core = core
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: _TiledContext, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Gather keys and values again, and return the gradients of each tile's tensors, those of keys and values
        summed in a tree.
        """
        core, (documents, *tensors) = ctx.core, ctx.saved_tensors
        count = len(core.ranks.tile_numbers)
        queries, keys, values, sinks = _split(tensors[: 4 * count], count)
        outs, lses = tensors[4 * count : 5 * count], tensors[5 * count :]
        full_keys_values = core.gather(keys, values)
        grad_queries: list[Tensor] = []
        grad_sinks: list[Tensor | None] = []

        def key_value_gradients() -> Iterator[Tensor]:
            """Yield each tile's gradients of keys and values, packed; those of queries and sinks are appended to the lists around."""
            for at, tile in enumerate(core.ranks.tile_numbers):
                saved, gradient = SavedAttention(queries[at], outs[at], lses[at]), upstream[at].contiguous()
                grad_query, *others = core.differentiate(tile, saved, gradient, *full_keys_values, documents)
                grad_queries.append(grad_query.to(queries[at].dtype))
                grad_sinks.append(sink_gradient(gradient, outs[at], lses[at], sinks[at]))
                yield pack(*others)

        total = unpack(
            add_in_tree(key_value_gradients(), Tensor.add_),
            full_keys_values[0].shape,
            full_keys_values[1].shape,
        )
        # (b, k, s of a tile, .) for each tile
        grad_keys, grad_values = (
            tuple(part.to(keys[0].dtype) for part in own.chunk(count, dim=2)) for own in core.scatter(*total)
        )
        return None, None, *grad_queries, *grad_keys, *grad_values, *grad_sinks


def _split(
    tensors: Sequence[Tensor | None], count: int
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None]]:
    """Split the arguments of the autograd function into queries, keys, values, and sinks (each possibly ``None``),
    with ``count`` of each.
    """
    dense = [tensor for tensor in tensors[: 3 * count] if tensor is not None]
    return dense[:count], dense[count : 2 * count], dense[2 * count :], tensors[3 * count :]


@dataclass(frozen=True)
class TiledCore:
    """Replacement for ``phalanx.model.layers.attention.attention.CausalCore`` on ranks that have some of a sequence's tiles."""

    ranks: RankTiles
    score: Score
    window: int = 0

    @uncompiled
    def __call__(
        self,
        queries: Sequence[Tensor],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        documents: Documents | None,
        sinks: Sequence[Tensor | None],
    ) -> tuple[Tensor, ...]:
        """Return the attention results ``(b, h, s, v)`` of this rank's tiles. A collective of the ranks that share the sequence.

        Args:
            queries, keys, values: For each tile of this rank: ``(b, h, s, e)``, ``(b, k, s, e)`` and ``(b, k, s, v)``.
            documents: The documents of the full sequence, or ``None``.
            sinks: For each tile, the sinks ``(h,)`` or ``None``.
        """
        ids = documents.ids if documents is not None else None
        return apply_function_of_many(_TiledAttention, self, ids, *queries, *keys, *values, *sinks)

    def attend(
        self,
        tile: int,
        query: Tensor,
        sinks: Tensor | None,
        keys: Tensor,
        values: Tensor,
        documents: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return a tile's result ``(b, h, s, v)`` with its sinks and log-sum-exp ``(b, h, s)``, fp32. ``keys`` and
        ``values`` span the full sequence; hidden blocks are skipped.
        """
        blocks, rule = self._blocks(tile, query.shape[2], documents)
        return with_sinks(*attend_tiles(blocks, query, keys, values, rule, self.score), sinks)

    def differentiate(
        self,
        tile: int,
        saved: SavedAttention,
        gradient: Tensor,
        keys: Tensor,
        values: Tensor,
        documents: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of a tile's queries, and its shares in those of the full sequence's keys and values; fp32."""
        blocks, rule = self._blocks(tile, gradient.shape[2], documents)
        return differentiate_tiles(blocks, saved, gradient, keys, values, rule, self.score)

    def _blocks(self, tile: int, seq: int, documents: Tensor | None) -> tuple[Iterator[Tile], MaskRule]:
        """Return the score blocks of a tile's ``seq`` queries, in the order of summation, and their mask rule."""
        count = self.ranks.count
        blocks = tiles(tile, count, seq, self.window)
        return blocks, head_tail_mask_rule(tile, count, seq, self.window, documents)

    def gather(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values of the full sequence, in its order; ``keys`` and ``values`` are those of this rank's
        tiles. A collective of the context group.
        """
        own = torch.cat(list(keys), dim=2), torch.cat(list(values), dim=2)  # (b, k, s of this rank, .) each
        if self.ranks.ranks == 1:
            parts = [own]
        else:
            with self.ranks.comm.waiting():
                gathered = gather_along(pack(*own), 0, self.ranks.comm.group)
            # (b, k, s of a rank, .) for each rank, keys and values
            parts = [unpack(part, own[0].shape, own[1].shape) for part in gathered.chunk(self.ranks.ranks)]
        # (b, k, full s, .), by tile
        key, value = (torch.cat(tensors, dim=2) for tensors in zip(*parts, strict=True))
        return by_position(key, self.ranks.count, dim=2), by_position(value, self.ranks.count, dim=2)

    def scatter(self, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor, Tensor]:
        """Sum the gradients of the full sequence's keys and values over all ranks; return those of this rank's tokens,
        by tile. A collective of the context group.
        """
        ranks = self.ranks.ranks
        # (b, k, s of a rank, .) for each rank, of keys and of values
        tiled = [by_tile(grad, self.ranks.count, dim=2).chunk(ranks, 2) for grad in (grad_key, grad_value)]
        own = [parts[self.ranks.rank] for parts in tiled]
        if ranks == 1:
            return own[0], own[1]
        # (ranks, one rank's elements), flat
        sent = torch.cat([pack(*parts) for parts in zip(*tiled, strict=True)])
        with self.ranks.comm.waiting():
            received = exchange_along(sent, 0, self.ranks.comm.group)  # (ranks, one rank's elements)
        return unpack(sum_in_tree(received), own[0].shape, own[1].shape)


# An attention layer over context tiles: projections and results are computed per tile; attention reads keys and values of all tiles.


@dataclass(frozen=True)
class TiledAttention:
    """Replacement for the ``forward`` of an attention layer."""

    layer: Attention | MlaAttention
    parameters: Sequence[SharedParameter]
    """All parameters of the layer, with one share for each tile."""
    core: TiledCore

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Apply the layer to this rank's tokens, by tile: ``(b, s, d)`` to the same. ``documents`` cover the full
        sequence; a ``cache`` is not allowed. A collective.
        """
        assert cache is None, "a cache holds a sequence that begins with its first token"
        owners = [(parameter.owner, parameter.attribute) for parameter in self.parameters]
        shares = list(zip(*(parameter.now() for parameter in self.parameters), strict=True))
        inputs = []
        for own, hidden in zip(shares, x.chunk(len(shares), 1), strict=True):  # hidden: (b, s of a tile, d)
            with in_place_of(owners, own):
                inputs.append(self.layer.by_tokens(dense(hidden)))
        return _attended(self.layer, self.core, owners, shares, inputs, (cos, sin), documents)


@dataclass(frozen=True)
class TiledHeads:
    """``LaneResult`` of an attention layer for a sequence in context tiles."""

    layer: Attention | MlaAttention
    core: TiledCore

    def __call__(
        self,
        owners: Owners,
        tensors: Sequence[Sequence[Tensor]],
        inputs: tuple[Tensor, ...],
        *context: object,
    ) -> Tensor:
        """Return the lane's share ``(b, s, d)`` of attention's result
        (``phalanx.parallel.tensor.lanes.layers.LaneResult``), over all tiles; ``context`` holds the further arguments
        of ``Attention.forward``.
        """
        cos, sin, documents, cache = context
        assert isinstance(cos, Tensor), "positions are known"
        assert isinstance(sin, Tensor), "positions are known"
        assert documents is None or isinstance(documents, Documents), "documents of full sequences"
        assert cache is None, "a cache holds a sequence that begins with its first token"
        by_tile = list(in_tiles(inputs, len(tensors)))
        return _attended(self.layer, self.core, owners, tensors, by_tile, (cos, sin), documents)


def _attended(
    layer: Attention | MlaAttention,
    core: TiledCore,
    owners: Owners,
    tensors: Sequence[Sequence[Tensor]],
    inputs: Sequence[tuple[Tensor, ...]],
    rotation: tuple[Tensor, Tensor],
    documents: Documents | None,
) -> Tensor:
    """Return the result ``(b, s, d)`` of the heads whose weights ``tensors`` holds for each tile; ``inputs`` are by
    tile. While a tile is computed, its tensors replace the parameters ``owners``.
    """
    projected, sinks = [], []
    # (s of a tile, rotated elements) for each tile
    cos, sin = (table.chunk(len(tensors)) for table in rotation)
    for own, tokens, cos_here, sin_here in zip(tensors, inputs, cos, sin, strict=True):
        with in_place_of(owners, own):
            qkv = layer.projected(tokens, dense(cos_here), dense(sin_here))
            projected.append([dense(part) for part in qkv])
            sinks.append(layer.sinks)
    queries, keys, values = zip(*projected, strict=True)
    results = []
    for own, mixed in zip(tensors, core(queries, keys, values, documents, sinks), strict=True):
        with in_place_of(owners, own):
            results.append(dense(layer.result(mixed)))
    return torch.cat(results, 1)  # (b, s, d)
