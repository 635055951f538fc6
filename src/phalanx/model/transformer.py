"""A decoder-only transformer that a newcomer can read top to bottom.

Pre-norm residual blocks with RMSNorm (arXiv 1910.07467), rotary grouped-query attention (arXiv 2305.13245) and a
SwiGLU feed-forward layer (arXiv 2002.05202): the Llama family; with QK-norm, Qwen3; with a plain GELU layer,
GPT-3's shape. The module is plain: no parallelism, no precision, no initialisation. Build it on the meta device
and let ``phalanx.parallel`` shard it and ``phalanx.model.init`` fill it.

Shapes: ``b`` batch, ``s`` sequence, ``d`` model width, ``h`` query heads, ``k`` key/value heads, ``e`` head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.cache import LayerCache
from phalanx.model.norm import RMSNorm
from phalanx.model.rotary import rotate, rotation
from phalanx.run.spec import ModelSpec

Readout = Callable[[Tensor, Tensor], Tensor]
"""What is made of the last hidden states ``(b, s, d)`` and the output projection ``(vocab, d)``."""


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """The readout that gives every token's scores: ``(b, s, vocab)``."""
    return F.linear(hidden, weight)


class Attention(nn.Module):
    """Causal attention in which groups of query heads share a key/value head."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads, spec.head_dim
        queries, keys, bias = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.attention_bias
        self.query = nn.Linear(spec.dim, queries, bias=bias)
        self.key = nn.Linear(spec.dim, keys, bias=bias)
        self.value = nn.Linear(spec.dim, keys, bias=bias)
        self.output = nn.Linear(queries, spec.dim, bias=bias)
        self.query_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.key_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None = None) -> Tensor:
        """``(b, s, d)`` to ``(b, s, d)``; with a cache, ``x`` is the continuation of what the cache holds."""
        batch, seq, _ = x.shape
        query = self.query(x).view(batch, seq, self.heads, self.head_dim)
        key = self.key(x).view(batch, seq, self.kv_heads, self.head_dim)
        value = self.value(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query = rotate(query.transpose(1, 2), cos, sin)  # (b, h, s, e)
        key = rotate(key.transpose(1, 2), cos, sin)  # (b, k, s, e)
        if cache is not None:
            key, value = cache.append(key, value)
        mixed = self._mix(query, key, value)
        return self.output(mixed.transpose(1, 2).reshape(batch, seq, self.heads * self.head_dim))  # type: ignore[no-any-return]

    def _mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = self.kv_heads != self.heads
        if query.shape[2] == key.shape[2]:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        # A continuation of n tokens after c cached ones: query i sees keys up to c + i.
        seen = key.shape[2] - query.shape[2]
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(seen)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)


class FeedForward(nn.Module):
    """SwiGLU, ``down(silu(gate(x)) * up(x))``, or ``down(gelu(up(x)))``."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.dim, spec.ffn_dim, bias=spec.ffn_bias) if spec.ffn == "swiglu" else None
        self.up = nn.Linear(spec.dim, spec.ffn_dim, bias=spec.ffn_bias)
        self.down = nn.Linear(spec.ffn_dim, spec.dim, bias=spec.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        """``(b, s, d)`` to ``(b, s, d)``."""
        inner = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(inner)  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer: attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.attention = Attention(spec)
        self.ffn_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.ffn = FeedForward(spec)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None = None) -> Tensor:
        """``(b, s, d)`` to ``(b, s, d)``."""
        x = x + self.attention(self.attention_norm(x), cos, sin, cache)
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Embedding, blocks, final norm, and the output projection that the readout applies."""

    def __init__(self, spec: ModelSpec) -> None:
        """Builds the layers of a resolved ``spec`` on the current default device."""
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab_size, spec.dim)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.dim, spec.norm_eps)
        self.head = None if spec.tie_embeddings else nn.Linear(spec.dim, spec.vocab_size, bias=False)

    def forward(
        self, tokens: Tensor, readout: Readout = logits, cache: Sequence[LayerCache] | None = None
    ) -> Tensor:
        """Whatever ``readout`` makes of the hidden states of ``tokens`` ``(b, s)``, int64; by default logits.

        The loss is a readout, because only inside this call are the projection's weights whole on a rank.
        """
        start = cache[0].length if cache is not None else 0
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        cos, sin = (table.to(x.dtype) for table in rotation(self.spec, positions))
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin, cache[index] if cache is not None else None)
        weight = self.embedding.weight if self.head is None else self.head.weight
        return readout(self.norm(x), weight)
