"""Causal self-attention with grouped key/value heads (arXiv 2305.13245).

The projections and the mixing are apart: ``Attention`` makes queries, keys and values, and hands them to its ``core``,
which whoever divides the sequence or the heads over ranks replaces. How many heads there are is read off the weights, so a
module that holds the rows of fewer heads works as it is.

Shapes: ``b`` batch, ``s`` sequence, ``d`` model width, ``h`` query heads, ``k`` key/value heads, ``e`` head width, ``v``
width of a value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.layers.cache import LayerCache
from phalanx.model.layers.linear import Linear
from phalanx.model.layers.norm import RMSNorm
from phalanx.model.layers.rotary import rotate
from phalanx.run.spec import ModelSpec

Core = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Query ``(b, h, s, e)``, key ``(b, k, s, e)``, value ``(b, k, s, v)`` and documents ``(b, s)`` to ``(b, h, s, v)``."""


class CausalCore:
    """Softmax attention in which a token sees itself and what came before it, within its document."""

    def __init__(self, scale: float | None = None) -> None:
        self.scale = scale
        """The factor of the scores; ``None`` is ``1 / sqrt(e)``."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None) -> Tensor:
        """See ``Core``. With more keys than queries, the queries are the last of the sequence."""
        grouped = key.shape[1] != query.shape[1]
        new, held = query.shape[2], key.shape[2]
        if documents is None and new == held:
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self.scale, enable_gqa=grouped
            )
        # A continuation of n tokens after c cached ones: query i sees keys up to c + i.
        mask = torch.ones(new, held, dtype=torch.bool, device=query.device).tril(held - new)
        if documents is not None:
            mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=self.scale, enable_gqa=grouped
        )


class Attention(nn.Module):
    """Attention in which groups of query heads share a key/value head."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        bias = spec.attention_bias or spec.qkv_bias
        self.query = Linear(spec.dim, queries, bias=bias)
        self.key = Linear(spec.dim, keys, bias=bias)
        self.value = Linear(spec.dim, keys, bias=bias)
        self.output = Linear(queries, spec.dim, bias=spec.attention_bias)
        self.query_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.key_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.core: Core = CausalCore()

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """``(b, s, d)`` to ``(b, s, d)``; with a cache, ``x`` is the continuation of what the cache holds."""
        query = self.query(x).unflatten(-1, (-1, self.head_dim))
        key = self.key(x).unflatten(-1, (-1, self.head_dim))
        value = self.value(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query = rotate(query.transpose(1, 2), cos, sin)  # (b, h, s, e)
        key = rotate(key.transpose(1, 2), cos, sin)  # (b, k, s, e)
        if cache is not None:
            key, value = cache.append(key, value)
        mixed = self.core(query, key, value, documents)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output
