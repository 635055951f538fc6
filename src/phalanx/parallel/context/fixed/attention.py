"""An attention layer over context tiles: projections and result of each tile by itself, and in between all tiles' keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.model.layers.attention import Attention
from phalanx.model.layers.cache import LayerCache
from phalanx.model.layers.mla import MlaAttention
from phalanx.parallel.context.fixed.core import TiledCore
from phalanx.parallel.tensor.lanes.shares import SharedParameter, in_place_of
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
        documents: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """``(b, s, d)`` to the same, for this rank's tokens by tile; ``documents`` are the whole sequence's."""
        assert cache is None, "a cache holds a sequence that begins with its first token"
        count, layer = len(self.core.ranks.here), self.layer
        owners = [(parameter.owner, parameter.attribute) for parameter in self.parameters]
        shares = list(zip(*(parameter.now() for parameter in self.parameters), strict=True))
        projected, sinks = [], []
        pieces = zip(shares, x.chunk(count, 1), cos.chunk(count), sin.chunk(count), strict=True)
        for own, hidden, cos_here, sin_here in pieces:
            with in_place_of(owners, own):
                made = layer.projected(layer.by_tokens(dense(hidden)), dense(cos_here), dense(sin_here))
                projected.append([dense(part) for part in made])
                sinks.append(layer.sinks)
        queries, keys, values = zip(*projected, strict=True)
        results = []
        for own, mixed in zip(shares, self.core(queries, keys, values, documents, sinks), strict=True):
            with in_place_of(owners, own):
                results.append(dense(layer.result(mixed)))
        return torch.cat(results, 1)
