"""One layer: attention and feed-forward, each normalized before or after and added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from phalanx.model.layers.attention.attention import Attention
from phalanx.model.layers.attention.cache import Cache
from phalanx.model.layers.attention.documents import Documents
from phalanx.model.layers.attention.mla import MlaAttention
from phalanx.model.layers.experts.moe import MoE
from phalanx.model.layers.feed_forward import FeedForward
from phalanx.model.layers.norm import RMSNorm
from phalanx.run.kinds import grouped_attention, latent_attention
from phalanx.run.kinds.attention import AttentionKind, attention_kind
from phalanx.run.kinds.mixture import is_mixture
from phalanx.run.spec import ModelSpec

_ATTENTION: Mapping[AttentionKind, Callable[[ModelSpec, int], Attention | MlaAttention]] = {
    grouped_attention: Attention,
    latent_attention: MlaAttention,
}


class Block(nn.Module):
    """Layer ``layer`` of a resolved model, counted from 0."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        before, after = spec.norm_placement != "after", spec.norm_placement != "before"
        self.attention_norm = RMSNorm(spec.dim, spec.norm_eps, offset=spec.norm_offset) if before else None
        self.attention = _ATTENTION[attention_kind(spec)](spec, layer)
        self.attention_post_norm = (
            RMSNorm(spec.dim, spec.norm_eps, offset=spec.norm_offset) if after else None
        )
        self.ffn_norm = RMSNorm(spec.dim, spec.norm_eps, offset=spec.norm_offset) if before else None
        mixture = spec.moe is not None and is_mixture(spec, layer)
        self.ffn = MoE(spec, spec.moe) if mixture and spec.moe else FeedForward(spec, spec.ffn_dim)
        self.ffn_post_norm = RMSNorm(spec.dim, spec.norm_eps, offset=spec.norm_offset) if after else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """``(b, s, d)`` to ``(b, s, d)``."""
        mixed = self.attention(_normed(x, self.attention_norm), cos, sin, documents, cache)
        x = x + _normed(mixed, self.attention_post_norm)
        return x + _normed(self.ffn(_normed(x, self.ffn_norm)), self.ffn_post_norm)


def _normed(x: Tensor, norm: RMSNorm | None) -> Tensor:
    if norm is None:
        return x
    normalized: Tensor = norm(x)
    return normalized
