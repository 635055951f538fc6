"""Groups of rows: what a mixture's experts compute by itself, however many slots a rank's experts serve at once.

A *group* is the rows of one expert and one slot's micro-batch, in the order of their positions. It is a property of the data: whichever
ranks share the experts, the group has the same rows in the same order. So if each group is computed by itself, and the gradients of the
slots are added in the slots' tree, the bits of a mixture do not depend on how many ranks its experts are dealt over.

Rows lie by expert, then slot. Two kinds of products are made:

- **Rows times their expert's matrix**, forward and for the rows' gradient. On a CPU each group is a product of its own. Kernels there are
  not indifferent to what lies beside a row: measured in fp32 with MKL, 2 to 7 of 60 random groups had other bits in one product with others;
  in bf16 none. On a GPU a launch for each group would cost more than the
  product, and a grouped product with a matrix for each group would need a copy of the expert's matrix for each slot. There an expert's rows of
  all slots are one group of one product. That relies on the kernel: an element of the result is a sum over the inner dimension, in an order that
  knows nothing of the tile that the row falls into. PyTorch's grouped kernel takes smaller tiles where experts have up to 128 rows on
  average (``GroupMM.cu``), so a slot alone may get other tiles than a hand: both walk the inner dimension in steps of the same instruction.
  ``python -m bench.gpu bits`` compares them.
- **The matrices' gradients**: a sum over the rows of each group, a *leaf*, of which a grouped product makes many at once, each alone.

The slots' leaves are added level by level of their tree, in fp32: nothing is rounded at a node, so it does not matter which nodes
were added here, and which after an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.autograd import FunctionContext, apply_function, uncompiled

Leaves = tuple[range, Tensor]
"""Some experts, and the gradients of something of theirs by slot: ``(experts, slots, ...)``."""

_MOST_ELEMENTS = 1 << 26
"""Elements of the leaves that one product makes, where an expert has fewer: a launch is little beside writing 128 MiB and more."""


@uncompiled
def _uncompiled_grouped_mm(rows: Tensor, matrices: Tensor, *, offs: Tensor) -> Tensor:
    return F.grouped_mm(rows, matrices, offs=offs)


@dataclass(frozen=True)
class Groups:
    """The sizes of groups whose rows lie by expert, then slot."""

    counts: Tensor
    """Rows of each group, ``(experts, slots)``, int64; the number of slots is a power of two."""
    ends: Tensor
    """The end of each expert among the rows, ``(experts,)``, int32."""
    apart: bool = False
    """True if each group's rows are a product of their own, rather than each expert's; for CPUs."""
    of_experts: tuple[int, ...] = ()
    """The rows of each expert, known to the host; needed with several slots alone."""
    take: Callable[[range, Tensor], None] | None = None
    """Takes ``Leaves``, in the order of experts, in the place of autograd, which would round their sum to the weights' dtype."""
    max_leaf_elements: int = _MOST_ELEMENTS
    """Limit of the elements of the leaves that one product makes; those of one expert may be more."""

    @property
    def slots(self) -> int:
        """The number of slots."""
        return self.counts.shape[1]

    def multiply(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Each of ``rows`` ``(m, i)`` times its expert's matrix of ``(experts, i, o)``: ``(m, o)``."""
        if not self.apart:
            # The compiler's description of grouped_mm knows bf16 alone.
            product = F.grouped_mm if rows.dtype == torch.bfloat16 else _uncompiled_grouped_mm
            return product(rows, matrices, offs=self.ends)
        sizes: list[list[int]] = self.counts.tolist()
        parts = iter(torch.split(rows, [size for of_expert in sizes for size in of_expert]))
        return torch.cat(
            [
                next(parts).mm(matrix)
                for of_expert, matrix in zip(sizes, matrices, strict=True)
                for _ in of_expert
            ]
        )

    def gradient(self, slope: Tensor, rows: Tensor) -> Tensor | None:
        """The gradient ``(experts, o, i)``, in the dtype of ``rows``, of matrices whose products with ``rows`` ``(m, i)`` have the
        gradient ``slope`` ``(m, o)``; ``None`` if ``take`` has got it."""
        if self.slots == 1:
            return F.grouped_mm(slope.t(), rows, offs=self.ends)
        return self.add(self._leaves(slope, rows), rows.dtype)

    def add(self, leaves: Iterable[Leaves], dtype: torch.dtype) -> Tensor | None:
        """The sum over slots of all experts' ``leaves`` in ``dtype``: ``(experts, ...)``; ``None`` if ``take`` has got them."""
        if self.take is None:
            return torch.cat([add_slots(gradients).to(dtype) for _, gradients in leaves])
        for experts, gradients in leaves:
            self.take(experts, gradients)
        return None

    def _leaves(self, slope: Tensor, rows: Tensor) -> Iterator[Leaves]:
        experts, slots, shape = len(self.counts), self.slots, (slope.shape[1], rows.shape[1])
        at_once = max(1, self.max_leaf_elements // (slots * shape[0] * shape[1]))
        end = 0
        for first in range(0, experts, at_once):
            some = range(first, min(first + at_once, experts))
            begin, end = end, end + sum(self.of_experts[some.start : some.stop])
            ends = self.counts[some.start : some.stop].flatten().cumsum(0).to(torch.int32)
            gradients = F.grouped_mm(slope[begin:end].t(), rows[begin:end], offs=ends)
            yield some, gradients.view(len(some), slots, *shape)


def groups_of_one_slot(counts: Tensor) -> Groups:
    """The groups of a single slot, of which each expert has ``counts`` ``(experts,)``, int64."""
    return Groups(counts.unsqueeze(1), counts.cumsum(0).to(torch.int32))


def groups_of_slots(counts: Tensor, of_experts: Iterable[int], *, apart: bool) -> Groups:
    """The groups of ``counts`` ``(experts, slots)``, int64; ``of_experts`` are their sums over slots, as the host knows them."""
    ends = counts.sum(1).cumsum(0).to(torch.int32)
    return Groups(counts, ends, apart and counts.shape[1] > 1, tuple(of_experts))


def add_slots(leaves: Tensor) -> Tensor:
    """The sum of ``(n, slots, ...)`` over slots, a power of two, in the order of their binary tree: fp32 ``(n, ...)``."""
    sums = leaves
    while sums.shape[1] > 2:
        left, right = sums[:, 0::2], sums[:, 1::2]
        sums = (left.to(torch.float32, copy=True) if sums is leaves else left).add_(right)
    return sums[:, 0].float() + sums[:, 1] if sums.shape[1] == 2 else sums[:, 0].float()


class _ProductContext(FunctionContext, Protocol):
    groups: Groups


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ProductContext, rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        ctx.groups = groups
        return groups.multiply(rows, matrices.transpose(1, 2))

    @staticmethod
    def backward(ctx: _ProductContext, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, matrices = ctx.saved_tensors
        slope = upstream[0].contiguous()
        grad_rows = ctx.groups.multiply(slope, matrices) if ctx.needs_input_grad[0] else None
        grad_matrices = ctx.groups.gradient(slope, rows) if ctx.needs_input_grad[1] else None
        return grad_rows, grad_matrices, None


def grouped_product(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """Each of ``rows`` ``(m, i)`` times the transpose of its expert's matrix of ``(experts, o, i)``: ``(m, o)``."""
    if groups.slots == 1:
        return groups.multiply(rows, matrices.transpose(1, 2))
    return apply_function(_GroupedProduct, rows, matrices, groups)


class _ForEachRow(torch.autograd.Function):
    """The bias of each row's expert; the sum in backward goes through a group's rows in their order."""

    @staticmethod
    def forward(ctx: _ProductContext, biases: Tensor, groups: Groups, rows: int) -> Tensor:
        ctx.groups = groups
        return biases.repeat_interleave(groups.counts.sum(1), dim=0, output_size=rows)

    @staticmethod
    def backward(ctx: _ProductContext, *upstream: Tensor) -> tuple[Tensor | None, None, None]:
        groups, slope = ctx.groups, upstream[0]
        lengths = groups.counts.flatten()
        summed = torch.segment_reduce(slope.float(), "sum", lengths=lengths, axis=0, unsafe=True)
        leaves = summed.to(slope.dtype).view(*groups.counts.shape, -1)  # (experts, slots, width)
        if groups.slots == 1:
            return leaves[:, 0], None, None
        return groups.add([(range(len(leaves)), leaves)], slope.dtype), None, None


@uncompiled
def add_by_expert(rows: Tensor, biases: Tensor, groups: Groups, start: int = 0) -> Tensor:
    """``rows`` ``(m, o)`` plus the bias ``(experts, width)`` of each one's expert, from element ``start`` on."""
    added = apply_function(_ForEachRow, biases, groups, len(rows))
    return rows + F.pad(added, (start, rows.shape[1] - start - added.shape[1]))
