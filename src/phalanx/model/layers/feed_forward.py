"""The feed-forward layer: gated (SwiGLU, Shazeer, arXiv 2002.05202) or plain GELU as in GPT-3.

gpt-oss's gate is ``g sigmoid(1.702 g)``, an approximation of GELU, of clamped ``g``, and multiplies clamped values plus one.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.layers.linear import Linear
from phalanx.run.kinds.feed_forward import is_gated
from phalanx.run.spec import ModelSpec


def gated(spec: ModelSpec, gate: Tensor, values: Tensor) -> Tensor:
    """The activation of a gated layer: ``silu(gate) * values``, with "geglu" a GELU; "swiglu-clamped" is gpt-oss's."""
    if spec.ffn == "swiglu-clamped":
        gate = gate.clamp(max=spec.swiglu_limit)
        values = values.clamp(-spec.swiglu_limit, spec.swiglu_limit)
        return (values + 1) * (gate * torch.sigmoid(gate * spec.swiglu_gain))
    return (F.gelu(gate, approximate="tanh") if spec.ffn == "geglu" else F.silu(gate)) * values


class FeedForward(nn.Module):
    """SwiGLU, ``down(silu(gate(x)) * up(x))``, the same with a GELU, or ``down(gelu(up(x)))``."""

    OUTPUT: ClassVar[str] = "down"
    """The last matrix, whose inputs are divided where ranks or lanes divide the layer."""
    BY_TOKENS: ClassVar[tuple[str, ...]] = ()
    """The modules that ``by_tokens`` computes with."""

    def __init__(self, spec: ModelSpec, inner: int) -> None:
        """``inner`` is the width between ``up`` and ``down``."""
        super().__init__()
        self.spec = spec
        self.gate = Linear(spec.dim, inner, bias=spec.ffn_bias) if is_gated(spec) else None
        self.up = Linear(spec.dim, inner, bias=spec.ffn_bias)
        self.down = Linear(inner, spec.dim, bias=spec.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        """``(..., d)`` to ``(..., d)``."""
        return self.by_heads(self.by_tokens(x))

    def by_tokens(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the inner elements read of each token: its hidden state."""
        return (x,)

    def by_heads(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The result ``(..., d)`` of the inner elements whose weights are here; those of all add up to that of the layer."""
        (x,) = inputs
        inner = F.gelu(self.up(x)) if self.gate is None else gated(self.spec, self.gate(x), self.up(x))
        output: Tensor = self.down(inner)
        return output
