"""Attention in context tiles: what a tile computes, and in which order it is added, depends on its number alone.

A tile's queries meet the keys before their head piece, those of the head piece itself, those before the tail piece and those of the
tail piece, in this order: the four blocks of scores of a rank of ``phalanx.parallel.context.exchange``, if there were as many
ranks as tiles. So results and gradients of queries need no sum over tiles. The gradient of the keys and values is the tiles'
sum, in tree order: on a rank first, and then over the ranks, each of which gets its own tokens'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.model.autograd import FunctionContext, apply_function_of_many, uncompiled
from phalanx.model.layers.attention.attend import Score, sink_gradient, with_sinks
from phalanx.model.layers.attention.attention import Attention, Cache, Documents
from phalanx.model.layers.attention.mla import MlaAttention
from phalanx.parallel.context.exchange import head_tail_sight, pack, tiles, unpack
from phalanx.parallel.context.rank_tiles import RankTiles, by_position, by_tile
from phalanx.parallel.context.tiles import SavedAttention, Sight, Tile, attend_tiles, differentiate_tiles
from phalanx.parallel.mesh.torch_compat import exchange_along, gather_along
from phalanx.parallel.tensor.lanes.layers import in_tiles
from phalanx.parallel.tensor.lanes.shares import Owners, SharedParameter, in_place_of
from phalanx.parallel.tensor.sequence_comm import add_in_tree, dense, sum_in_tree


class _TiledContext(FunctionContext, Protocol):
    core: TiledCore


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _TiledContext, core: TiledCore, documents: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        queries, keys, values, sinks = _split(tensors, len(core.ranks.here))
        whole = core.gather(keys, values)
        found = [
            core.attend(*each, *whole, documents)
            for each in zip(core.ranks.here, queries, sinks, strict=True)
        ]
        outs = tuple(out.to(queries[0].dtype) for out, _ in found)
        ctx.save_for_backward(documents, *tensors, *outs, *(lse for _, lse in found))
        ctx.core = core
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: _TiledContext, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        core, (documents, *tensors) = ctx.core, ctx.saved_tensors
        count = len(core.ranks.here)
        queries, keys, values, sinks = _split(tensors[: 4 * count], count)
        outs, lses = tensors[4 * count : 5 * count], tensors[5 * count :]
        whole = core.gather(keys, values)
        grad_queries: list[Tensor] = []
        grad_sinks: list[Tensor | None] = []

        def of_keys_and_values() -> Iterator[Tensor]:
            for at, tile in enumerate(core.ranks.here):
                saved, gradient = SavedAttention(queries[at], outs[at], lses[at]), upstream[at].contiguous()
                grad_query, *others = core.differentiate(tile, saved, gradient, *whole, documents)
                grad_queries.append(grad_query.to(queries[at].dtype))
                grad_sinks.append(sink_gradient(gradient, outs[at], lses[at], sinks[at]))
                yield pack(*others)

        total = unpack(add_in_tree(of_keys_and_values(), Tensor.add_), whole[0].shape, whole[1].shape)
        grad_keys, grad_values = (
            tuple(part.to(keys[0].dtype) for part in own.chunk(count, dim=2)) for own in core.scatter(*total)
        )
        return None, None, *grad_queries, *grad_keys, *grad_values, *grad_sinks


def _split(
    tensors: Sequence[Tensor | None], count: int
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None]]:
    """Splits a function's tensors into the queries, keys, values, and sinks (or ``None``) of ``count`` tiles each."""
    dense = [tensor for tensor in tensors[: 3 * count] if tensor is not None]
    return dense[:count], dense[count : 2 * count], dense[2 * count :], tensors[3 * count :]


@dataclass(frozen=True)
class TiledCore:
    """Takes the place of ``phalanx.model.layers.attention.attention.CausalCore`` on ranks that hold some of a sequence's tiles."""

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
        """The results ``(b, h, s, v)`` of this rank's tiles. On all ranks that share the sequence together.

        Args:
            queries, keys, values: Of each of these tiles, ``(b, h, s, e)``, ``(b, k, s, e)`` and ``(b, k, s, v)``.
            documents: The documents of the whole sequence, or ``None``.
            sinks: The sinks ``(h,)`` that each tile sees, or ``None``.
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
        """Results and log-sum-exp of a tile, fp32; ``keys`` and ``values`` are the whole sequence's."""
        blocks, sight = self._seen(tile, query.shape[2], documents)
        return with_sinks(*attend_tiles(blocks, query, keys, values, sight, self.score), sinks)

    def differentiate(
        self,
        tile: int,
        saved: SavedAttention,
        gradient: Tensor,
        keys: Tensor,
        values: Tensor,
        documents: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of a tile's queries, and its share of those of the whole sequence's keys and values; fp32."""
        blocks, sight = self._seen(tile, gradient.shape[2], documents)
        return differentiate_tiles(blocks, saved, gradient, keys, values, sight, self.score)

    def _seen(self, tile: int, seq: int, documents: Tensor | None) -> tuple[Iterator[Tile], Sight]:
        """The blocks of scores of a tile's ``seq`` queries, in the order in which they are added, and the rule of what is hidden."""
        count = self.ranks.count
        blocks = tiles(tile, count, seq, self.window)
        return blocks, head_tail_sight(tile, count, seq, self.window, documents)

    def gather(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole sequence, in its order, from those of this rank's tiles."""
        own = torch.cat(list(keys), dim=2), torch.cat(list(values), dim=2)
        if self.ranks.ranks == 1:
            parts = [own]
        else:
            with self.ranks.comm.waiting():
                gathered = gather_along(pack(*own), 0, self.ranks.comm.group)
            parts = [unpack(part, own[0].shape, own[1].shape) for part in gathered.chunk(self.ranks.ranks)]
        key, value = (torch.cat(held, dim=2) for held in zip(*parts, strict=True))
        return by_position(key, self.ranks.count, dim=2), by_position(value, self.ranks.count, dim=2)

    def scatter(self, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's tokens', by tile, of the sum over all ranks of the whole sequence's gradients."""
        ranks = self.ranks.ranks
        tiled = [by_tile(whole, self.ranks.count, dim=2).chunk(ranks, 2) for whole in (grad_key, grad_value)]
        own = [parts[self.ranks.rank] for parts in tiled]
        if ranks == 1:
            return own[0], own[1]
        sent = torch.cat([pack(*parts) for parts in zip(*tiled, strict=True)])
        with self.ranks.comm.waiting():
            received = exchange_along(sent, 0, self.ranks.comm.group)  # (ranks, one rank's elements)
        return unpack(sum_in_tree(received), own[0].shape, own[1].shape)


# An attention layer over context tiles: projections and result of each tile by itself, in between the keys and values of all tiles.


@dataclass(frozen=True)
class TiledAttention:
    """Replacement for the ``forward`` of an attention layer."""

    layer: Attention | MlaAttention
    parameters: Sequence[SharedParameter]
    """All parameters of the layer, with a share for each tile."""
    core: TiledCore

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """``(b, s, d)`` to the same, for this rank's tokens by tile; ``documents`` are the whole sequence's."""
        assert cache is None, "a cache holds a sequence that begins with its first token"
        owners = [(parameter.owner, parameter.attribute) for parameter in self.parameters]
        shares = list(zip(*(parameter.now() for parameter in self.parameters), strict=True))
        inputs = []
        for own, hidden in zip(shares, x.chunk(len(shares), 1), strict=True):
            with in_place_of(owners, own):
                inputs.append(self.layer.by_tokens(dense(hidden)))
        return _attended(self.layer, self.core, owners, shares, inputs, (cos, sin), documents)


@dataclass(frozen=True)
class TiledHeads:
    """The ``LaneResult`` of an attention layer, for a sequence in context tiles."""

    layer: Attention | MlaAttention
    core: TiledCore

    def __call__(
        self,
        owners: Owners,
        tensors: Sequence[Sequence[Tensor]],
        inputs: tuple[Tensor, ...],
        *context: object,
    ) -> Tensor:
        """See ``phalanx.parallel.tensor.lanes.layers.LaneResult``; the context is that of ``Attention.forward``."""
        cos, sin, documents, cache = context
        assert isinstance(cos, Tensor), "positions are known"
        assert isinstance(sin, Tensor), "positions are known"
        assert documents is None or isinstance(documents, Documents), "of whole sequences"
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
    """The result ``(b, s, d)`` of the heads whose weights ``tensors`` has for each tile, from each tile's ``inputs``."""
    projected, sinks = [], []
    cos, sin = (table.chunk(len(tensors)) for table in rotation)
    for own, read, cos_here, sin_here in zip(tensors, inputs, cos, sin, strict=True):
        with in_place_of(owners, own):
            made = layer.projected(read, dense(cos_here), dense(sin_here))
            projected.append([dense(part) for part in made])
            sinks.append(layer.sinks)
    queries, keys, values = zip(*projected, strict=True)
    results = []
    for own, mixed in zip(tensors, core(queries, keys, values, documents, sinks), strict=True):
        with in_place_of(owners, own):
            results.append(dense(layer.result(mixed)))
    return torch.cat(results, 1)
