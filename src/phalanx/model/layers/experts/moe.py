"""Mixture of experts: each token passes through a few of many feed-forward layers (arXiv 1701.06538, 2401.06066); also with rows that are independent of each other.

No token is dropped and none is padded: the copies of the tokens are put in the order of their experts, and one grouped
matrix product multiplies each expert's rows with its matrix (``expert_groups``). How copies get to their experts and back is the ``exchange``,
which expert parallelism replaces.

Everything that moves rows is a permutation, whose backward pass is the inverse permutation, and the k results of a token
are added in the order of its choices. So no two additions ever race for one place, as they would if gradients were scattered
back by index.

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
"""Rows ``(m, i)``, matrices ``(experts, o, i)`` and the rows' groups to ``(m, o)``: each row times the transpose of its expert's
matrix."""


class Experts(nn.Module):
    """A stack of feed-forward layers: ``gate`` (or ``None``) and ``up`` ``(experts, f, d)``, ``down`` ``(experts, d, f)``; with
    ``ffn_bias`` also ``gate_bias`` and ``up_bias`` ``(experts, f)``, ``down_bias`` ``(experts, d)``."""

    product: GroupedProduct | None = None
    """``None`` is PyTorch's own."""
    take: Callable[[str, range, Tensor], None] | None = None
    """Takes the gradients of several slots, by the parameter's name, in the place of autograd (``Groups.take``)."""
    result_start: int = 0
    """The first element of a result that ``down_bias`` belongs to, where ranks that add up their results divide it."""

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
        """``rows`` ``(m, d)``, which lie by expert, then slot, through their experts: ``(m, d)``."""
        if self.gate is not None:
            inner = gated(self.spec, self._through("gate", rows, groups), self._through("up", rows, groups))
        else:
            inner = F.gelu(self._through("up", rows, groups))
        return self._through("down", inner, groups)

    def _through(self, name: str, rows: Tensor, groups: Groups) -> Tensor:
        product = grouped_product if self.product is None else self.product
        products = product(rows, getattr(self, name), self._taken(name, groups))
        bias: Tensor | None = getattr(self, f"{name}_bias")
        if bias is None:
            return products
        start = self.result_start if name == "down" else 0
        return add_by_expert(products, bias, self._taken(f"{name}_bias", groups), start)

    def _taken(self, name: str, groups: Groups) -> Groups:
        if self.take is None or groups.slots == 1:
            return groups
        return replace(groups, take=partial(self.take, name))


@dataclass(frozen=True)
class ExpertOrder:
    """The copies of all tokens, sorted by expert; a token's copies are numbered ``token * k + choice``."""

    copies: Tensor
    """The copy in each place, ``(n * k,)``, int64: the permutation."""
    places: Tensor
    """The place of each copy, ``(n * k,)``, int64: the inverse permutation."""
    counts: Tensor
    """Copies for each expert, ``(experts,)``, int64."""


def order_by_expert(chosen: Tensor, experts: int) -> ExpertOrder:
    """The order by expert, and among equals by token, of ``chosen`` ``(n, k)``."""
    copies = chosen.flatten().argsort(stable=True)
    return ExpertOrder(copies, copies.argsort(), tokens_per_expert(chosen, experts))


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, rows: Tensor, taken: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, taken)

    @staticmethod
    def backward(ctx: FunctionContext, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return upstream[0].index_select(0, inverse), None, None


def permute(rows: Tensor, taken: Tensor, inverse: Tensor) -> Tensor:
    """``rows[taken]`` for a permutation ``taken`` ``(m,)`` of the rows ``(m, d)``; ``inverse`` is its inverse."""
    return apply_function(_Permute, rows, taken, inverse)


class _CopiesContext(FunctionContext, Protocol):
    per_token: int


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _CopiesContext, tokens: Tensor, copies: Tensor, places: Tensor, per_token: int
    ) -> Tensor:
        ctx.save_for_backward(places)
        ctx.per_token = per_token
        return tokens.index_select(0, copies // per_token)

    @staticmethod
    def backward(ctx: _CopiesContext, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        by_token = upstream[0].index_select(0, places).view(-1, ctx.per_token, upstream[0].shape[1])
        return by_token.sum(dim=1), None, None, None


def copies_by_expert(tokens: Tensor, order: ExpertOrder) -> Tensor:
    """The copies ``(n * k, d)`` of ``tokens`` ``(n, d)``, sorted by expert."""
    per_token = len(order.copies) // max(1, len(tokens))
    return apply_function(_Copies, tokens, order.copies, order.places, per_token)


def combine(rows: Tensor, order: ExpertOrder, weights: Tensor) -> Tensor:
    """The weighted sum ``(n, d)``, in the rows' dtype, of each token's results ``rows`` ``(n * k, d)``, sorted by expert.

    ``weights`` ``(n, k)``, fp32; the sum is fp32 too.
    """
    by_token = permute(rows, order.places, order.copies).view(*weights.shape, -1)  # (n, k, d)
    return (by_token.float() * weights.unsqueeze(2)).sum(dim=1).to(rows.dtype)


class LocalExchange:
    """The exchange of a rank that holds all experts: nothing is sent."""

    def __call__(self, tokens: Tensor, routing: Routing, experts: Experts) -> Tensor:
        """``tokens`` ``(n, d)`` through their experts: ``(n, d)``."""
        order = order_by_expert(routing.experts, len(experts.up))
        # (n, d) -> (n * k, d) by expert -> through the experts -> (n, d)
        rows = experts(copies_by_expert(tokens, order), groups_of_one_slot(order.counts))
        return combine(rows, order, routing.weights)


Exchange = Callable[[Tensor, Routing, Experts], Tensor]
"""Tokens ``(n, d)`` through the experts that their routing names: ``(n, d)``."""


class MoE(nn.Module):
    """A feed-forward layer of routed experts and, if there are any, experts that every token passes through."""

    def __init__(self, spec: ModelSpec, moe: MoeSpec) -> None:
        super().__init__()
        self.router = Router(spec.dim, moe)
        self.experts = Experts(spec, moe)
        self.shared_gate = nn.Parameter(torch.empty(1, spec.dim)) if moe.shared_gate else None
        self.shared = FeedForward(spec, moe.shared * moe.ffn_dim) if moe.shared else None
        self.exchange: Exchange = LocalExchange()

    def forward(self, x: Tensor) -> Tensor:
        """``(b, s, d)`` to ``(b, s, d)``."""
        mixed = self.routed(x)
        if self.shared is None:
            return mixed
        shared: Tensor = self.shared(x)
        return mixed + (shared if self.shared_gate is None else self.shared_weights(x) * shared)

    def routed(self, x: Tensor) -> Tensor:
        """The routed experts' result ``(b, s, d)``."""
        tokens = x.flatten(0, -2)
        return self.exchange(tokens, self.router(tokens), self.experts).view_as(x)

    def shared_weights(self, x: Tensor) -> Tensor:
        """The weight ``(b, s, 1)`` of the shared experts' result."""
        assert self.shared_gate is not None, "model.moe.shared_gate asks for it"
        return F.linear(x, self.shared_gate).sigmoid()


# Rows whose bits do not depend on the rows beside them: an expert's product over padded groups.
#
# A kernel for matrix products walks through the rows in tiles, and takes another path for the few rows that are left over: MKL in
# fp32 computes one, two or three rows in another order of additions than the same rows among four and more. Of a dense layer a caller
# can pad the rows, but how many rows an expert has, its router says. Here each group's rows are padded with zeros to a multiple of
# four and at least sixteen, so that a token's result is the same whichever other tokens chose its expert. Backward, the rows' gradient is the same kind of
# product, and is padded alike; to a matrix's gradient the zeros add nothing.
#
# It is for ``Experts.product``, in the place of ``expert_groups.grouped_product``.


ROWS = 4
"""The number of rows of which a product's rows are a multiple."""
LEAST = 16
"""The fewest rows of a product: with fewer, a kernel may split the inner dimension among its lanes (measured: fp32, MKL 2024.2, from an inner
width of 128 on, 4 to 12 rows differ; from 16 rows on none)."""


def padding(rows: int) -> int:
    """Rows to add to ``rows``, more than none, so that each one's bits are its own."""
    return max(LEAST - rows, -rows % ROWS)


def _paddings(counts: Tensor) -> Tensor:
    """``padding`` of each of ``counts``; none for a group without rows."""
    return torch.maximum(LEAST - counts, -counts % ROWS).masked_fill(counts == 0, 0)


class _Spread(torch.autograd.Function):
    """Rows ``(m, d)`` put to their ``places`` ``(m,)`` among ``size`` rows, the others zeros."""

    @staticmethod
    def forward(ctx: FunctionContext, rows: Tensor, places: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(places)
        return rows.new_zeros(size, rows.shape[1]).index_copy_(0, places, rows)

    @staticmethod
    def backward(ctx: FunctionContext, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return upstream[0].index_select(0, places), None, None


class _Gather(torch.autograd.Function):
    """The inverse of ``_Spread``: the rows ``(m, d)`` at ``places`` of ``(size, d)``."""

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
    """The groups with each one's rows padded to a multiple of ``ROWS``."""
    counts = groups.counts + _paddings(groups.counts)
    of_experts = tuple(counts.sum(1).tolist()) if groups.of_experts else ()
    return replace(groups, counts=counts, ends=counts.sum(1).cumsum(0).to(torch.int32), of_experts=of_experts)


def padded_places(groups: Groups, rows: int) -> Tensor:
    """The place of each of ``rows`` rows among the padded ones: ``(rows,)``, int64."""
    sizes = groups.counts.flatten()
    added = _paddings(sizes)
    before = added.cumsum(0) - added
    shift = before.repeat_interleave(sizes, output_size=rows)
    return torch.arange(rows, device=sizes.device) + shift


@uncompiled
def independent_product(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """Each of ``rows`` ``(m, i)`` times the transpose of its expert's matrix of ``(experts, o, i)``: ``(m, o)``, each row by the
    same roundings whatever the others are."""
    padded, places = padded_groups(groups), padded_places(groups, len(rows))
    if rows.device.type == "cpu" or padded.of_experts:
        size = sum(padded.of_experts) if padded.of_experts else int(padded.ends[-1])
    else:  # the host need not wait to know how many: rows behind the last group are not computed
        most = len(rows) + (LEAST - 1) * groups.counts.numel()
        size = most + -most % ROWS
    spread = apply_function(_Spread, rows, places, size)
    products = grouped_product(spread, matrices, padded)
    return apply_function(_Gather, products, places, spread.new_empty(size, 0))


def make_rows_independent(model: nn.Module) -> None:
    """Gives all experts of ``model`` the product whose rows are independent."""
    for part in model.modules():
        if isinstance(part, Experts):
            part.product = independent_product
