"""Mixture of experts: a router sends each token through a few of many feed-forward layers (arXiv 1701.06538, 2401.06066).

No token is dropped or padded. The copies of the tokens are ordered by expert, and one grouped matrix product multiplies each expert's
rows with its matrix (``expert_groups``). The ``exchange`` moves copies to their experts and back; expert parallelism replaces it.

All row movements are permutations, whose backward pass is the inverse permutation. The k results of a token are added in the order of
its choices. So no two additions race for one element, as they would if gradients were scattered back by index.

Shapes: ``n`` tokens, ``d`` model width, ``f`` inner width, ``k`` experts per token, ``m`` rows, one per copy of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.autograd import FunctionContext, apply_function, uncompiled
from phalanx.model.layers.dense import FeedForward, gated
from phalanx.model.layers.experts.expert_groups import (
    Groups,
    add_by_expert,
    grouped_product,
    groups_of_one_slot,
)
from phalanx.model.layers.experts.router import Router, Routing, tokens_per_expert
from phalanx.run.kinds.feed_forward import is_gated
from phalanx.run.spec import ModelSpec, MoeSpec

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
        """Pass ``rows`` ``(m, d)``, ordered by expert, then slot, through their experts: ``(m, d)``."""
        if self.gate is not None:
            inner = gated(self.spec, self._project("gate", rows, groups), self._project("up", rows, groups))
        else:
            inner = F.gelu(self._project("up", rows, groups))  # (m, f)
        return self._project("down", inner, groups)

    def _project(self, name: str, rows: Tensor, groups: Groups) -> Tensor:
        """Multiply the rows by their experts' matrices ``name``, and add the experts' biases, if any."""
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
        """Pass ``tokens`` ``(n, d)`` through their experts: ``(n, d)``."""
        order = order_by_expert(routing.experts, len(experts.up))
        # (n, d) -> (n * k, d) by expert -> through the experts -> (n, d)
        rows = experts(copies_by_expert(tokens, order), groups_of_one_slot(order.counts))
        return combine(rows, order, routing.weights)


Exchange = Callable[[Tensor, Routing, Experts], Tensor]
"""Function that passes tokens ``(n, d)`` through the experts of their routing: ``(n, d)``."""


class MoE(nn.Module):
    """A feed-forward layer of routed experts and, optionally, shared experts for every token."""

    def __init__(self, spec: ModelSpec, moe: MoeSpec) -> None:
        super().__init__()
        self.router = Router(spec.dim, moe)
        self.experts = Experts(spec, moe)
        self.shared_gate = nn.Parameter(torch.empty(1, spec.dim)) if moe.shared_gate else None
        self.shared = FeedForward(spec, moe.shared * moe.ffn_dim) if moe.shared else None
        self.exchange: Exchange = LocalExchange()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of routed and, if any, shared experts: ``(b, s, d)`` to ``(b, s, d)``."""
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


def padding(rows: int) -> int:
    """Return the number of rows to add to ``rows`` (> 0), so that each row's bits do not depend on the others."""
    return max(LEAST - rows, -rows % ROWS)


def _paddings(counts: Tensor) -> Tensor:
    """Return ``padding`` of each of ``counts``; 0 for a group without rows."""
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
    """Return the position of each of ``rows`` rows among the padded ones: ``(rows,)``, int64."""
    sizes = groups.counts.flatten()  # (experts slots,)
    added = _paddings(sizes)
    before = added.cumsum(0) - added
    shift = before.repeat_interleave(sizes, output_size=rows)
    return torch.arange(rows, device=sizes.device) + shift


@uncompiled
def independent_product(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """Multiply each of ``rows`` ``(m, i)`` by the transpose of its expert's matrix of ``(experts, o, i)``: ``(m, o)``.

    The rounding of a row does not depend on the other rows. Slots are padded for that. On a GPU without ``of_experts``
    the padding has a fixed upper size.
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
