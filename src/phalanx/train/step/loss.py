"""Cross-entropy that never holds all logits.

For a vocabulary of 128 k, the fp32 logits of 8 k tokens are 4 GiB, and their gradient as much again. Here tokens are
taken a chunk at a time: a chunk's logits are made, turned in place into the gradient with respect to the logits
(softmax minus one at the target), multiplied into the gradients of hidden states and projection, and forgotten. So
the backward pass has nothing left to compute, and nothing is recomputed. The idea is that of fused linear
cross-entropy (Liger, arXiv 2410.10989; Cut Cross-Entropy, arXiv 2411.09009); the chunk size is part of the run,
because it decides the order in which the projection's gradient is added up.

Where the vocabulary is divided over tensor ranks, each makes the scores of its own rows for all tokens. What it needs to
know of the others' is three numbers a token (Megatron, arXiv 1909.08053): the largest, the sum of exponentials, and the
target's. Sums are taken relative to each rank's own largest score, so that all three travel at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.autograd import apply_function
from phalanx.parallel.tensor.apply import VocabularyPiece

IGNORE = -100
"""A target that takes no part in the loss, as in ``torch.nn.functional.cross_entropy``."""


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        rows: VocabularyPiece | None,
        wants_gradient: bool,
    ) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if wants_gradient else None
        # fp32, because it sums over chunks.
        grad_weight = torch.empty_like(weight, dtype=torch.float32) if wants_gradient else None
        for begin in range(0, hidden.shape[0], chunk):
            states = hidden[begin : begin + chunk]
            wanted = _find(targets[begin : begin + chunk], weight.shape[0], rows)
            scores, losses = _scores_and_losses(states, weight, wanted, rows)
            loss += losses.sum()
            if grad_hidden is not None and grad_weight is not None:
                slope = _slope(scores, wanted).to(hidden.dtype)
                torch.mm(slope, weight, out=grad_hidden[begin : begin + chunk])
                _accumulate(grad_weight, slope, states, first=begin == 0)
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
            ctx.used = False
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        if ctx.used:
            raise RuntimeError("this loss's gradients were handed out already: it can be differentiated once")
        ctx.used = True
        # In place: as large as the projection itself, a copy would be the most expensive line here.
        grad_hidden, grad_weight = (saved.mul_(upstream[0].to(saved.dtype)) for saved in ctx.saved_tensors)
        return grad_hidden, grad_weight, None, None, None, None


def _accumulate(total: Tensor, slope: Tensor, hidden: Tensor, *, first: bool) -> None:
    """Adds ``slope^T hidden`` ``(vocab, dim)`` to ``total``, fp32; the first time it need not be read."""
    if slope.dtype == torch.float32:
        torch.addmm(total, slope.t(), hidden, beta=0 if first else 1, out=total)
    elif first:
        total.copy_(slope.t() @ hidden)
    else:
        total += slope.t() @ hidden


@dataclass(frozen=True)
class _Wanted:
    """The targets of ``n`` tokens as this rank sees them."""

    row: Tensor
    """Each one's row among this rank's, ``(n,)``, int64; 0 where it has none."""
    here: Tensor
    """Which targets are among this rank's rows, ``(n,)``, bool."""
    ignored: Tensor
    """Which tokens have none, ``(n,)``, bool."""


def _find(targets: Tensor, count: int, rows: VocabularyPiece | None) -> _Wanted:
    ignored = targets == IGNORE
    if rows is None:
        return _Wanted(targets.masked_fill(ignored, 0), ~ignored, ignored)
    row = targets - rows.start
    here = (row >= 0) & (row < count) & ~ignored
    return _Wanted(row.masked_fill(~here, 0), here, ignored)


def _scores_and_losses(
    hidden: Tensor, weight: Tensor, wanted: _Wanted, rows: VocabularyPiece | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities ``(n, rows)`` and each token's loss ``(n,)``, both fp32; ignored tokens lose nothing."""
    scores = hidden @ weight.t()
    if rows is None:
        scores = F.log_softmax(scores, dim=-1, dtype=torch.float32)
        picked = _pick(scores, wanted)
    else:
        scores = scores.float()
        largest, picked = scores.amax(1), _pick(scores, wanted)
        scores.sub_(largest[:, None])
        everybodys = rows.comm.stack(torch.stack((largest, scores.exp().sum(1), picked)))
        top = everybodys[:, 0].amax(0)
        total = (everybodys[:, 1] * (everybodys[:, 0] - top).exp()).sum(0).log()
        # The largest score apart from the sum's logarithm: next to a large one, a small one would be rounded away.
        scores.sub_((top - largest + total)[:, None])
        picked = everybodys[:, 2].sum(0) - top - total
    return scores, (-picked).masked_fill(wanted.ignored, 0.0)


def _pick(scores: Tensor, wanted: _Wanted) -> Tensor:
    """Each target's score ``(n,)``; 0 where this rank does not have it."""
    return scores.gather(1, wanted.row[:, None]).squeeze(1).masked_fill(~wanted.here, 0.0)


def _slope(scores: Tensor, wanted: _Wanted) -> Tensor:
    """The loss's gradient with respect to the logits, in the memory of the log-probabilities."""
    slope = scores.exp_()
    slope.scatter_add_(1, wanted.row[:, None], -wanted.here.to(slope.dtype)[:, None])
    return slope.masked_fill_(wanted.ignored[:, None], 0.0)


def summed_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, rows: VocabularyPiece | None = None
) -> Tensor:
    """The summed cross-entropy, in nats, of predicting ``targets`` from hidden states.

    Args:
        hidden: ``(batch, seq, dim)``, any floating-point format; where the vocabulary is divided, this rank's piece of
            the sequence, ``(batch, seq / ranks, dim)``.
        weight: Output projection, ``(vocab, dim)``, of the same format; or this rank's rows of it.
        targets: ``(batch, seq)``, int64; ``IGNORE`` where there is nothing to predict.
        chunk: Tokens whose logits are held at once.
        rows: Which rows of the vocabulary ``weight`` has; ``None`` for all.

    Returns:
        0-dim, fp32: a sum, not a mean, so that slots can be added whatever they hold. It is the same on all ranks that
        share the vocabulary, and the gradient is that of one such loss, not of as many as there are ranks.
    """
    # Inside the function gradients are off and a weight still asks for one: whether they are wanted is known here.
    wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    whole = hidden if rows is None else rows.comm.gather(hidden)
    tokens = whole.reshape(-1, whole.shape[-1])
    return apply_function(
        _ChunkedCrossEntropy, tokens, weight, targets.reshape(-1), chunk, rows, wants_gradient
    )
