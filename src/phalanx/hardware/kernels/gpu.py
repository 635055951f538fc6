"""The same kernels on a GPU, in Triton, which comes with PyTorch's CUDA builds.

``enable_fp_fusion=False`` keeps the compiler from making one rounding of a product and a sum; roots and quotients are computed in
their IEEE forms, since Triton's ``/`` on fp32 is an approximation. A program takes one block of a tensor. Sums are exact, so how blocks add
theirs up does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.hardware.kernels.reference import Kernels, UpdateFactors
from phalanx.hardware.local.device import brought

_BLOCK = 1024
_TILES = 16
"""Blocks that one program of a sum goes through."""
_PIECE = 1 << 26
"""Elements of one launch, so that 32-bit offsets suffice."""


def _adamw_program(
    weights: tl.tensor,
    grads: tl.tensor,
    means: tl.tensor,
    squares: tl.tensor,
    count: tl.tensor,
    scale: tl.tensor,
    keep_mean: tl.tensor,
    new_mean: tl.tensor,
    keep_square: tl.tensor,
    new_square: tl.tensor,
    root: tl.tensor,
    eps: tl.tensor,
    rate: tl.tensor,
    decay: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    grad = tl.load(grads + at, inside) * scale
    mean = tl.load(means + at, inside) * keep_mean + grad * new_mean
    square = tl.load(squares + at, inside) * keep_square + grad * grad * new_square
    tl.store(means + at, mean, inside)
    tl.store(squares + at, square, inside)
    change = tl.div_rn(mean, tl.div_rn(tl.sqrt_rn(square), root) + eps) * rate
    tl.store(weights + at, tl.load(weights + at, inside) * decay - change, inside)


def _peak_program(
    values: tl.tensor, count: tl.tensor, peaks: tl.tensor, BLOCK: tl.constexpr, TILES: tl.constexpr
) -> None:
    """Writes the largest magnitude of each program's tiles, as the bits of an fp32 number; not-a-number is the largest."""
    most = tl.zeros((BLOCK,), tl.int32)
    for tile in range(TILES):
        at = (tl.program_id(0) * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
        bits = tl.load(values + at, at < count, other=0.0).to(tl.int32, bitcast=True)
        most = tl.maximum(most, bits & 0x7FFFFFFF)
    tl.store(peaks + tl.program_id(0), tl.max(most, 0))


def _extract_program(
    values: tl.tensor,
    count: tl.tensor,
    constants: tl.tensor,
    sums: tl.tensor,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Writes the sums of both pieces of the squares of each program's tiles to a row of ``sums`` ``(programs, 2)``."""
    first, second = tl.load(constants), tl.load(constants + 1)
    firsts, seconds = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for tile in range(TILES):
        at = (tl.program_id(0) * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
        wide = tl.load(values + at, at < count, other=0.0).to(tl.float64)
        square = wide * wide
        piece = (square + first) - first
        firsts += piece
        seconds += ((square - piece) + second) - second
    tl.store(sums + tl.program_id(0) * 2, tl.sum(firsts, 0))
    tl.store(sums + tl.program_id(0) * 2 + 1, tl.sum(seconds, 0))


_adamw = triton.jit(_adamw_program)
_peak = triton.jit(_peak_program)
_extract = triton.jit(_extract_program)


class GpuKernels(Kernels):
    """One pass over fp32 tensors, each contiguous, on a GPU."""

    def chunk_elements(self, device: torch.device) -> int:  # noqa: ARG002
        return _PIECE

    def adamw(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        means: list[Tensor],
        squares: list[Tensor],
        factors: UpdateFactors,
    ) -> None:
        for tensors in zip(*map(_pieces, (weights, grads, means, squares)), strict=True):
            count = tensors[0].numel()
            _adamw[(triton.cdiv(count, _BLOCK),)](
                *tensors, count, *factors, BLOCK=_BLOCK, enable_fp_fusion=False
            )

    def peak(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        pieces, rows = _rows(tensors)
        peaks = torch.empty(sum(rows), dtype=torch.int32, device=device)
        for piece, own in zip(pieces, torch.split(peaks, rows), strict=True):
            _peak[(len(own),)](piece, piece.numel(), own, BLOCK=_BLOCK, TILES=_TILES)
        if not rows:
            return torch.zeros((), dtype=torch.float64, device=device)
        return peaks.max().view(torch.float32).double()

    def extracted_sums(
        self, tensors: Sequence[Tensor], constants: tuple[float, float], device: torch.device
    ) -> Tensor:
        pieces, rows = _rows(tensors)
        sums = torch.empty((sum(rows), 2), dtype=torch.float64, device=device)
        # fp64: an argument would be fp32
        numbers = brought(torch.tensor(constants, dtype=torch.float64), device)
        for piece, own in zip(pieces, torch.split(sums, rows), strict=True):
            _extract[(len(own),)](
                piece, piece.numel(), numbers, own, BLOCK=_BLOCK, TILES=_TILES, enable_fp_fusion=False
            )
        return sums.sum(0)  # exact in any order


def _pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of all elements, each short enough for one launch."""
    return [piece for tensor in tensors for piece in torch.split(tensor.view(-1), _PIECE) if piece.numel()]


def _rows(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """The pieces, and the number of programs that go through each."""
    pieces = _pieces(tensors)
    return pieces, [triton.cdiv(piece.numel(), _BLOCK * _TILES) for piece in pieces]
