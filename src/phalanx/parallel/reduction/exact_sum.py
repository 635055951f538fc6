"""Sums of squares that come out the same however the numbers are spread over ranks.

The norm of the gradient runs over shards whose boundaries move with the number of ranks, so an ordinary sum would
round differently on every fleet. Here each square is first cut, without error, into two pieces that are multiples of
fixed powers of two, coarse enough that *adding up any number of pieces is exact*; exact addition is associative, so
the order, the shards and the reduction algorithm cease to matter. The cut is Rump's extraction as used by Demmel and
Nguyen, "Parallel Reproducible Summation" (IEEE Trans. Computers 64(7), 2015): ``q = (x + M) - M`` with a power of two
``M`` that depends only on the largest element and on how many there are, both of which every rank knows.

What the second piece cannot hold, below ``n^2 2^-104`` of the largest square, is dropped, on every fleet alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.hardware.kernels.choose import kernels_for


def largest(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The largest magnitude in ``tensors``: 0-dim fp64; infinite if anything is infinite or not a number."""
    held = list(tensors)
    peak = kernels_for(device, held).peak(held, device)
    return torch.nan_to_num(peak, nan=math.inf, posinf=math.inf)


def extraction_constants(peak: float, count: int) -> tuple[float, float]:
    """The two constants ``M`` that cut squares of numbers up to ``peak``, ``count`` of them, into exact pieces.

    Squares are at most ``2^e``. The first piece of each is a multiple of ``2^(k - 52)`` and all of them together stay
    below ``2^(k + 1)``, with ``k = e + bits(count)``: 53 bits, so no addition rounds. What remains of each square is
    below ``2^(k - 53)``, and the second constant treats it likewise.
    """
    exponent = 2 * math.frexp(peak)[1]
    bits = count.bit_length() + 1
    first = exponent + bits
    second = first - 53 + bits
    return 1.5 * math.ldexp(1.0, first), 1.5 * math.ldexp(1.0, second)


@torch.no_grad()
def extracted_sums(tensors: Iterable[Tensor], constants: tuple[float, float], device: torch.device) -> Tensor:
    """The exact sums of both pieces of every element's square: ``(2,)``, fp64."""
    held = list(tensors)
    return kernels_for(device, held).extracted_sums(held, constants, device)


def norm(tensors: list[Tensor], count: int, device: torch.device) -> float:
    """The Euclidean norm of all elements held by all ranks, the same bits on any layout.

    Args:
        tensors: What this rank answers for, fp32 or narrower; over all ranks, every element exactly once.
        count: Number of elements over all ranks.

    Returns:
        The norm; infinite if any element is infinite or not a number.
    """
    peak_everywhere = largest(tensors, device)
    dist.all_reduce(peak_everywhere, dist.ReduceOp.MAX)
    peak = peak_everywhere.item()
    if peak == 0.0 or math.isinf(peak):
        return float(peak)
    sums = extracted_sums(tensors, extraction_constants(peak, count), device)
    dist.all_reduce(sums, dist.ReduceOp.SUM)
    first, second = sums.tolist()
    return math.sqrt(first + second)
