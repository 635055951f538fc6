"""Causal self-attention with grouped key/value heads (arXiv 2305.13245).

The projections and the mixing are apart: ``Attention`` makes queries, keys and values, and hands them to its ``core``,
which whoever divides the sequence or the heads over ranks replaces. How many heads there are is read off the weights, so a
module that holds the rows of fewer heads works as it is.

Shapes: ``b`` batch, ``s`` sequence, ``d`` model width, ``h`` query heads, ``k`` key/value heads, ``e`` head width, ``v``
width of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.layers.attention.attend import attend_whole_rows
from phalanx.model.layers.attention.cache import Cache
from phalanx.model.layers.attention.documents import Documents, attend_by_document
from phalanx.model.layers.attention.rotary import rotate
from phalanx.model.layers.attention.soft_cap import Score
from phalanx.model.layers.linear import Linear
from phalanx.model.layers.norm import RMSNorm
from phalanx.run.kinds.grouped_attention import attention_of, window_of
from phalanx.run.spec import ModelSpec


class Core(Protocol):
    """The mixing of values."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Query ``(b, h, s, e)``, key ``(b, k, s, e)``, value ``(b, k, s, v)``, their documents and the heads' sinks ``(h,)``
        to ``(b, h, s, v)``."""
        ...


Softmax = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attention of queries ``(b, h, q, e)`` to keys and values ``(b, k, n, .)`` of which they see those that a mask ``(q, n)`` or
``(b, 1, q, n)`` says; without a mask each sees those up to its own place."""


class CausalCore:
    """Softmax attention in which a token sees itself and what came before it, within its document and its window."""

    def __init__(self, scale: float | None = None, window: int = 0, cap: float = 0.0) -> None:
        self.score = Score(scale, cap)
        self.window = window
        """Tokens that a token sees, itself among them; 0 is no limit."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See ``Core``. With more keys than queries, the queries are the last of the sequence, which is one document then."""
        softmax = self.softmax(sinks)

        def whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if 0 < self.window < key.shape[2]:
                return windowed_attention(query, key, value, self.window, softmax)
            return softmax(query, key, value, None)

        new, held = query.shape[2], key.shape[2]
        if documents is not None:
            return attend_by_document(query, key, value, documents, whole)
        if new == held:
            return whole(query, key, value)
        # A continuation of n tokens after c cached ones: query i sees keys up to c + i.
        mask = torch.ones(new, held, dtype=torch.bool, device=query.device).tril(held - new)
        if self.window:
            mask = mask.triu(held - new - self.window + 1)
        return softmax(query, key, value, mask)

    def softmax(self, sinks: Tensor | None, *, causal: bool = True) -> Softmax:
        """PyTorch's own, unless there is a cap or a sink, which it does not know. Without a mask, and not ``causal``, each query sees all keys."""
        score = self.score

        def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            grouped = key.shape[1] != query.shape[1]
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=causal and mask is None,
                scale=score.scale,
                enable_gqa=grouped,
            )

        def with_denominators(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return attend_whole_rows(
                query, key, value, sinks, score, causal=causal and mask is None, seen=mask
            )

        return plain if sinks is None and not score.cap else with_denominators


def windowed_attention(query: Tensor, key: Tensor, value: Tensor, window: int, softmax: Softmax) -> Tensor:
    """Causal attention in which a token sees the last ``window`` tokens alone, fewer than the sequence has; shapes as ``Core``.

    The sequence is cut into blocks of ``window`` queries. The first sees its own keys; each other sees its own and those of
    the block before, as an entry of the batch of its own, so that the work is the band's and not the square's
    (block-local attention, as in Longformer, arXiv 2004.05150, section 3.1).
    """
    batch, _, seq, _ = query.shape
    first = softmax(query[:, :, :window], key[:, :, :window], value[:, :, :window], None)
    # Queries behind the end see themselves, and are cut off again.
    queries = _blocks(query, window)[:, :, 1:].transpose(1, 2).flatten(0, 1)  # (b blocks, h, window, e)
    # (b blocks, k, 2 window, .)
    keys, values = (
        torch.cat((x[:, :, :-1], x[:, :, 1:]), dim=3).transpose(1, 2).flatten(0, 1)
        for x in (_blocks(key, window), _blocks(value, window))
    )
    # Row i is key window + i of its pair: it sees keys i + 1 to window + i.
    mask = torch.ones(window, 2 * window, dtype=torch.bool, device=query.device).tril(window).triu(1)
    rest = softmax(queries, keys, values, mask)
    rest = rest.view(batch, -1, *rest.shape[1:]).transpose(1, 2).flatten(2, 3)
    return torch.cat((first, rest), dim=2)[:, :, :seq]


def _blocks(x: Tensor, window: int) -> Tensor:
    """``(b, heads, s, width)``, filled up with zeros, as ``(b, heads, blocks, window, width)``."""
    filled = F.pad(x, (0, 0, 0, -x.shape[2] % window))
    return filled.reshape(*x.shape[:2], -1, window, x.shape[-1])


class Attention(nn.Module):
    """Attention in which groups of query heads share a key/value head."""

    OUTPUT: ClassVar[str] = "output"
    """The last matrix, whose inputs are divided where ranks or lanes divide the layer."""
    BY_TOKENS: ClassVar[tuple[str, ...]] = ()
    """The modules that ``by_tokens`` computes with."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        """Builds that of layer ``layer``, from 0, of a resolved ``spec``."""
        super().__init__()
        self.head_dim = spec.head_dim
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        bias = spec.attention_bias or spec.qkv_bias
        self.query = Linear(spec.dim, queries, bias=bias)
        self.key = Linear(spec.dim, keys, bias=bias)
        self.value = Linear(spec.dim, keys, bias=bias)
        self.output = Linear(queries, spec.dim, bias=spec.attention_bias)
        self.normalizes_heads = spec.qk_norm_width == "head"
        widths = (spec.head_dim, spec.head_dim) if self.normalizes_heads else (queries, keys)
        self.query_norm = RMSNorm(widths[0], spec.norm_eps, offset=spec.norm_offset) if spec.qk_norm else None
        self.key_norm = RMSNorm(widths[1], spec.norm_eps, offset=spec.norm_offset) if spec.qk_norm else None
        self.rotated = attention_of(spec, layer) != "no-position"
        self.sinks = nn.Parameter(torch.empty(spec.heads)) if spec.sinks else None
        scale = spec.score_width**-0.5 if spec.score_width else None
        self.core: Core = CausalCore(scale, window_of(spec, layer), spec.score_cap)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """``(b, s, d)`` to ``(b, s, d)``; with a cache, ``x`` is the continuation of what the cache holds."""
        return self.by_heads(self.by_tokens(x), cos, sin, documents, cache)

    def by_tokens(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the heads read of each token by itself: its hidden state ``(b, s, d)``."""
        return (x,)

    def by_heads(
        self,
        inputs: tuple[Tensor, ...],
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """The result ``(b, s, d)`` of the heads whose weights are here; those of all heads add up to that of the layer."""
        query, key, value = self.projected(inputs, cos, sin)
        if cache is not None:
            return self.result(cache.mix(self.core, query, key, value, self.sinks))
        return self.result(self.core(query, key, value, documents, self.sinks))

    def projected(
        self, inputs: tuple[Tensor, ...], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``(b, h, s, e)``, keys ``(b, k, s, e)`` and values ``(b, k, s, v)`` of what ``by_tokens`` gave."""
        (x,) = inputs
        query, key = self.query(x), self.key(x)
        if self.query_norm is not None and self.key_norm is not None and not self.normalizes_heads:
            query, key = self.query_norm(query), self.key_norm(key)
        query = query.unflatten(-1, (-1, self.head_dim))
        key = key.unflatten(-1, (-1, self.head_dim))
        value = self.value(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if self.query_norm is not None and self.key_norm is not None and self.normalizes_heads:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = query.transpose(1, 2), key.transpose(1, 2)  # (b, h, s, e), (b, k, s, e)
        if self.rotated:
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        return query, key, value

    def result(self, mixed: Tensor) -> Tensor:
        """The heads' share ``(b, s, d)`` of the layer's result, from what ``core`` gave ``(b, h, s, v)``."""
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output
