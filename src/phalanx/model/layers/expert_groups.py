"""Groups of rows: the unit of computation of a mixture's experts, for any number of slots that a rank computes at once.

A *group* is the rows of one expert and one slot's micro-batch, in the order of their positions. It depends only on the data: for any
distribution of the experts over ranks, the group has the same rows in the same order. Each group is computed separately, and the
gradients of the slots are added in the slots' tree. So the bits of a mixture do not depend on the number of ranks.

Rows are ordered by expert, then slot. There are two kinds of products:

- **Rows times their expert's matrix**, forward and for the rows' gradient. On a CPU each group is a separate product, because kernels
  depend on neighboring rows. (Measured in fp32 with MKL: 2 to 7 of 60 random groups had other bits in one product with others; in bf16
  none.) On a GPU a launch for each group would cost more than the product. A grouped product with a matrix for each group would need a
  copy of the expert's matrix for each slot. So there an expert's rows of all slots are one group of one product. That relies on
  the kernel: an element of the result is a sum over the inner dimension, in an order that does not depend on the row's tile. PyTorch's
  grouped kernel uses smaller tiles if experts have up to 128 rows on average (``GroupMM.cu``), so a single slot may get other tiles
  than a hand. Both walk the inner dimension in steps of the same instruction. ``python -m bench.gpu --only kernels`` compares them.
- **The matrices' gradients**: a sum over the rows of each group, a *leaf*. A grouped product computes many leaves at once, separately.

The slots' leaves are added level by level of their tree, in fp32. Nodes are not rounded, so a node may be added here or after an
exchange.
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
"""Some experts, and gradients of one of their parameters by slot: ``(experts, slots, ...)``."""

_MOST_ELEMENTS = 1 << 26
"""Elements of the leaves of one product, if an expert has fewer: a launch is cheap compared with writing 128 MiB and more."""


@uncompiled
def _uncompiled_grouped_mm(rows: Tensor, matrices: Tensor, *, offs: Tensor) -> Tensor:
    return F.grouped_mm(rows, matrices, offs=offs)


@dataclass(frozen=True)
class Groups:
    """Sizes of groups whose rows are ordered by expert, then slot."""

    counts: Tensor
    """Rows of each group, ``(experts, slots)``, int64; the number of slots is a power of two."""
    ends: Tensor
    """End index of each expert's rows, ``(experts,)``, int32."""
    apart: bool = False
    """True if each group's rows are a separate product, rather than each expert's; for CPUs."""
    of_experts: tuple[int, ...] = ()
    """Number of rows of each expert, on the host; needed only with several slots."""
    take: Callable[[range, Tensor], None] | None = None
    """Receives ``Leaves``, in the order of experts, instead of autograd, which would round their sum to the weights' dtype."""
    max_leaf_elements: int = _MOST_ELEMENTS
    """Limit of the elements of the leaves of one product; those of one expert may exceed it."""

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.counts.shape[1]

    def multiply(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Return each of ``rows`` ``(m, i)`` times its expert's matrix of ``(experts, i, o)``: ``(m, o)``. If
        ``apart``, each group is a separate product, after waiting for the sizes.
        """
        if not self.apart:
            # The compiler supports grouped_mm for bf16 only.
            product = F.grouped_mm if rows.dtype == torch.bfloat16 else _uncompiled_grouped_mm
            return product(rows, matrices, offs=self.ends)
        sizes: list[list[int]] = self.counts.tolist()
        # (rows of a group, i) each
        parts = iter(torch.split(rows, [size for of_expert in sizes for size in of_expert]))
        # (m, o)
        return torch.cat(
            [
                next(parts).mm(matrix)
                for of_expert, matrix in zip(sizes, matrices, strict=True)
                for _ in of_expert
            ]
        )

    def gradient(self, slope: Tensor, rows: Tensor) -> Tensor | None:
        """Return the gradient ``(experts, o, i)`` of the matrices in the dtype of ``rows``, over slots in their
        binary tree; ``None`` if it was passed to ``take``.

        ``slope`` ``(m, o)`` is the gradient of their products with ``rows`` ``(m, i)``.
        """
        if self.slots == 1:
            return F.grouped_mm(slope.t(), rows, offs=self.ends)  # (experts, o, i)
        return self.add(self._leaves(slope, rows), rows.dtype)

    def add(self, leaves: Iterable[Leaves], dtype: torch.dtype) -> Tensor | None:
        """Return the sum over slots of all experts' ``leaves`` in ``dtype``, ``(experts, ...)``. If there is a
        ``take``, it is called with each of the ``leaves`` instead, and None returned.
        """
        if self.take is None:
            return torch.cat([add_slots(gradients).to(dtype) for _, gradients in leaves])  # (experts, ...)
        for experts, gradients in leaves:
            self.take(experts, gradients)
        return None

    def _leaves(self, slope: Tensor, rows: Tensor) -> Iterator[Leaves]:
        """Yield the weight gradients of the next experts, as many as ``max_leaf_elements`` allow but at least one:
        their range and ``(experts, slots, o, i)``.
        """
        experts, slots, shape = len(self.counts), self.slots, (slope.shape[1], rows.shape[1])
        at_once = max(1, self.max_leaf_elements // (slots * shape[0] * shape[1]))
        end = 0
        for first in range(0, experts, at_once):
            current = range(first, min(first + at_once, experts))
            begin, end = end, end + sum(self.of_experts[current.start : current.stop])
            # (experts slots,)
            ends = self.counts[current.start : current.stop].flatten().cumsum(0).to(torch.int32)
            # (experts slots, o, i)
            gradients = F.grouped_mm(slope[begin:end].t(), rows[begin:end], offs=ends)
            yield current, gradients.view(len(current), slots, *shape)  # (experts, slots, o, i)


def groups_of_one_slot(counts: Tensor) -> Groups:
    """Return the groups of a single slot with ``counts`` ``(experts,)``, int64, rows for each expert."""
    return Groups(counts.unsqueeze(1), counts.cumsum(0).to(torch.int32))


def groups_of_slots(counts: Tensor, of_experts: Iterable[int], *, apart: bool) -> Groups:
    """Return the groups of ``counts`` ``(experts, slots)``, int64; ``of_experts`` are their sums over slots, on the host."""
    ends = counts.sum(1).cumsum(0).to(torch.int32)
    return Groups(counts, ends, apart and counts.shape[1] > 1, tuple(of_experts))


def add_slots(leaves: Tensor) -> Tensor:
    """Return the sum of ``(n, slots, ...)`` over slots, a power of two, in the order of their binary tree: fp32 ``(n, ...)``."""
    sums = leaves
    while sums.shape[1] > 2:
        left, right = sums[:, 0::2], sums[:, 1::2]  # (n, half of the nodes, ...) each
        sums = (left.to(torch.float32, copy=True) if sums is leaves else left).add_(right)
    return sums[:, 0].float() + sums[:, 1] if sums.shape[1] == 2 else sums[:, 0].float()


class _ProductContext(FunctionContext, Protocol):
    groups: Groups


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ProductContext, rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        ctx.groups = groups
        return groups.multiply(rows, matrices.transpose(1, 2))  # (m, i) by (experts, i, o): (m, o)

    @staticmethod
    def backward(ctx: _ProductContext, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of rows and matrices, each ``None`` if it is not needed, or if ``Groups.gradient`` passed it on."""
        rows, matrices = ctx.saved_tensors
        slope = upstream[0].contiguous()
        grad_rows = ctx.groups.multiply(slope, matrices) if ctx.needs_input_grad[0] else None
        grad_matrices = ctx.groups.gradient(slope, rows) if ctx.needs_input_grad[1] else None
        return grad_rows, grad_matrices, None


def grouped_product(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """Multiply each of ``rows`` ``(m, i)`` by the transpose of its expert's matrix of ``(experts, o, i)``: ``(m, o)``; differentiable."""
    if groups.slots == 1:
        return groups.multiply(rows, matrices.transpose(1, 2))  # (m, i) by (experts, i, o): (m, o)
    return apply_function(_GroupedProduct, rows, matrices, groups)


class _ForEachRow(torch.autograd.Function):
    """The bias of each row's expert; backward adds a group's rows in their order."""

    @staticmethod
    def forward(ctx: _ProductContext, biases: Tensor, groups: Groups, rows: int) -> Tensor:
        ctx.groups = groups
        return biases.repeat_interleave(groups.counts.sum(1), dim=0, output_size=rows)  # (m, width)

    @staticmethod
    def backward(ctx: _ProductContext, *upstream: Tensor) -> tuple[Tensor | None, None, None]:
        """Return the gradient of the vectors: the sum over each expert's rows, by slot then over slots in a tree.
        ``None`` for it if ``Groups.add`` passed it on.
        """
        groups, slope = ctx.groups, upstream[0]
        lengths = groups.counts.flatten()  # (experts slots,)
        # (experts slots, width)
        summed = torch.segment_reduce(slope.float(), "sum", lengths=lengths, axis=0, unsafe=True)
        leaves = summed.to(slope.dtype).view(*groups.counts.shape, -1)  # (experts, slots, width)
        if groups.slots == 1:
            return leaves[:, 0], None, None
        return groups.add([(range(len(leaves)), leaves)], slope.dtype), None, None


@uncompiled
def add_by_expert(rows: Tensor, biases: Tensor, groups: Groups, start: int = 0) -> Tensor:
    """Add to ``rows`` ``(m, o)`` the bias ``(experts, width)`` of each row's expert, from element ``start`` on."""
    added = apply_function(_ForEachRow, biases, groups, len(rows))
    return rows + F.pad(added, (start, rows.shape[1] - start - added.shape[1]))  # (m, o)
