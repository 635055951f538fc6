"""A model of one's own for Phalanx: a stack of gated causal convolutions (after Dauphin et al., arXiv 1612.08083).

It is any ``nn.Module`` that states its embedding, blocks, norm and head (``docs/train/python-api.md``). Train it with::

    phalanx.train_run("configs/quickstart.toml", model="examples.mixer:Mixer")
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import ModelSpec

WIDTH = 4
"""Width of a convolution in tokens."""


class GatedConvolution(nn.Module):
    """``x + out(conv(norm(x)) * sigmoid(gate(norm(x))))``; the convolution is causal, one filter to a channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.filter = nn.Parameter(torch.empty(dim, 1, WIDTH))
        self.gate = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(b, s, d)`` to ``(b, s, d)``."""
        y = self.norm(x)
        mixed = F.conv1d(F.pad(y.transpose(1, 2), (WIDTH - 1, 0)), self.filter, groups=x.shape[-1]).transpose(
            1, 2
        )
        return x + self.out(mixed * torch.sigmoid(self.gate(y)))


class Mixer(nn.Module):
    """A language model of gated convolutions, also usable by itself."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(spec.vocab_size, spec.dim)
        self.blocks = nn.ModuleList(GatedConvolution(spec.dim) for _ in range(spec.layers))
        self.norm = nn.RMSNorm(spec.dim)
        self.head = None if spec.tie_embeddings else nn.Linear(spec.dim, spec.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``(b, s)`` to logits ``(b, s, vocab)``."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        return F.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)
