"""Mixture of experts: a router sends each token through a few of many feed-forward layers (arXiv 1701.06538, 2401.06066).

No token is dropped or padded. The copies of the tokens are ordered by expert, and one grouped matrix product multiplies each expert's
rows with its matrix (``expert_groups``). The ``exchange`` moves copies to their experts and back; expert parallelism replaces it.

All row movements are permutations, whose backward pass is the inverse permutation. The k results of a token are added in the order of
its choices. So no two additions race for one element, as they would if gradients were scattered back by index.

Shapes: ``n`` tokens, ``d`` model width, ``f`` inner width, ``k`` experts per token, ``m`` rows, one per copy of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.autograd import FunctionContext, apply_function, uncompiled
from phalanx.model.layers.dense import FeedForward, gated
from phalanx.model.layers.expert_groups import (
    Groups,
    add_by_expert,
    grouped_product,
    groups_of_one_slot,
)
from phalanx.run.kinds.feed_forward import is_gated
from phalanx.run.spec import ModelSpec, MoeSpec

# Router of a mixture of experts: top-k choice, and load balancing.
#
# The router scores every expert for every token, always in fp32, and takes the best (top-k). Scores are a softmax (Switch, Mixtral) or
# sigmoids (DeepSeek-V3). A bias on the scores may take part in the choice only (arXiv 2408.15664). The choice may be limited to the best
# groups of experts (arXiv 2412.19437, section 2.1.2; a group's score is the sum of its two best, or in DeepSeek-V2 its best).
#
# Two losses can act on the router: the balance loss of the Switch Transformer (arXiv 2101.03961, equation 4; for more than one expert
# per token and for sigmoids, in DeepSeek-V3's form) and the z-loss (arXiv 2202.08906, equation 5). Both are means over the tokens of a
# micro-batch. They do not appear in the forward pass: backward adds their gradient at the routing weights. Tokens are counted there too,
# because backward passes it exactly once per gradient. Evaluations and recomputed activations are not counted.
#
# Shapes: ``n`` tokens, ``d`` model width, ``k`` experts per token.


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
    return torch.searchsorted(chosen.flatten().sort().values, edges).diff()  # (experts,)


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
        """Return the ``weights`` unchanged. Keeps for backward: the ``scale`` of the losses' gradient if there are
        ``losses``, and the ``counts`` to add to ``token_counts``, if any.
        """
        ctx.scale, ctx.counts, ctx.token_counts, ctx.has_losses = (
            scale,
            counts,
            token_counts,
            losses is not None,
        )
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: _BalanceContext, *upstream: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        """Add the tokens to ``token_counts``, once for each backward pass, and return the gradients of weights
        (unchanged) and losses (``scale``, or None).
        """
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
        """Make the weight ``(experts, dim)``, uninitialized, with ``router_bias`` a logit bias, and with
        ``balance_bias`` a saved buffer ``bias`` of zeros. Counts are not saved.
        """
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

        Weights are the chosen experts' scores, normalized and scaled as configured; the balance bias affects the choice
        only. With gradients enabled, backward counts the tokens if ``counting``, and adds the gradient of the balance
        losses unless ``auxiliary_scale`` is 0.
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
        """Return ``weights`` with the balance losses and the token counts attached to their backward pass; unchanged
        if neither is enabled.
        """
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
        """Move the bias in place against the load of a step: ``counts`` ``(experts,)``, int64, over the fleet.

        The bias of experts below the mean load rises by ``bias_speed``; that of experts above it falls; at the mean
        it stays.
        """
        assert self.bias is not None, "this router has no bias: set model.moe.balance_bias"
        # In integers: a floating-point mean could round to either side of a count.
        missing = counts.sum() - counts * self.moe.experts
        self.bias.add_(missing.sign().to(self.bias.dtype) * self.moe.bias_speed)


def routers(module: nn.Module) -> Iterator[tuple[str, Router]]:
    """Yield every router in ``module``, with its name."""
    return ((name, part) for name, part in module.named_modules() if isinstance(part, Router))


GroupedProduct = Callable[[Tensor, Tensor, Groups], Tensor]
"""Function from rows ``(m, i)``, matrices ``(experts, o, i)`` and groups to each row times the transpose of its expert's matrix, ``(m, o)``.
"""


class Experts(nn.Module):
    """A stack of feed-forward layers.

    ``gate`` (or ``None``) and ``up`` are ``(experts, f, d)``, ``down`` is ``(experts, d, f)``. With ``ffn_bias``, ``gate_bias`` and
    ``up_bias`` are ``(experts, f)``, ``down_bias`` is ``(experts, d)``.
    """

    product: GroupedProduct | None = None
    """``None`` is PyTorch's grouped product."""
    take: Callable[[str, range, Tensor], None] | None = None
    """Receives the gradients of several slots, by the parameter's name, instead of autograd (``Groups.take``)."""
    result_start: int = 0
    """First element of the result to which ``down_bias`` is added, if ranks divide the bias."""

    def __init__(self, spec: ModelSpec, moe: MoeSpec) -> None:
        """Make uninitialized stacks ``(experts, inner, dim)`` of ``up`` and, if gated, ``gate``, and ``(experts, dim,
        inner)`` of ``down``; with ``ffn_bias`` also their biases.
        """
        super().__init__()
        wide, narrow = (moe.experts, moe.ffn_dim, spec.dim), (moe.experts, spec.dim, moe.ffn_dim)
        self.spec = spec
        self.gate = nn.Parameter(torch.empty(wide)) if is_gated(spec) else None
        self.up = nn.Parameter(torch.empty(wide))
        self.down = nn.Parameter(torch.empty(narrow))

        def bias(stack: tuple[int, int, int]) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(stack[:2])) if spec.ffn_bias else None

        self.gate_bias = bias(wide) if self.gate is not None else None
        self.up_bias, self.down_bias = bias(wide), bias(narrow)

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """Return ``rows`` ``(m, d)``, ordered by expert, then slot, passed through their experts: ``(m, d)``."""
        if self.gate is not None:
            inner = gated(self.spec, self._project("gate", rows, groups), self._project("up", rows, groups))
        else:
            inner = F.gelu(self._project("up", rows, groups))  # (m, f)
        return self._project("down", inner, groups)

    def _project(self, name: str, rows: Tensor, groups: Groups) -> Tensor:
        """Return the rows ``(m, i)`` times their experts' matrices ``name``, with the experts' biases added, if any:
        ``(m, o)``. Uses ``product`` if it is set.
        """
        product = grouped_product if self.product is None else self.product
        products = product(rows, getattr(self, name), self._groups_of(name, groups))  # (m, o)
        bias: Tensor | None = getattr(self, f"{name}_bias")
        if bias is None:
            return products
        start = self.result_start if name == "down" else 0
        return add_by_expert(products, bias, self._groups_of(f"{name}_bias", groups), start)

    def _groups_of(self, name: str, groups: Groups) -> Groups:
        """Return the groups, which take the gradients of each slot of the matrix ``name``, if several are computed at once."""
        if self.take is None or groups.slots == 1:
            return groups
        return replace(groups, take=partial(self.take, name))


@dataclass(frozen=True)
class ExpertOrder:
    """Copies of all tokens, sorted by expert; a token's copies are numbered ``token * k + choice``."""

    copies: Tensor
    """The copy at each position, ``(n * k,)``, int64: the permutation."""
    places: Tensor
    """The position of each copy, ``(n * k,)``, int64: the inverse permutation."""
    counts: Tensor
    """Number of copies for each expert, ``(experts,)``, int64."""


def order_by_expert(chosen: Tensor, experts: int) -> ExpertOrder:
    """Return the order of ``chosen`` ``(n, k)`` by expert, and then by token."""
    copies = chosen.flatten().argsort(stable=True)  # (n k,)
    return ExpertOrder(copies, copies.argsort(), tokens_per_expert(chosen, experts))


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, rows: Tensor, permutation: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, permutation)

    @staticmethod
    def backward(ctx: FunctionContext, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return upstream[0].index_select(0, inverse), None, None


def permute(rows: Tensor, permutation: Tensor, inverse: Tensor) -> Tensor:
    """Return ``rows[permutation]`` ``(m, d)``, differentiable; ``permutation`` and its ``inverse`` are ``(m,)``, int64."""
    return apply_function(_Permute, rows, permutation, inverse)


class _CopiesContext(FunctionContext, Protocol):
    per_token: int


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _CopiesContext, tokens: Tensor, copies: Tensor, places: Tensor, per_token: int
    ) -> Tensor:
        """Return the copies ``(n k, d)`` of ``tokens`` ``(n, d)`` in the order ``copies`` ``(n k,)``, numbered ``token * k + choice``."""
        ctx.save_for_backward(places)
        ctx.per_token = per_token
        return tokens.index_select(0, copies // per_token)  # (n k, d)

    @staticmethod
    def backward(ctx: _CopiesContext, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        # (n, k, d)
        by_token = upstream[0].index_select(0, places).view(-1, ctx.per_token, upstream[0].shape[1])
        return by_token.sum(dim=1), None, None, None  # (n, d)


def copies_by_expert(tokens: Tensor, order: ExpertOrder) -> Tensor:
    """Return the copies ``(n * k, d)`` of ``tokens`` ``(n, d)``, sorted by expert."""
    per_token = len(order.copies) // max(1, len(tokens))
    return apply_function(_Copies, tokens, order.copies, order.places, per_token)


def combine(rows: Tensor, order: ExpertOrder, weights: Tensor) -> Tensor:
    """Return the weighted sum ``(n, d)``, in the rows' dtype, of each token's results ``rows`` ``(n * k, d)``, sorted by expert.

    ``weights`` ``(n, k)`` are fp32; the sum is computed in fp32.
    """
    by_token = permute(rows, order.places, order.copies).view(*weights.shape, -1)  # (n, k, d)
    return (by_token.float() * weights.unsqueeze(2)).sum(dim=1).to(rows.dtype)  # (n, d)


class LocalExchange:
    """Exchange of a rank with all experts: nothing is sent."""

    def __call__(self, tokens: Tensor, routing: Routing, experts: Experts) -> Tensor:
        """Return the weighted sum ``(n, d)`` of the results of each of ``tokens`` ``(n, d)`` from its experts, all of
        which this rank has.
        """
        order = order_by_expert(routing.experts, len(experts.up))
        # (n, d) -> (n * k, d) by expert -> through the experts -> (n, d)
        rows = experts(copies_by_expert(tokens, order), groups_of_one_slot(order.counts))
        return combine(rows, order, routing.weights)


Exchange = Callable[[Tensor, Routing, Experts], Tensor]
"""Function that passes tokens ``(n, d)`` through the experts of their routing: ``(n, d)``."""


class MoE(nn.Module):
    """A feed-forward layer of routed experts and, optionally, shared experts for every token."""

    def __init__(self, spec: ModelSpec, moe: MoeSpec) -> None:
        """Build router and experts, with ``moe.shared`` also one feed-forward layer as wide as that many experts, and
        with ``shared_gate`` its gate.
        """
        super().__init__()
        self.router = Router(spec.dim, moe)
        self.experts = Experts(spec, moe)
        self.shared_gate = nn.Parameter(torch.empty(1, spec.dim)) if moe.shared_gate else None
        self.shared = FeedForward(spec, moe.shared * moe.ffn_dim) if moe.shared else None
        self.exchange: Exchange = LocalExchange()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of routed and, if any, shared experts, the latter times their gate if there is one: ``(b, s,
        d)`` to ``(b, s, d)``.
        """
        mixed = self.routed(x)
        if self.shared is None:
            return mixed
        shared: Tensor = self.shared(x)
        return mixed + (shared if self.shared_gate is None else self.shared_weights(x) * shared)

    def routed(self, x: Tensor) -> Tensor:
        """Return the routed experts' result ``(b, s, d)``."""
        tokens = x.flatten(0, -2)  # (b s, d)
        return self.exchange(tokens, self.router(tokens), self.experts).view_as(x)

    def shared_weights(self, x: Tensor) -> Tensor:
        """Return the weight ``(b, s, 1)`` of the shared experts' result."""
        assert self.shared_gate is not None, "model.moe.shared_gate is set"
        return F.linear(x, self.shared_gate).sigmoid()


# Rows whose bits do not depend on neighboring rows: an expert's product over padded groups.
#
# A matrix product walks through the rows in tiles, with another path for the remaining rows: MKL in fp32 computes one, two or three rows
# in another order of additions than the same rows among four and more. The caller of a dense layer can pad the rows, but the router
# determines an expert's rows. So here each group's rows are padded with zeros to a multiple of four and at least sixteen. Then a token's
# result does not depend on the other tokens of its expert. The rows' gradient is a product of the same kind and padded likewise; zeros
# do not change a matrix's gradient.
#
# Used as ``Experts.product``, instead of ``expert_groups.grouped_product``.


ROWS = 4
"""The number of rows of a product is a multiple of this."""
LEAST = 16
"""Minimum number of rows of a product: with fewer, a kernel may split the inner dimension among its vector lanes.

Measured in fp32 with MKL 2024.2, from an inner width of 128 on: 4 to 12 rows differ; from 16 rows on none.
"""


def _paddings(counts: Tensor) -> Tensor:
    """Return the number of rows to add to each of ``counts``, so that each row's bits do not depend on the others; 0 for
    a group without rows.
    """
    return torch.maximum(LEAST - counts, -counts % ROWS).masked_fill(counts == 0, 0)


class _Spread(torch.autograd.Function):
    """Put rows ``(m, d)`` at their ``places`` ``(m,)`` among ``size`` rows; the others are zeros."""

    @staticmethod
    def forward(ctx: FunctionContext, rows: Tensor, places: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(places)
        return rows.new_zeros(size, rows.shape[1]).index_copy_(0, places, rows)

    @staticmethod
    def backward(ctx: FunctionContext, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return upstream[0].index_select(0, places), None, None


class _Gather(torch.autograd.Function):
    """Inverse of ``_Spread``: the rows ``(m, d)`` at ``places`` of ``(size, d)``."""

    @staticmethod
    def forward(ctx: FunctionContext, padded: Tensor, places: Tensor, zeros: Tensor) -> Tensor:
        ctx.save_for_backward(places, zeros)
        return padded.index_select(0, places)

    @staticmethod
    def backward(ctx: FunctionContext, *upstream: Tensor) -> tuple[Tensor, None, None]:
        places, zeros = ctx.saved_tensors
        slope = upstream[0]
        return slope.new_zeros(len(zeros), slope.shape[1]).index_copy_(0, places, slope), None, None


def padded_groups(groups: Groups) -> Groups:
    """Return the groups with each one's rows padded to a multiple of ``ROWS``."""
    counts = groups.counts + _paddings(groups.counts)
    of_experts = tuple(counts.sum(1).tolist()) if groups.of_experts else ()
    return replace(groups, counts=counts, ends=counts.sum(1).cumsum(0).to(torch.int32), of_experts=of_experts)


def padded_places(groups: Groups, rows: int) -> Tensor:
    """Return the position of each of ``rows`` rows, ordered by group, among the padded ones: ``(rows,)``, int64.
    Padding is at each group's end.
    """
    sizes = groups.counts.flatten()  # (experts slots,)
    added = _paddings(sizes)
    before = added.cumsum(0) - added
    shift = before.repeat_interleave(sizes, output_size=rows)
    return torch.arange(rows, device=sizes.device) + shift


@uncompiled
def independent_product(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """Return each of ``rows`` ``(m, i)`` times the transpose of its expert's matrix of ``(experts, o, i)``: ``(m,
    o)``.

    The rounding of a row does not depend on the other rows. Slots are padded for that. On a GPU without
    ``of_experts`` the padding has a fixed upper size.
    """
    padded, places = padded_groups(groups), padded_places(groups, len(rows))
    if rows.device.type == "cpu" or padded.of_experts:
        size = sum(padded.of_experts) if padded.of_experts else int(padded.ends[-1])
    else:  # an upper bound, without waiting for the device: rows after the last group are not computed
        most = len(rows) + (LEAST - 1) * groups.counts.numel()
        size = most + -most % ROWS
    spread = apply_function(_Spread, rows, places, size)
    products = grouped_product(spread, matrices, padded)
    return apply_function(_Gather, products, places, spread.new_empty(size, 0))


def make_rows_independent(model: nn.Module) -> None:
    """Set ``independent_product`` as the product of all experts of ``model``."""
    for part in model.modules():
        if isinstance(part, Experts):
            part.product = independent_product
