"""An attention layer over context tiles: projections and result of each tile by itself, and in between all tiles' keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.model.layers.attention.attention import Attention, Cache, Documents
from phalanx.model.layers.attention.mla import MlaAttention
from phalanx.parallel.context.fixed.core import TiledCore
from phalanx.parallel.tensor.lanes.layers import in_tiles
from phalanx.parallel.tensor.lanes.shares import Owners, SharedParameter, in_place_of
from phalanx.parallel.tensor.tree_sums import dense


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
