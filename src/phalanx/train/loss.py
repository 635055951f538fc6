"""Cross-entropy that never holds all logits.

For a vocabulary of 128 k, the fp32 logits of 8 k tokens are 4 GiB, and their gradient as much again. Here tokens are
taken a chunk at a time: a chunk's logits are made, turned in place into the gradient with respect to the logits
(softmax minus one at the target), multiplied into the gradients of hidden states and projection, and forgotten. So
the backward pass has nothing left to compute, and nothing is recomputed. The idea is that of fused linear
cross-entropy (Liger, arXiv 2410.10989; Cut Cross-Entropy, arXiv 2411.09009); the chunk size is part of the run,
because it decides the order in which the projection's gradient is added up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""A target that takes no part in the loss, as in ``torch.nn.functional.cross_entropy``."""


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, wants_gradient: bool
    ) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if wants_gradient else None
        # fp32, because it sums over chunks.
        grad_weight = torch.empty_like(weight, dtype=torch.float32) if wants_gradient else None
        for begin in range(0, hidden.shape[0], chunk):
            rows, wanted = hidden[begin : begin + chunk], targets[begin : begin + chunk]
            scores, losses = _scores_and_losses(rows, weight, wanted)
            loss += losses.sum()
            if grad_hidden is not None and grad_weight is not None:
                slope = _slope(scores, wanted).to(hidden.dtype)
                torch.mm(slope, weight, out=grad_hidden[begin : begin + chunk])
                _accumulate(grad_weight, slope, rows, first=begin == 0)
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
            ctx.used = False
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        if ctx.used:
            raise RuntimeError("this loss's gradients were handed out already: it can be differentiated once")
        ctx.used = True
        # In place: as large as the projection itself, a copy would be the most expensive line here.
        grad_hidden, grad_weight = (saved.mul_(upstream[0].to(saved.dtype)) for saved in ctx.saved_tensors)
        return grad_hidden, grad_weight, None, None, None


def _accumulate(total: Tensor, slope: Tensor, rows: Tensor, *, first: bool) -> None:
    """Adds ``slope^T rows`` ``(vocab, dim)`` to ``total``, fp32; the first time it need not be read."""
    if slope.dtype == torch.float32:
        torch.addmm(total, slope.t(), rows, beta=0 if first else 1, out=total)
    elif first:
        total.copy_(slope.t() @ rows)
    else:
        total += slope.t() @ rows


def _scores_and_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities ``(n, vocab)`` and each row's loss ``(n,)``, both fp32; ignored rows lose nothing."""
    scores = F.log_softmax(hidden @ weight.t(), dim=-1, dtype=torch.float32)
    ignored = targets == IGNORE
    picked = scores.gather(1, targets.masked_fill(ignored, 0)[:, None]).squeeze(1)
    return scores, (-picked).masked_fill(ignored, 0.0)


def _slope(scores: Tensor, targets: Tensor) -> Tensor:
    """The loss's gradient with respect to the logits, in the memory of the log-probabilities."""
    ignored = targets == IGNORE
    slope = scores.exp_()
    slope.scatter_add_(1, targets.masked_fill(ignored, 0)[:, None], slope.new_full((len(targets), 1), -1.0))
    return slope.masked_fill_(ignored[:, None], 0.0)


def summed_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """The summed cross-entropy, in nats, of predicting ``targets`` from hidden states.

    Args:
        hidden: ``(batch, seq, dim)``, any floating-point format.
        weight: Output projection, ``(vocab, dim)``, of the same format.
        targets: ``(batch, seq)``, int64; ``IGNORE`` where there is nothing to predict.
        chunk: Tokens whose logits are held at once.

    Returns:
        0-dim, fp32: a sum, not a mean, so that slots can be added whatever they hold.
    """
    # Inside the function gradients are off and a weight still asks for one: whether they are wanted is known here.
    wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    rows = hidden.reshape(-1, hidden.shape[-1])
    result = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows, weight, targets.reshape(-1), chunk, wants_gradient
    )
    assert isinstance(result, Tensor)
    return result
