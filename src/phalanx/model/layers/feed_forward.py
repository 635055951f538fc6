"""The feed-forward layer: gated (SwiGLU, Shazeer, arXiv 2002.05202) or plain GELU as in GPT-3."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.layers.linear import Linear
from phalanx.run.kinds.feed_forward import is_gated
from phalanx.run.spec import ModelSpec


def gated(kind: str, gate: Tensor, values: Tensor) -> Tensor:
    """The activation of a gated layer: ``silu(gate) * values``, or of kind "geglu" with a GELU."""
    return (F.gelu(gate, approximate="tanh") if kind == "geglu" else F.silu(gate)) * values


class FeedForward(nn.Module):
    """SwiGLU, ``down(silu(gate(x)) * up(x))``, the same with a GELU, or ``down(gelu(up(x)))``."""

    def __init__(self, spec: ModelSpec, inner: int) -> None:
        """``inner`` is the width between ``up`` and ``down``."""
        super().__init__()
        self.kind = spec.ffn
        self.gate = Linear(spec.dim, inner, bias=spec.ffn_bias) if is_gated(spec) else None
        self.up = Linear(spec.dim, inner, bias=spec.ffn_bias)
        self.down = Linear(inner, spec.dim, bias=spec.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., d)`` to ``(..., d)``."""
        inner = F.gelu(self.up(x)) if self.gate is None else gated(self.kind, self.gate(x), self.up(x))
        output: Tensor = self.down(inner)
        return output
