"""Sums of squares that do not depend on the distribution of the numbers over ranks.

The norm of the gradient runs over shards whose boundaries depend on the number of ranks, so an ordinary sum would round differently
on every fleet. Here each square is first cut, without error, into two pieces that are multiples of fixed powers of two, coarse
enough that *adding any number of pieces is exact*. Exact addition is associative, so order, shards and reduction algorithm do not
matter. The cut is Rump's extraction as used by Demmel and Nguyen, "Parallel Reproducible Summation" (IEEE Trans. Computers 64(7),
2015): ``q = (x + M) - M`` with a power of two ``M`` that depends only on the largest element and on the number of elements.

The remainder below the second piece, less than ``n^2 2^-104`` of the largest square, is dropped, equally on every fleet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.hardware.kernels.choose import kernels_for


def largest(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the largest magnitude in ``tensors``: 0-dim fp64; infinite if any element is infinite or not a number."""
    tensor_list = list(tensors)
    peak = kernels_for(device, tensor_list).peak(tensor_list, device)
    return torch.nan_to_num(peak, nan=math.inf, posinf=math.inf)


def extraction_constants(peak: float, count: int) -> tuple[float, float]:
    """Return the two constants ``M`` that cut the squares of ``count`` numbers up to ``peak`` into exact pieces.

    1. Squares are at most ``2^e``. The first piece of each is a multiple of ``2^(k - 52)``, with ``k = e + bits(count)``. All of them
       together stay below ``2^(k + 1)``: 53 bits, so no addition rounds.
    2. The remainder of each square is below ``2^(k - 53)``, and the second constant cuts it in the same way.
    """
    exponent = 2 * math.frexp(peak)[1]
    bits = count.bit_length() + 1
    first = exponent + bits
    second = first - 53 + bits
    return 1.5 * math.ldexp(1.0, first), 1.5 * math.ldexp(1.0, second)


@torch.no_grad()
def extracted_sums(tensors: Iterable[Tensor], constants: tuple[float, float], device: torch.device) -> Tensor:
    """Return the exact sums of both pieces of every element's square: ``(2,)``, fp64."""
    tensor_list = list(tensors)
    return kernels_for(device, tensor_list).extracted_sums(tensor_list, constants, device)


def norm(tensors: list[Tensor], count: int, device: torch.device) -> float:
    """Return ``norms`` of one group of tensors over all ranks. A collective."""
    (result,) = norms([tensors], [count], device)
    return result


def norms(
    groups: Sequence[list[Tensor]],
    counts: Sequence[int],
    device: torch.device,
    ranks: dist.ProcessGroup | None = None,
) -> list[float]:
    """Return the Euclidean norm of each group's elements of all ranks, with the same bits on any layout. A collective.

    Args:
        groups: This rank's elements of each group, fp32 or narrower; over all ranks, every element exactly once.
        counts: Number of elements of each group over all ranks.
        device: Device of the tensors.
        ranks: The ranks that hold the elements; by default all.

    Returns:
        The norms; infinite if any element of the group is infinite or not a number.
    """
    peaks_everywhere = torch.stack([largest(tensors, device) for tensors in groups])  # (groups,)
    dist.all_reduce(peaks_everywhere, dist.ReduceOp.MAX, ranks)
    peaks = peaks_everywhere.tolist()
    sums = torch.zeros((len(groups), 2), dtype=torch.float64, device=device)
    for row, tensors, peak, count in zip(sums, groups, peaks, counts, strict=True):
        if tensors and 0.0 < peak < math.inf:
            row.copy_(extracted_sums(tensors, extraction_constants(peak, count), device))
    dist.all_reduce(sums, dist.ReduceOp.SUM, ranks)
    return [
        math.sqrt(first + second) if 0.0 < peak < math.inf else peak
        for peak, (first, second) in zip(peaks, sums.tolist(), strict=True)
    ]
