"""Router of a mixture of experts: top-k choice, and load balancing.

The router scores every expert for every token, always in fp32, and takes the best (top-k). Scores are a softmax (Switch, Mixtral) or
sigmoids (DeepSeek-V3). A bias on the scores may take part in the choice only (arXiv 2408.15664). The choice may be limited to the best
groups of experts (arXiv 2412.19437, section 2.1.2; a group's score is the sum of its two best, or in DeepSeek-V2 its best).

Two losses can act on the router: the balance loss of the Switch Transformer (arXiv 2101.03961, equation 4; for more than one expert
per token and for sigmoids, in DeepSeek-V3's form) and the z-loss (arXiv 2202.08906, equation 5). Both are means over the tokens of a
micro-batch. They do not appear in the forward pass: backward adds their gradient at the routing weights. Tokens are counted there too,
because backward passes it exactly once per gradient. Evaluations and recomputed activations are not counted.

Shapes: ``n`` tokens, ``d`` model width, ``k`` experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.autograd import FunctionContext, apply_function
from phalanx.run.spec import MoeSpec


@dataclass(frozen=True)
class Routing:
    """The experts of each token, and the weights of their results."""

    experts: Tensor
    """``(n, k)``, int64, each row without repetition."""
    weights: Tensor
    """``(n, k)``, fp32."""


def tokens_per_expert(chosen: Tensor, experts: int) -> Tensor:
    """Histogram: how often each of ``experts`` occurs in ``chosen`` (int64, any shape): ``(experts,)``, int64."""
    # By sorting: on a GPU in deterministic mode, bincount raises or waits for the device.
    edges = torch.arange(experts + 1, device=chosen.device)
    return torch.searchsorted(chosen.flatten().sort().values, edges).diff()


class _BalanceContext(FunctionContext, Protocol):
    scale: float
    counts: Tensor | None
    token_counts: Tensor
    has_losses: bool


class _Balance(torch.autograd.Function):
    """Identity on the routing weights; backward adds the losses' gradient, and the token counts to ``token_counts``."""

    @staticmethod
    def forward(
        ctx: _BalanceContext,
        weights: Tensor,
        losses: Tensor | None,
        scale: float,
        counts: Tensor | None,
        token_counts: Tensor,
    ) -> Tensor:
        ctx.scale, ctx.counts, ctx.token_counts, ctx.has_losses = (
            scale,
            counts,
            token_counts,
            losses is not None,
        )
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: _BalanceContext, *upstream: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        """Add the tokens to the counts, once for each backward pass, and return the gradients of weights and losses."""
        if ctx.counts is not None:
            ctx.token_counts.add_(ctx.counts)
        slope = upstream[0].new_full((), ctx.scale) if ctx.has_losses else None
        return upstream[0], slope, None, None, None


class Router(nn.Module):
    """Scores experts and chooses among them; ``logit_bias`` ``(experts,)`` is a trained part of the scores.

    ``bias`` ``(experts,)``, fp32, is a buffer of the model's state, or ``None``. ``token_counts`` ``(experts,)``, int64, counts the tokens of this
    rank whose gradients were computed since it was last set to zero.
    """

    bias: Tensor | None
    token_counts: Tensor

    def __init__(self, dim: int, moe: MoeSpec) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, dim))
        self.logit_bias = nn.Parameter(torch.empty(moe.experts)) if moe.router_bias else None
        bias = torch.zeros(moe.experts, dtype=torch.float32) if moe.balance_bias else None
        self.register_buffer("bias", bias)
        self.register_buffer("token_counts", torch.zeros(moe.experts, dtype=torch.int64), persistent=False)
        self.auxiliary_scale = 0.0
        """Factor of one token's share of the balance losses; 0 disables their gradient."""
        self.counting = True
        """True if tokens are counted in ``token_counts``."""
        self.total_over: Callable[[Tensor], Tensor] = lambda statistics: statistics
        """Sums int64 statistics over the ranks that share a micro-batch."""

    def forward(self, tokens: Tensor) -> Routing:
        """Return the experts ``(n, k)`` and weights ``(n, k)`` of ``tokens`` ``(n, d)``.

        Weights are normalized and scaled as configured. With gradients enabled, backward counts the tokens and adds the
        balance losses.
        """
        # Numbers refer to DeepSeek-V3's equations (arXiv 2412.19437, section 2.1.2).
        scores, logits = self.scores(tokens)  # (15): (n, experts)
        experts = self._choose(scores.detach())  # (16): (n, k); the bias affects the choice only
        weights = scores.gather(1, experts)  # (14): (n, k)
        if self.moe.normalize:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)  # (13)
        if self.moe.scale != 1:
            weights = weights * self.moe.scale
        if torch.is_grad_enabled():
            weights = self._balanced(weights, experts, scores, logits)
        return Routing(experts, weights)

    def scores(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and logits, ``(n, experts)`` each, fp32."""
        bias = None if self.logit_bias is None else self.logit_bias.float()
        logits = F.linear(tokens.float(), self.weight.float(), bias)
        return logits.softmax(dim=1) if self.moe.score == "softmax" else logits.sigmoid(), logits

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the best experts ``(n, k)``, the best first.

        With groups, only those of the best groups; the balance bias counts.
        """
        preference = scores if self.bias is None else scores + self.bias
        if self.moe.groups > 1:
            # A group's score is that of its best experts; experts of other groups are masked.
            grouped = preference.view(len(scores), self.moe.groups, -1)  # (n, groups, experts of a group)
            # (n, groups)
            best = grouped.topk(2 if self.moe.group_score == "two-best" else 1).values.sum(dim=2)
            best_groups = best.topk(self.moe.groups_per_token).indices  # (n, groups per token)
            # (n, groups)
            masked = torch.ones_like(grouped[:, :, 0], dtype=torch.bool).scatter_(1, best_groups, False)
            preference = grouped.masked_fill(masked.unsqueeze(2), -torch.inf).flatten(1)  # (n, experts)
        return preference.topk(self.moe.per_token).indices  # (n, k)

    def _balanced(self, weights: Tensor, experts: Tensor, scores: Tensor, logits: Tensor) -> Tensor:
        """Return ``weights`` with the balance losses and the token counts attached to their backward pass, if any apply."""
        losing = self.auxiliary_scale != 0 and (self.moe.aux_loss or self.moe.z_loss)
        if not (losing or self.counting):
            return weights
        counts = tokens_per_expert(experts, self.moe.experts)
        losses = self._losses(counts, len(weights), scores, logits) if losing else None
        counted = counts if self.counting else None
        return apply_function(_Balance, weights, losses, self.auxiliary_scale, counted, self.token_counts)

    def _losses(self, counts: Tensor, tokens: int, scores: Tensor, logits: Tensor) -> Tensor:
        """Return the sum over these tokens of each one's share of the balance losses, 0-dim; the losses are means over all tokens."""
        total = logits.new_zeros(())
        if self.moe.aux_loss:
            statistics = self.total_over(torch.cat((counts, counts.new_full((1,), tokens))))  # (experts + 1,)
            # 1 for every expert if the load is even; counts have no gradient.
            # f (18): (experts,)
            load = statistics[:-1].float() * (self.moe.experts / self.moe.per_token) / statistics[-1].float()
            # s' (19): (n, experts)
            shares = scores if self.moe.score == "softmax" else scores / scores.sum(dim=1, keepdim=True)
            total = total + self.moe.aux_loss * (shares * load).sum()  # (17), (20): these tokens' shares
        if self.moe.z_loss:
            total = total + self.moe.z_loss * logits.logsumexp(dim=1).square().sum()
        return total

    @torch.no_grad()
    def move_bias(self, counts: Tensor) -> None:
        """Move the bias against the load of a step: ``counts`` ``(experts,)``, int64, over the fleet.

        The bias of experts below the mean load rises by ``bias_speed``; that of experts above it falls.
        """
        assert self.bias is not None, "this router has no bias: set model.moe.balance_bias"
        # In integers: a floating-point mean could round to either side of a count.
        missing = counts.sum() - counts * self.moe.experts
        self.bias.add_(missing.sign().to(self.bias.dtype) * self.moe.bias_speed)


def routers(module: nn.Module) -> Iterator[tuple[str, Router]]:
    """Yield every router in ``module``, with its name."""
    return ((name, part) for name, part in module.named_modules() if isinstance(part, Router))
