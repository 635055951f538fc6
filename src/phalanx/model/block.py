"""One layer: attention and feed-forward, each normalized before and added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from phalanx.model.layers.attention import Attention
from phalanx.model.layers.cache import LayerCache
from phalanx.model.layers.feed_forward import FeedForward
from phalanx.model.layers.mla import MlaAttention
from phalanx.model.layers.moe import MoE
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
        self.attention_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.attention = _ATTENTION[attention_kind(spec)](spec, layer)
        self.ffn_norm = RMSNorm(spec.dim, spec.norm_eps)
        mixture = spec.moe is not None and is_mixture(spec, layer)
        self.ffn = MoE(spec, spec.moe) if mixture and spec.moe else FeedForward(spec, spec.ffn_dim)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """``(b, s, d)`` to ``(b, s, d)``."""
        x = x + self.attention(self.attention_norm(x), cos, sin, documents, cache)
        mixed: Tensor = self.ffn(self.ffn_norm(x))
        return x + mixed
