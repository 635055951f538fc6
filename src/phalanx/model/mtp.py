"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): layers that each predict one token further ahead.

The module of depth 1 takes the last hidden state of each token and the embedding of the token after it, and predicts the
one after that; depth 2 takes depth 1's hidden states, and so on. Embedding and output projection are the main model's. Such
layers are for training, where they make the hidden states plan ahead; serving drafts tokens with them (``phalanx_serve.engine.drafts``).

Here a sequence keeps its length at every depth, so that shapes stay what the layout divided: the last ``depth`` positions
have no token that far ahead, get an arbitrary one, and their targets are ignored. Attention is causal, so they spoil
nothing else.

As in DeepSeek's published weights, hidden states come normalized by the norm before the projection, and the projection's
first half is for the embedding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from phalanx.model.block import Block
from phalanx.model.layers.attention.cache import Cache
from phalanx.model.layers.attention.documents import Documents
from phalanx.model.layers.linear import Linear
from phalanx.model.layers.norm import RMSNorm
from phalanx.run.spec import ModelSpec

ReadoutAhead = Callable[[Tensor, Tensor, int], Tensor]
"""A function of the hidden states ``(b, s, d)`` of a depth, the output projection ``(vocab, d)`` and the depth, from 1."""


class PredictionAhead(nn.Module):
    """One depth. Its block is of the kind of the model's last."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(spec.dim, spec.norm_eps, offset=spec.norm_offset)
        self.embedding_norm = RMSNorm(spec.dim, spec.norm_eps, offset=spec.norm_offset)
        self.projection = Linear(2 * spec.dim, spec.dim, bias=False)
        self.block = Block(spec, spec.layers - 1)
        self.norm = RMSNorm(spec.dim, spec.norm_eps, offset=spec.norm_offset)

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Hidden states of the depth before and embeddings of the tokens further ahead, ``(b, s, d)``, to hidden states; with a cache, both
        are the continuation of what it holds."""
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        ahead: Tensor = self.norm(self.block(self.projection(both), cos, sin, documents, cache))
        return ahead


def tokens_ahead(tokens: Tensor, depth: int) -> Tensor:
    """For each of ``tokens`` ``(b, s)`` the one ``depth`` further; the last ``depth`` are arbitrary."""
    return tokens.roll(-depth, dims=1)


def targets_ahead(targets: Tensor, depth: int, ignored: int, ends: Tensor | None = None) -> Tensor:
    """The targets ``(b, s)`` of a depth from those of the main model; the last ``depth`` are ``ignored``.

    With ``ends`` ``(b, s)``, bool, which tokens end a document, so are targets beyond an end: they are another document's. (Those right behind
    one, the main model ignores already.)
    """
    ahead = tokens_ahead(targets, depth)
    ahead[:, targets.shape[1] - depth :] = ignored
    if ends is not None:
        for nearer in range(depth):
            ahead = ahead.masked_fill(tokens_ahead(ends, nearer), ignored)
    return ahead


def training_loss(parts: Tensor, spec: ModelSpec) -> Tensor:
    """The loss to train on, 0-dim: the main one, plus ``mtp_loss`` times the mean of those further ahead.

    ``parts`` is what ``Transformer`` returns: 0-dim without predictions ahead, else ``(1 + depths,)``.
    """
    return parts if parts.ndim == 0 else parts[0] + spec.mtp_loss * parts[1:].mean()
