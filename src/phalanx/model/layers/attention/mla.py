"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), and its two forms: expanded or absorbed.

Keys and values of all heads are expanded from one small latent per token, so a cache holds only that latent. Positions
cannot be put into keys that are expanded later; so a head's query and key have a part without position, expanded from the
latent, and a part that is rotated, which for the keys comes straight from the token and is shared by all heads.

Rotated elements are paired in halves, ``i`` with ``i + rope_head_dim / 2``, as everywhere in this project. DeepSeek's
published weights pair neighbors (``rope_interleave`` in their ``config.json``): there element ``2 i`` is rotated with
``2 i + 1``. Importing moves the rows: of each head's rotated rows of ``query_up`` (or ``query``) and of the last
``rope_head_dim`` rows of ``kv_down``, the even ones come first, then the odd ones; exporting moves them back. Scores are
sums over the elements of a head, so nothing else changes.

With ``mla.absorbed`` keys and values are never expanded: ``kv_up`` is multiplied with queries and results instead, and what attention's ``core`` gets
are queries ``r + rope`` wide and one key head, the latents. Whoever exchanges the core, divides the
heads or the sequence finds attention with one key head, and nothing else is different.

Both latents are normalized with the model's ``norm_eps``, unless there is an ``mla.norm_eps`` (in ``transformers``, always 1e-6).

Shapes as in ``phalanx.model.layers.attention.attention``; ``r`` is the rank of the latent of keys and values.
"""

from __future__ import annotations

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

    ``query_up`` has a head's unrotated rows, then its rotated ones; ``kv_down`` the latent's rows, then the rotated ones
    that all heads share; ``kv_up`` a head's unrotated key rows, then its value rows.
    """

    OUTPUT: ClassVar[str] = "output"
    """The last matrix, whose inputs are divided where ranks or lanes divide the layer."""
    BY_TOKENS: ClassVar[tuple[str, ...]] = ("query_down", "query_latent_norm", "kv_down", "kv_latent_norm")
    """The modules that ``by_tokens`` computes with."""
    sinks: ClassVar[None] = None
    """There are none (``Attention.sinks``)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:  # noqa: ARG002  all layers are alike
        """Builds that of layer ``layer`` of a resolved ``spec`` with ``mla``."""
        super().__init__()
        assert spec.mla is not None, "the section that asks for this layer"
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
        scale = self.head_dim**-0.5 * temperature
        self.absorbed = mla.absorbed
        """Whether ``kv_up`` is multiplied with queries and results instead of with latents; a cache may take either form."""
        # What is asked of latents is wider than a head, so its width says nothing of the scale.
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
        """``(b, s, d)`` to ``(b, s, d)``; with a cache, ``x`` is the continuation of what the cache holds."""
        return self.by_heads(self.by_tokens(x), cos, sin, documents, cache)

    # Numbers are those of DeepSeek-V3's equations (arXiv 2412.19437, section 2.1.1).

    def by_tokens(self, x: Tensor) -> tuple[Tensor, ...]:
        """What all heads read of each token: the queries' latent, or ``x`` itself without one; the latent of keys and values
        ``(b, s, r)``; and the key's part that all heads share, not rotated yet, ``(b, s, rope)``."""
        asked = self.query_latent_norm(self.query_down(x)) if self.mla.query_rank else x  # (6)
        latent, shared = self.kv_down(x).split((self.mla.kv_rank, self.mla.rope_head_dim), dim=-1)  # (1)
        return asked, self.kv_latent_norm(latent), shared

    def _expand(self, absorbed: bool) -> Expand:
        # Of the module that is there now: ranks and lanes replace it.
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
        """The result ``(b, s, d)`` of the heads whose weights are here; those of all heads add up to that of the layer."""
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
        """Queries and keys ``(b, h, s, e)`` and values ``(b, h, s, v)`` of what ``by_tokens`` gave; absorbed, queries ``(b, h, s, r + rope)``, and keys
        and values ``(b, 1, s, r + rope)``."""
        query, latent, shared = self._unexpanded(inputs, cos, sin, self.absorbed)
        key, value = self._expand(self.absorbed)(latent, shared)  # (2), (4), (5)
        return query, key, value

    def _unexpanded(
        self, inputs: tuple[Tensor, ...], cos: Tensor, sin: Tensor, absorbed: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``(b, h, s, e)``, of latents if absorbed, and what a cache keeps of keys and values: the latent ``(b, 1, s, r)``, and the rotated
        key that all heads share ``(b, 1, s, rope)``."""
        asked, latent, shared = inputs
        queries = self.query_up if self.mla.query_rank else self.query
        query = queries(asked).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (7): (b, h, s, e)
        fixed = self.mla.nope_head_dim
        query = torch.cat((query[..., :fixed], rotate(query[..., fixed:], cos, sin)), dim=-1)  # (8), (9)
        if absorbed:
            query = self._absorbed_up.asked(query)
        return query, latent.unsqueeze(1), rotate(shared.unsqueeze(1), cos, sin)  # (3)

    def result(self, mixed: Tensor) -> Tensor:
        """The heads' share ``(b, s, d)`` of the layer's result, from what ``core`` gave ``(b, h, s, v)``."""
        return self._result(mixed, self.absorbed)

    def _result(self, mixed: Tensor, absorbed: bool) -> Tensor:
        if absorbed:
            mixed = self._absorbed_up.valued(mixed)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


# The two forms of latent attention (section 2.1.3): keys and values expanded from the latents, or the matrix absorbed.
#
# A head's score is ``q (W_k c) = (q W_k) c``, and its result ``sum_j p_j W_v c_j = W_v sum_j p_j c_j``: so the query can be multiplied with the head's rows of ``kv_up`` instead of
# each latent ``c``, and all heads then attend to the latents themselves. For few queries behind a long text that is little work, where expanding
# costs ``2 r h (nope + value)`` operations for each token of the text in every step. The roundings differ, so a run says by which form it computes
# (``model.mla.absorbed``), and exact numerics keep to that.
#
# Shapes: ``b`` batch, ``h`` heads, ``q`` queries, ``n`` tokens, ``r`` the rank of the latent.


@dataclass(frozen=True)
class AbsorbedUp:
    """``kv_up`` as queries and results are multiplied with it, head by head; it can be differentiated."""

    weight: Tensor
    """For each head, ``nope`` rows of its keys and then ``value`` rows: ``(h (nope + value), r)``."""
    mla: MlaSpec

    def asked(self, query: Tensor) -> Tensor:
        """Queries ``(b, h, q, nope + rope)``, their last part rotated, as latents are asked: ``(b, h, q, r + rope)``."""
        fixed, turned = torch.split(query, [self.mla.nope_head_dim, self.mla.rope_head_dim], dim=-1)
        return torch.cat((self._by_head(fixed, self.matrices()[0]), turned), dim=-1)

    def valued(self, mixed: Tensor) -> Tensor:
        """Mixed latents ``(b, h, q, r + rope)``, whose rotated part says nothing, to mixed values ``(b, h, q, value)``."""
        return self._by_head(mixed[..., : self.mla.kv_rank], self.matrices()[1])

    def matrices(self) -> tuple[Tensor, Tensor]:
        """The matrices of each head for its queries ``(h, nope, r)`` and for its results ``(h, r, value)``."""
        widths = [self.mla.nope_head_dim, self.mla.value_head_dim]
        keys, values = torch.split(self.weight.view(-1, sum(widths), self.mla.kv_rank), widths, dim=1)
        return keys, values.transpose(1, 2)

    def _by_head(self, x: Tensor, matrices: Tensor) -> Tensor:
        # Without gaps, so that neither the number of heads nor their order in memory has a say in what the product does.
        rows = x.transpose(0, 1).flatten(1, 2).contiguous()  # (h, b q, .)
        product = torch.bmm(rows, matrices)
        return product.view(len(product), len(x), -1, product.shape[2]).transpose(0, 1)


def latents_as_keys(latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
    """Keys that all heads share, from latents ``(b, 1, n, r)`` and rotated ``(b, 1, n, rope)``: ``(b, 1, n, r + rope)``. They are values, too, since
    kernels want both of one width."""
    held = torch.cat((latent, shared), dim=-1)
    return held, held


@dataclass(frozen=True, eq=False)  # Dynamo of PyTorch 2.11 hashes an object whose fields it has not set yet
class LatentExpansion:
    """What becomes of a text's latents; as a call, keys and values of all heads."""

    up: Linear
    """``kv_up``: of each head, ``nope`` rows of its keys and then ``value`` rows."""
    mla: MlaSpec
    scale: float
    """The factor of the scores."""

    def __call__(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``(b, h, n, nope + rope)`` and values ``(b, h, n, value)`` from ``(b, 1, n, r)`` and rotated ``(b, 1, n, rope)``."""
        widths = (self.mla.nope_head_dim, self.mla.value_head_dim)
        expanded = self.up(latent.squeeze(1)).unflatten(-1, (-1, sum(widths))).transpose(1, 2)
        fixed, value = expanded.split(widths, dim=-1)
        return torch.cat((fixed, shared.expand(-1, fixed.shape[1], -1, -1)), dim=-1), value

    def absorbs(self, queries: int, tokens: int) -> bool:
        """Whether the absorbed form takes fewer operations for so many queries behind so many tokens."""
        rank, rope = self.mla.kv_rank, self.mla.rope_head_dim
        head = self.mla.nope_head_dim + self.mla.value_head_dim
        expanded = tokens * rank * head + queries * tokens * (head + rope)
        # Values are read as wide as keys, and the rotated part is thrown away.
        return queries * tokens * 2 * (rank + rope) + queries * rank * head < expanded

    def absorbed(self, query: Tensor, latent: Tensor, shared: Tensor, mask: Tensor) -> Tensor:
        """Attention of queries ``(1, h, q, nope + rope)`` to the latents of which they see ``mask``: ``(1, h, q, value)``.

        The mask is ``(h q, n)``, head by head, where all heads are to be asked together, and ``(q, n)`` where each is by itself: for many queries
        that is as much work, and less memory.
        """
        up = AbsorbedUp(self.up.weight, self.mla)
        asked, key, value = up.asked(query), *latents_as_keys(latent, shared)

        def softmax(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=self.scale, enable_gqa=query.shape[1] > 1
            )

        if len(mask) == query.shape[2]:
            return up.valued(softmax(asked, key, value, mask))
        return up.valued(attend_together(asked, key, value, mask, softmax))


def attend_together(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    softmax: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """Attention of all heads' queries ``(1, h, q, e)`` to keys and values ``(1, 1, n, .)`` that they share: ``(1, h, q, .)``.

    Heads are so many queries of one head: one product instead of one for each. ``mask`` ``(h q, n)`` has the keys that each sees; ``softmax`` gets it.
    """
    heads, queries = query.shape[1:3]
    mixed = softmax(query.flatten(1, 2).unsqueeze(1), key, value, mask)[:, 0]  # (1, h q, .)
    return mixed.view(1, heads, queries, -1)
