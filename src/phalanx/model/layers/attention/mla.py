"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), and its two forms: expanded or absorbed.

Keys and values of all heads are expanded from one small latent per token, so a cache stores only that latent. Positions cannot be
encoded in keys that are expanded later. So a head's query and key have a part without position, expanded from the latent, and a
rotated part. The rotated part of the keys is projected from the token and shared by all heads.

Rotated elements are paired in halves, ``i`` with ``i + rope_head_dim / 2``, as everywhere in this project. DeepSeek's published weights
pair neighbors (``rope_interleave`` in their ``config.json``): element ``2 i`` with ``2 i + 1``. Import reorders the rows: of each
head's rotated rows of ``query_up`` (or ``query``) and of the last ``rope_head_dim`` rows of ``kv_down``, the even rows come first, then
the odd ones. Export reverses this. Scores are sums over the elements of a head, so nothing else changes.

With ``mla.absorbed`` keys and values are never expanded: ``kv_up`` is multiplied with queries and results instead. Then attention's
``core`` gets queries of width ``r + rope`` and one key head, the latents. Code that replaces the core, or divides heads or sequence,
sees attention with one key head.

Both latents are normalized with the model's ``norm_eps``, unless ``mla.norm_eps`` is set (in ``transformers``, always 1e-6).

Shapes as in ``phalanx.model.layers.attention.attention``; ``r`` is the rank of the latent of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.facts.shape import softmax_temperature
from phalanx.model.layers.attention.attention import Cache, CausalCore, Core, Documents, Expand
from phalanx.model.layers.attention.rotary import rotate
from phalanx.model.layers.dense import Linear, RMSNorm
from phalanx.run.spec import MlaSpec, ModelSpec


class MlaAttention(nn.Module):
    """Attention whose keys and values are expanded from a latent.

    Rows of ``query_up``: for each head the unrotated rows, then the rotated ones. Rows of ``kv_down``: the latent, then the rotated part
    that all heads share. Rows of ``kv_up``: for each head the unrotated keys, then the values.
    """

    OUTPUT: ClassVar[str] = "output"
    """Name of the last matrix, whose inputs are divided if ranks or lanes divide the layer."""
    BY_TOKENS: ClassVar[tuple[str, ...]] = ("query_down", "query_latent_norm", "kv_down", "kv_latent_norm")
    """Names of the modules that ``by_tokens`` uses."""
    sinks: ClassVar[None] = None
    """Latent attention has no sinks (``Attention.sinks``)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:  # noqa: ARG002  all layers are the same
        """Build the attention of a resolved ``spec`` with ``mla``; all layers are the same. Queries have a latent
        only with ``query_rank``. The softmax scale includes YaRN's temperature.
        """
        super().__init__()
        assert spec.mla is not None, "model.mla selects this layer"
        mla = self.mla = spec.mla
        self.head_dim = mla.nope_head_dim + mla.rope_head_dim
        queries = spec.heads * self.head_dim
        if mla.query_rank:
            self.query_down = Linear(spec.dim, mla.query_rank, bias=False)
            self.query_latent_norm = RMSNorm(
                mla.query_rank, mla.norm_eps or spec.norm_eps, offset=spec.norm_offset
            )
            self.query_up = Linear(mla.query_rank, queries, bias=False)
        else:
            self.query = Linear(spec.dim, queries, bias=False)
        self.kv_down = Linear(spec.dim, mla.kv_rank + mla.rope_head_dim, bias=False)
        self.kv_latent_norm = RMSNorm(mla.kv_rank, mla.norm_eps or spec.norm_eps, offset=spec.norm_offset)
        self.kv_up = Linear(mla.kv_rank, spec.heads * (mla.nope_head_dim + mla.value_head_dim), bias=False)
        self.output = Linear(spec.heads * mla.value_head_dim, spec.dim, bias=False)
        temperature = softmax_temperature(spec.rope_scaling)
        scale = temperature / math.sqrt(self.head_dim)
        self.absorbed = mla.absorbed
        """True if ``kv_up`` is multiplied with queries and results instead of with latents; a cache may use either form."""
        # Absorbed queries are wider than a head, so the default scale would be wrong.
        self.core: Core = CausalCore(scale if mla.absorbed or temperature != 1 else None)
        self._scale = scale

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the layer's result ``(b, s, d)`` for ``x`` ``(b, s, d)`` and the rotary tables. With a cache, ``x``
        continues the cached tokens, is added to it, and ``documents`` is not used.
        """
        return self.by_heads(self.by_tokens(x), cos, sin, documents, cache)

    # Numbers are those of DeepSeek-V3's equations (arXiv 2412.19437, section 2.1.1).

    def by_tokens(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of ``by_heads``, computed token by token.

        They are the queries' latent, or ``x`` itself without one; the latent of keys and values ``(b, s, r)``; and the part of the key
        that all heads share, not rotated yet, ``(b, s, rope)``.
        """
        query_input = self.query_latent_norm(self.query_down(x)) if self.mla.query_rank else x  # (6)
        latent, shared = self.kv_down(x).split(
            (self.mla.kv_rank, self.mla.rope_head_dim), dim=-1
        )  # (1): (b, s, r), (b, s, rope)
        return query_input, self.kv_latent_norm(latent), shared

    def _expand(self, absorbed: bool) -> Expand:
        # Reads the current ``kv_up``, which ranks and lanes replace.
        return latents_as_keys if absorbed else LatentExpansion(self.kv_up, self.mla, self._scale)

    @property
    def _absorbed_up(self) -> AbsorbedUp:
        return AbsorbedUp(self.kv_up.weight, self.mla)

    def by_heads(
        self,
        inputs: tuple[Tensor, ...],
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the result ``(b, s, d)`` of the heads whose weights the module has, for the outputs of
        ``by_tokens``.

        The sum over all heads is the layer's result. New latents are added to ``cache``, if given; a cache that takes
        any form gets unabsorbed queries.
        """
        if cache is not None:
            absorbed = self.absorbed and not cache.takes_any_form
            query, latent, shared = self._unexpanded(inputs, cos, sin, absorbed)
            mixed = cache.mix(self.core, query, latent, shared, None, self._expand(absorbed))
            return self._result(mixed, absorbed)
        query, key, value = self.projected(inputs, cos, sin)
        return self.result(self.core(query, key, value, documents))  # (10): (b, h, s, v)

    def projected(
        self, inputs: tuple[Tensor, ...], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys ``(b, h, s, e)`` and values ``(b, h, s, v)`` for the outputs of ``by_tokens``.

        Absorbed: queries ``(b, h, s, r + rope)``, and keys and values ``(b, 1, s, r + rope)``.
        """
        query, latent, shared = self._unexpanded(inputs, cos, sin, self.absorbed)
        key, value = self._expand(self.absorbed)(latent, shared)  # (2), (4), (5)
        return query, key, value

    def _unexpanded(
        self, inputs: tuple[Tensor, ...], cos: Tensor, sin: Tensor, absorbed: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and cache entries.

        Queries are ``(b, h, s, e)``, or ``(b, h, s, r + rope)`` if absorbed. Cache entries are the latent ``(b, 1, s, r)`` and the rotated key
        that all heads share, ``(b, 1, s, rope)``.
        """
        query_input, latent, shared = inputs
        query_proj = self.query_up if self.mla.query_rank else self.query
        query = (
            query_proj(query_input).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        )  # (7): (b, h, s, e)
        nope = self.mla.nope_head_dim
        query = torch.cat(
            (query[..., :nope], rotate(query[..., nope:], cos, sin)), dim=-1
        )  # (8), (9): (b, h, s, e)
        if absorbed:
            query = self._absorbed_up.latent_queries(query)  # (b, h, s, r + rope)
        return query, latent.unsqueeze(1), rotate(shared.unsqueeze(1), cos, sin)  # (3)

    def result(self, mixed: Tensor) -> Tensor:
        """Return the heads' share ``(b, s, d)`` of the layer's result; ``mixed`` ``(b, h, s, v)`` is the result of ``core``."""
        return self._result(mixed, self.absorbed)

    def _result(self, mixed: Tensor, absorbed: bool) -> Tensor:
        """Return the output ``(b, s, d)`` of mixed values ``(b, h, s, v)``, or of mixed latents if ``absorbed``."""
        if absorbed:
            mixed = self._absorbed_up.values(mixed)  # (b, h, s, v)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))  # (b, s, h v) to (b, s, d)
        return output


# The two forms of latent attention (section 2.1.3): keys and values expanded from the latents, or the matrix absorbed.
#
# A head's score is ``q (W_k c) = (q W_k) c``, and its result ``sum_j p_j W_v c_j = W_v sum_j p_j c_j``. So the query can be multiplied
# with the head's rows of ``kv_up`` instead of each latent ``c``, and all heads then attend to the latents. That is cheap for few queries
# after a long text, where expansion costs ``2 r h (nope + value)`` operations for each token of the text in every step. The roundings
# differ, so a run selects the form (``model.mla.absorbed``), and exact numerics keep it.
#
# Shapes: ``b`` batch, ``h`` heads, ``q`` queries, ``n`` tokens, ``r`` the rank of the latent.


@dataclass(frozen=True)
class AbsorbedUp:
    """``kv_up`` multiplied with queries and results, head by head; differentiable."""

    weight: Tensor
    """For each head, ``nope`` rows of its keys and then ``value`` rows: ``(h (nope + value), r)``."""
    mla: MlaSpec

    def latent_queries(self, query: Tensor) -> Tensor:
        """Convert queries ``(b, h, q, nope + rope)``, whose last part is rotated, to queries of latents ``(b, h, q, r + rope)``."""
        # (b, h, q, nope), (b, h, q, rope)
        nope, rotated = torch.split(query, [self.mla.nope_head_dim, self.mla.rope_head_dim], dim=-1)
        return torch.cat((self._by_head(nope, self.matrices()[0]), rotated), dim=-1)  # (b, h, q, r + rope)

    def values(self, mixed: Tensor) -> Tensor:
        """Convert mixed latents ``(b, h, q, r + rope)`` to mixed values ``(b, h, q, value)``; the rotated part is not used."""
        return self._by_head(mixed[..., : self.mla.kv_rank], self.matrices()[1])

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return each head's matrices for its queries ``(h, nope, r)`` and for its results ``(h, r, value)``."""
        widths = [self.mla.nope_head_dim, self.mla.value_head_dim]
        # (h, nope, r), (h, value, r)
        keys, values = torch.split(self.weight.view(-1, sum(widths), self.mla.kv_rank), widths, dim=1)
        return keys, values.transpose(1, 2)  # (h, nope, r), (h, r, value)

    def _by_head(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Return the rows of each head ``(b, h, q, .)`` multiplied by the head's matrix of ``(h, ., .)``."""
        # Contiguous, so that the kernel depends neither on the number of heads nor on their order in memory.
        rows = x.transpose(0, 1).flatten(1, 2).contiguous()  # (h, b q, .)
        product = torch.bmm(rows, matrices)  # (h, b q, .)
        return product.view(len(product), len(x), -1, product.shape[2]).transpose(0, 1)  # (b, h, q, .)


def latents_as_keys(latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys ``(b, 1, n, r + rope)`` that all heads share, from latents ``(b, 1, n, r)`` and rotated ``(b, 1, n, rope)``.

    The same tensor is returned as values, because kernels require keys and values of one width.
    """
    keys = torch.cat((latent, shared), dim=-1)  # (b, 1, n, r + rope)
    return keys, keys


@dataclass(frozen=True, eq=False)  # Dynamo of PyTorch 2.11 hashes an object whose fields it has not set yet
class LatentExpansion:
    """Function from a text's latents to keys and values of all heads, with the absorbed alternative."""

    up: Linear
    """``kv_up``: for each head, ``nope`` rows of its keys and then ``value`` rows."""
    mla: MlaSpec
    scale: float
    """Factor of the scores."""

    def __call__(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys ``(b, h, n, nope + rope)`` and values ``(b, h, n, value)`` from ``(b, 1, n, r)`` and rotated ``(b, 1, n, rope)``."""
        widths = (self.mla.nope_head_dim, self.mla.value_head_dim)
        # (b, h, n, nope + value)
        expanded = self.up(latent.squeeze(1)).unflatten(-1, (-1, sum(widths))).transpose(1, 2)
        nope, value = expanded.split(widths, dim=-1)  # (b, h, n, .)
        # (b, h, n, nope + rope), (b, h, n, value)
        return torch.cat((nope, shared.expand(-1, nope.shape[1], -1, -1)), dim=-1), value

    def absorbs(self, queries: int, tokens: int) -> bool:
        """Return True if the absorbed form needs fewer operations for ``queries`` queries and ``tokens`` tokens."""
        rank, rope = self.mla.kv_rank, self.mla.rope_head_dim
        head = self.mla.nope_head_dim + self.mla.value_head_dim
        expanded = tokens * rank * head + queries * tokens * (head + rope)
        # Values are read with the width of keys; the rotated part is discarded.
        return queries * tokens * 2 * (rank + rope) + queries * rank * head < expanded

    def absorbed(self, query: Tensor, latent: Tensor, shared: Tensor, mask: Tensor) -> Tensor:
        """Return the attention ``(1, h, q, value)`` of queries ``(1, h, q, nope + rope)`` to the latents that
        ``mask`` makes visible.

        With a mask ``(h q, n)``, by head, all heads are computed together; with ``(q, n)`` each separately. For many
        queries the second is as much work and needs less memory.
        """
        up = AbsorbedUp(self.up.weight, self.mla)
        query, key, value = up.latent_queries(query), *latents_as_keys(latent, shared)

        def softmax(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=self.scale, enable_gqa=query.shape[1] > 1
            )

        if len(mask) == query.shape[2]:
            return up.values(softmax(query, key, value, mask))
        return up.values(attend_together(query, key, value, mask, softmax))


def attend_together(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    softmax: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """Return the attention ``(1, h, q, .)`` of all heads' queries ``(1, h, q, e)`` to keys and values ``(1, 1, n,
    .)`` that they share.

    All heads are computed as queries of one head: one product instead of one per head. ``mask`` ``(h q, n)`` has the
    visible keys of each query; it is passed to ``softmax``.
    """
    heads, queries = query.shape[1:3]
    mixed = softmax(query.flatten(1, 2).unsqueeze(1), key, value, mask)[:, 0]  # (1, h q, .)
    return mixed.view(1, heads, queries, -1)  # (1, h, q, .)
