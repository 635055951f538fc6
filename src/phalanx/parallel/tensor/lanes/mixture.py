"""A mixture of experts beside lanes: its tokens in the order of the pieces of the sequence, its router one piece at a time.

Routed experts are not cut into lanes: the rows of one expert and one micro-batch are computed together, so all of a slot's
tokens must come to the expert in one order. That is by piece, then sequence of the micro-batch, then position: the order in which
tensor ranks, each with a run of pieces, send them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.model.layers.experts.moe import MoE
from phalanx.model.layers.experts.router import Router
from phalanx.parallel.tensor.lanes.pieces import InPieces
from phalanx.parallel.tensor.lanes.shares import SharedParameter


class RoutedInPieces:
    """Takes the place of ``MoE.routed``."""

    def __init__(self, moe: MoE, count: int) -> None:
        """For ``count`` pieces on this rank."""
        self._moe, self._count = moe, count

    def __call__(self, x: Tensor) -> Tensor:
        """``(b, s, d)`` to the same."""
        batch, seq, dim = x.shape
        pieces = x.view(batch, self._count, seq // self._count, dim)
        tokens = pieces.transpose(0, 1).reshape(-1, dim)  # by piece, sequence, position: (b s, d)
        mixed = self._moe.exchange(tokens, self._moe.router(tokens), self._moe.experts)
        by_piece = mixed.view(self._count, batch, seq // self._count, dim)
        return by_piece.transpose(0, 1).reshape(x.shape)


class ScoresInPieces:
    """Takes the place of ``Router.scores``."""

    def __init__(self, router: Router, parameters: Sequence[SharedParameter], count: int) -> None:
        """For ``count`` pieces on this rank."""
        scores = router.scores

        def both(tokens: Tensor) -> Tensor:
            return torch.cat(scores(tokens), dim=1)  # (n, 2 experts)

        self._both = InPieces(both, parameters, count, dim=0)

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of tokens ``(n, d)``, which lie by piece, and what they are made of: ``(n, experts)`` each, fp32."""
        scores, logits = self._both(tokens).chunk(2, dim=1)
        return scores, logits
