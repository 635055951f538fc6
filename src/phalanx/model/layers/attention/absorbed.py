"""Latent attention's two forms (DeepSeek-V2, arXiv 2405.04434, section 2.1.3): keys and values expanded from the latents, or the matrix absorbed.

A head's score is ``q (W_k c) = (q W_k) c``, and its result ``sum_j p_j W_v c_j = W_v sum_j p_j c_j``: so the query can be multiplied with the head's rows of ``kv_up`` instead of
each latent ``c``, and all heads then attend to the latents themselves. For few queries behind a long text that is little work, where expanding
costs ``2 r h (nope + value)`` operations for each token of the text in every step. The roundings differ, so a run says by which form it computes
(``model.mla.absorbed``), and exact numerics keep to that.

Shapes: ``b`` batch, ``h`` heads, ``q`` queries, ``n`` tokens, ``r`` the rank of the latent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.layers.linear import Linear
from phalanx.run.spec import MlaSpec


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
