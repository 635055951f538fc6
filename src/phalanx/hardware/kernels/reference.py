"""AdamW's update and exact sums of squares as chains of PyTorch operations: they define the bits.

Every line is a single operation (a product, a sum, a root, a quotient), so an element's result depends on that element alone: not on
its place in a vector loop, whose tail a compiler may round otherwise. IEEE 754 rounds these operations in one way only, and so do devices,
but for one exception: PyTorch's x86 builds take roots on a CPU with MKL, whose last bit is another for one number in five,
though always the same for the same number. ``HostKernels`` and ``GpuKernels`` do the same operations in one pass over memory. Where they
cannot be had, and for other formats than fp32, this is what runs: a CPU works on pieces that stay in its cache, a GPU
takes many tensors in one launch for each operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SpanRun = tuple[int, int, int, int]
"""Consecutive spans of one size in a share of a gradient: the first one's first element, its number, how many there are, elements of each."""

# Elements processed at once. On a CPU, per thread: six fp32 arrays of them, or two in fp64, fit into a core's second-level
# cache. On a GPU: for an update, enough to fill it, and few enough that the three temporary arrays are small beside the model;
# for a sum, few enough that two fp64 arrays (32 MiB) stay in the cache.
_CPU_CHUNK = 1 << 15
_GPU_UPDATE_CHUNK = 1 << 26
_GPU_SUM_CHUNK = 1 << 21


class UpdateFactors(NamedTuple):
    """The numbers of an AdamW update that are the same for all elements; each is rounded to fp32 before it is used."""

    gradient_scale: float
    """On gradients, before anything else."""
    keep_mean: float
    """Beta 1."""
    new_mean: float
    """One minus beta 1."""
    keep_square: float
    """Beta 2."""
    new_square: float
    """One minus beta 2."""
    root_divisor: float
    """``sqrt(1 - beta2^t)``, the correction of the second moment's root."""
    eps: float
    rate: float
    """The learning rate over ``1 - beta1^t``, the correction of the first moment."""
    decay: float
    """On weights: one minus the learning rate times the weight decay."""


@dataclass(frozen=True)
class Kernels:
    """Updates and sums by PyTorch's operations, for any floating-point format. Tensors are on one device, lists may be empty.

    A subclass computes in another way, with the same bits.
    """

    roots: Callable[[list[Tensor]], Sequence[Tensor]] = torch._foreach_sqrt

    def chunk_elements(self, device: torch.device) -> int:
        """Return how many elements an update is best given at once."""
        return _CPU_CHUNK * torch.get_num_threads() if device.type == "cpu" else _GPU_UPDATE_CHUNK

    def adamw(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        means: list[Tensor],
        squares: list[Tensor],
        factors: UpdateFactors,
    ) -> None:
        """Update ``weights``, ``means`` and ``squares`` in place by one step of AdamW, one PyTorch operation at a
        time, which defines the bits. The n-th tensors of all lists belong together. ``grads`` are unchanged.
        """
        grads = list(torch._foreach_mul(grads, factors.gradient_scale))
        torch._foreach_mul_(means, factors.keep_mean)
        torch._foreach_add_(means, torch._foreach_mul(grads, factors.new_mean))
        torch._foreach_mul_(squares, factors.keep_square)
        torch._foreach_mul_(grads, grads)
        torch._foreach_mul_(grads, factors.new_square)
        torch._foreach_add_(squares, grads)
        # m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), with the two corrections applied as scalars.
        roots = list(self.roots(squares))
        torch._foreach_div_(roots, factors.root_divisor)
        torch._foreach_add_(roots, factors.eps)
        change = list(torch._foreach_div(means, roots))
        torch._foreach_mul_(change, factors.rate)
        if factors.decay != 1.0:
            torch._foreach_mul_(weights, factors.decay)
        torch._foreach_sub_(weights, change)

    def peak(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the largest magnitude of all elements, 0-dim fp64; NaN if any is not a number, 0 without elements."""
        ends = [end for tensor in tensors if tensor.numel() for end in torch.aminmax(tensor)]
        if not ends:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack(ends).abs().max().double()

    def extracted_sums(
        self, tensors: Sequence[Tensor], constants: tuple[float, float], device: torch.device
    ) -> Tensor:
        """Return the sums of both exact pieces of all squares, fp64 ``(2,)`` on ``device``, in chunks of bounded memory
        (``parallel/reduction/reproducible_sums.py``).
        """
        chunk = _CPU_CHUNK * torch.get_num_threads() if device.type == "cpu" else _GPU_SUM_CHUNK
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        rest_buffer = torch.empty(chunk, dtype=torch.float64, device=device)
        part_buffer = torch.empty_like(rest_buffer)
        for tensor in tensors:
            for piece in torch.split(tensor.reshape(-1), chunk):
                rest, part = rest_buffer[: piece.numel()], part_buffer[: piece.numel()]
                rest.copy_(piece).mul_(rest)  # a square of an fp32 number has 48 bits: exact in fp64
                for fold, constant in enumerate(constants):
                    torch.add(rest, constant, out=part).sub_(constant)
                    sums[fold] += part.sum()
                    rest.sub_(part)
        return sums


REFERENCE = Kernels()
