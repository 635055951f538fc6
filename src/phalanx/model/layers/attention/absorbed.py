"""Latent attention's two forms (DeepSeek-V2, arXiv 2405.04434, section 2.1.3): keys and values expanded from the latents, or the matrix absorbed.

A head's score is ``q (W_k c) = (q W_k) c``, and its result ``sum_j p_j W_v c_j = W_v sum_j p_j c_j``: so the query can be multiplied with the head's rows of ``kv_up`` instead of
each latent ``c``, and all heads then attend to the latents themselves. For few queries behind a long text that is little work, where expanding
costs ``2 r h (nope + value)`` operations for each token of the text in every step. The roundings differ: expanded is what training computes, so
exact numerics keep to it.

Shapes: ``h`` heads, ``q`` queries, ``n`` tokens, ``r`` the rank of the latent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.layers.linear import Linear
from phalanx.run.spec import MlaSpec


@dataclass(frozen=True)
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
        """Attention of queries ``(1, h, q, nope + rope)`` that see ``mask`` ``(q, n)`` of the latents: ``(1, h, q, value)``."""
        rank, widths = self.mla.kv_rank, (self.mla.nope_head_dim, self.mla.value_head_dim)
        heads, queries = query.shape[1:3]
        matrices = self.up.weight.view(heads, sum(widths), rank)
        keys, values = torch.split(matrices, list(widths), dim=1)  # (h, ., r)
        fixed, turned = torch.split(query[0], [widths[0], self.mla.rope_head_dim], dim=-1)  # (h, q, .)
        asked = torch.cat((fixed @ keys, turned), dim=-1).flatten(0, 1)  # (h q, r + rope)
        held = torch.cat((latent, shared), dim=-1)  # (1, 1, n, r + rope)
        # Heads are so many queries of one head, since all see the same keys: one product instead of one for each.
        mixed = F.scaled_dot_product_attention(
            asked[None, None], held, held, attn_mask=mask.repeat(heads, 1), scale=self.scale
        )
        summed = mixed[0, 0, :, :rank].reshape(heads, queries, rank)
        return (summed @ values.transpose(1, 2)).unsqueeze(0)
