"""Rows whose bits do not depend on the rows beside them: an expert's product over padded groups.

A kernel for matrix products walks through the rows in tiles, and takes another path for the few rows that are left over: MKL in
fp32 computes one, two or three rows in another order of additions than the same rows among four and more. Of a dense layer a caller
can pad the rows, but how many rows an expert has, its router says. Here each group's rows are padded with zeros to a multiple of
four and at least sixteen, so that a token's result is the same whichever other tokens chose its expert. Backward, the rows' gradient is the same kind of
product, and is padded alike; to a matrix's gradient the zeros add nothing.

It is for ``Experts.product``, in the place of ``expert_groups.grouped_product``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from phalanx.model.autograd import FunctionContext, apply_function, uncompiled
from phalanx.model.layers.experts.expert_groups import Groups, grouped_product
from phalanx.model.layers.experts.moe import Experts

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
