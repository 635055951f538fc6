"""The same kernels on a GPU, in Triton, which comes with PyTorch's CUDA builds.

``enable_fp_fusion=False`` keeps the compiler from making one rounding of a product and a sum; roots and quotients are computed in
their IEEE forms, since Triton's ``/`` on fp32 is an approximation. Sums are exact, so how programs add theirs up does not matter.

One launch takes all tensors: a launch costs the host some 20 to 40 us, and a model has hundreds of tensors. Each row of a table on the GPU
has a tensor's addresses, and each program finds its row by bisection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.hardware.kernels.reference import Kernels, SpanRun, UpdateFactors
from phalanx.hardware.local.device import brought

_BLOCK = 1024
_TILES = 16
"""Blocks that one program goes through."""
_PIECE = 1 << 26
"""Elements of one row of a table, so that 32-bit offsets suffice."""
_UNITS = (16, 1)
"""Rows whose addresses and lengths are multiples of 16 are loaded four elements at a time, in a launch of their own."""


def _find_row(table: tl.tensor, rows: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return the last row of ``table`` (``WIDTH`` columns) whose first program, in column 0, is not after this one, by binary search."""
    low, high = rows * 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        is_below = tl.load(table + middle * WIDTH) <= tl.program_id(0)
        low, high = tl.where(is_below, middle, low), tl.where(is_below, high, middle)
    return low


def _column(row: tl.tensor, column: tl.constexpr) -> tl.tensor:
    """Return a pointer to a tensor's first element."""
    return tl.load(row + column).to(tl.pointer_type(tl.float32))


def _elements_at(first: tl.tensor, at: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """Return pointers to elements, with what divides the address of the first, which the compiler cannot know."""
    return tl.multiple_of(first + at, UNIT)


_row_of = triton.jit(_find_row)
_tensor = triton.jit(_column)
_elements = triton.jit(_elements_at)


def _adamw_program(
    table: tl.tensor,
    rows: tl.tensor,
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
    TILES: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    """Update in place the tensors of a table ``(rows, 6)``: first program, elements, and addresses of weights,
    gradients and moments.
    """
    row = table + _row_of(table, rows, 6) * 6
    count = tl.load(row + 1).to(tl.int32) * UNIT
    weights, grads, means, squares = _tensor(row, 2), _tensor(row, 3), _tensor(row, 4), _tensor(row, 5)
    first = (tl.program_id(0) - tl.load(row).to(tl.int32)) * TILES
    for tile in range(TILES):
        at = (first + tile) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        means_at, squares_at = _elements(means, at, UNIT), _elements(squares, at, UNIT)
        weights_at = _elements(weights, at, UNIT)
        grad = tl.load(_elements(grads, at, UNIT), inside) * scale
        mean = tl.load(means_at, inside) * keep_mean + grad * new_mean
        square = tl.load(squares_at, inside) * keep_square + grad * grad * new_square
        tl.store(means_at, mean, inside)
        tl.store(squares_at, square, inside)
        change = tl.div_rn(mean, tl.div_rn(tl.sqrt_rn(square), root) + eps) * rate
        tl.store(weights_at, tl.load(weights_at, inside) * decay - change, inside)


def _peak_program(
    table: tl.tensor,
    rows: tl.tensor,
    peaks: tl.tensor,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    """Write the largest magnitude of each program's tiles, as the bits of an fp32 number; not-a-number is the largest."""
    row = table + _row_of(table, rows, 3) * 3
    count = tl.load(row + 1).to(tl.int32) * UNIT
    values = _tensor(row, 2)
    first = (tl.program_id(0) - tl.load(row).to(tl.int32)) * TILES
    most = tl.zeros((BLOCK,), tl.int32)
    for tile in range(TILES):
        at = (first + tile) * BLOCK + tl.arange(0, BLOCK)
        bits = tl.load(_elements(values, at, UNIT), at < count, other=0.0).to(tl.int32, bitcast=True)
        most = tl.maximum(most, bits & 0x7FFFFFFF)
    tl.store(peaks + tl.program_id(0), tl.max(most, 0))


def _extract_program(
    table: tl.tensor,
    rows: tl.tensor,
    constants: tl.tensor,
    sums: tl.tensor,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    """Write the sums of both pieces of the squares of each program's tiles to a row of ``sums`` ``(programs, 2)``."""
    row = table + _row_of(table, rows, 3) * 3
    count = tl.load(row + 1).to(tl.int32) * UNIT
    values = _tensor(row, 2)
    begin = (tl.program_id(0) - tl.load(row).to(tl.int32)) * TILES
    first, second = tl.load(constants), tl.load(constants + 1)
    firsts, seconds = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for tile in range(TILES):
        at = (begin + tile) * BLOCK + tl.arange(0, BLOCK)
        wide = tl.load(_elements(values, at, UNIT), at < count, other=0.0).to(tl.float64)
        square = wide * wide
        piece = (square + first) - first
        firsts += piece
        seconds += ((square - piece) + second) - second
    tl.store(sums + tl.program_id(0) * 2, tl.sum(firsts, 0))
    tl.store(sums + tl.program_id(0) * 2 + 1, tl.sum(seconds, 0))


# ``rows`` is not specialized: Triton would compile separate programs for tables of one row and of multiples of sixteen.
_adamw = triton.jit(_adamw_program, do_not_specialize=["rows"])
_peak = triton.jit(_peak_program, do_not_specialize=["rows"])
_extract = triton.jit(_extract_program, do_not_specialize=["rows"])


class GpuKernels(Kernels):
    """One pass over fp32 tensors, each contiguous, on a GPU."""

    def chunk_elements(self, device: torch.device) -> int:  # noqa: ARG002
        return 1 << 62  # any number, in one launch

    def adamw(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        means: list[Tensor],
        squares: list[Tensor],
        factors: UpdateFactors,
    ) -> None:
        """Update ``weights``, ``means`` and ``squares`` in place by one step of AdamW, in at most one launch for each
        alignment. All are fp32, contiguous, and on one GPU.
        """
        device = weights[0].device if weights else torch.device("cpu")
        for launch in _launches((weights, grads, means, squares), device):
            _adamw[(launch.programs,)](
                *(launch.table, launch.rows, *factors),
                *(_BLOCK, _TILES, launch.unit),
                enable_fp_fusion=False,
            )

    def peak(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the largest magnitude of all elements, 0-dim fp64 on ``device``; NaN if any is not a number, 0 without
        elements.
        """
        peaks = [torch.zeros(1, dtype=torch.int32, device=device)]
        for launch in _launches((tensors,), device):
            peaks.append(torch.empty(launch.programs, dtype=torch.int32, device=device))
            _peak[(launch.programs,)](launch.table, launch.rows, peaks[-1], _BLOCK, _TILES, launch.unit)
        return torch.cat(peaks).max().view(torch.float32).double()

    def extracted_sums(
        self, tensors: Sequence[Tensor], constants: tuple[float, float], device: torch.device
    ) -> Tensor:
        """Return the sums of both exact pieces of all squares, fp64 ``(2,)`` on ``device``; zeros without elements.
        See ``extraction_constants``.
        """
        sums = [torch.zeros((1, 2), dtype=torch.float64, device=device)]
        # fp64: an argument would be fp32
        numbers = brought(torch.tensor(constants, dtype=torch.float64), device)
        for launch in _launches((tensors,), device):
            sums.append(torch.empty((launch.programs, 2), dtype=torch.float64, device=device))
            _extract[(launch.programs,)](
                *(launch.table, launch.rows, numbers, sums[-1]),
                *(_BLOCK, _TILES, launch.unit),
                enable_fp_fusion=False,
            )
        return torch.cat(sums).sum(0)  # exact in any order


@dataclass(frozen=True)
class _Launch:
    """A launch over rows of tensors."""

    table: Tensor
    """``(rows, 2 + columns)``, int64, on the GPU: first program of the row, its elements over ``unit``, and the addresses of its tensors."""
    rows: int
    programs: int
    unit: int


def _launches(columns: Sequence[Sequence[Tensor]], device: torch.device) -> Iterator[_Launch]:
    """Yield a launch over all aligned rows, and one over the others. The n-th tensors of all columns belong together.

    Raises ``ValueError`` for a tensor elsewhere: an address of the host's memory would end every later call to the GPU.
    """
    rows: dict[int, list[tuple[int, ...]]] = {unit: [] for unit in _UNITS}
    programs = dict.fromkeys(_UNITS, 0)
    for tensors in zip(*columns, strict=True):
        if any(tensor.device != device for tensor in tensors):
            raise ValueError(
                f"tensors on {', '.join(str(tensor.device) for tensor in tensors)}, not on {device}"
            )
        addresses, count = [tensor.data_ptr() for tensor in tensors], tensors[0].numel()
        for first in range(0, count, _PIECE):
            length = min(_PIECE, count - first)
            numbers = (length, *(address + 4 * first for address in addresses))
            unit = next(unit for unit in _UNITS if not any(number % unit for number in numbers))
            rows[unit].append((programs[unit], length // unit, *numbers[1:]))
            programs[unit] += triton.cdiv(length, _BLOCK * _TILES)
    for unit, entries in rows.items():
        if entries:
            table = brought(torch.tensor(entries, dtype=torch.int64), device)
            yield _Launch(table, len(entries), programs[unit], unit)


# Addition of a gradient to an integer sum in bins (``phalanx.parallel.reduction.reproducible_sums``), in one pass over memory.
#
# The operations are those of ``bins.c``. A program takes several spans of one size, which is a power of two.

_TILE = 1024
"""Elements of one program."""


def _nearest_integer(x: tl.tensor) -> tl.tensor:
    """Return fp32 numbers rounded to the nearest integer, ties to even: from 2^23 on they are integers."""
    size = tl.abs(x)
    rounded = tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size)
    return tl.where(x < 0, -rounded, rounded)


def _power_of_two(exponent: tl.tensor) -> tl.tensor:
    """Return powers of two as normal fp32 numbers."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


_round = triton.jit(_nearest_integer)
_power = triton.jit(_power_of_two)


def _add_program(
    gradient: tl.tensor,
    words: tl.tensor,
    tops: tl.tensor,
    gradient_stride: tl.tensor,
    elements: tl.tensor,
    all_spans: tl.tensor,
    first_element: tl.tensor,
    first_span: tl.tensor,
    spans: tl.tensor,
    width: tl.tensor,
    SIZE: tl.constexpr,
    SPANS: tl.constexpr,
) -> None:
    """Add ``SPANS`` spans of one share's gradient to words ``(shares, 2, elements)`` and tops ``(shares, spans)``, in
    place. The program's numbers are the spans' and the share's.
    """
    share = tl.program_id(1).to(tl.int64)
    span = tl.program_id(0).to(tl.int64) * SPANS + tl.arange(0, SPANS)
    is_span = span < spans
    inside = is_span[:, None] & (tl.arange(0, SIZE) < SIZE)[None, :]
    at = first_element + span[:, None] * SIZE + tl.arange(0, SIZE)[None, :]  # (SPANS, SIZE)
    x = tl.load(gradient + share * gradient_stride + at, inside, other=0.0)
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    peak = tl.max(size, 1)
    # The top of a span with this peak: magnitudes are below 2^exponent. Numbers below the normal ones are integers times 2^-149.
    small = (peak.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 275
    exponent = tl.where(peak >= 0x00800000, (peak >> 23) - 126, small)
    own = (exponent + 17 * width) // width - 16  # rounded down: the dividend is positive
    own = tl.where(peak == 0, -128, tl.where(peak >= 0x7F800000, 127, own))
    tops_at = tops + share * all_spans + first_span + span
    before = tl.load(tops_at, is_span, other=-128).to(tl.int32)
    top = tl.maximum(own, before)
    # Complete bins move down, and out. Zeros are the same in any bin.
    up = tl.where(before == -128, 0, top - before)[:, None]
    high_at = words + share * 2 * elements + at
    high = tl.load(high_at, inside, other=0)
    low = tl.load(high_at + elements, inside, other=0)
    low = tl.where(up == 0, low, tl.where(up == 1, high, tl.zeros_like(low)))
    high = tl.where(up == 0, high, tl.zeros_like(high))
    # In spans that are not finite, words count the slots in which an element was not.
    x = tl.where((top == 127)[:, None], (size >= 0x7F800000).to(tl.float32), x)
    power = tl.where((top == 127) | (top == -128), 0, -width * (top - 1))
    half = power >> 1  # the full factor can be outside of fp32
    scaled = x * _power(half)[:, None] * _power(power - half)[:, None]
    digit = _round(scaled)
    remainder = _round((scaled - digit) * _power(width))
    tl.store(high_at, high + digit.to(high.dtype), inside)
    tl.store(high_at + elements, low + remainder.to(low.dtype), inside)
    tl.store(tops_at, top.to(tl.int8), is_span)


_add = triton.jit(_add_program)


def add_to_bins(gradient: Tensor, words: Tensor, tops: Tensor, runs: Sequence[SpanRun], width: int) -> None:
    """Add ``gradient`` to words and tops on a GPU, in place, with one launch for each run; arguments as for
    ``phalanx.hardware.kernels.choose.BinKernel.add``.
    """
    for element, span, spans, size in runs:
        at_once = _TILE // size
        _add[(triton.cdiv(spans, at_once), len(gradient))](
            *(gradient, words, tops, gradient.stride(0), words.shape[-1], tops.shape[-1]),
            *(element, span, spans, width, size, at_once),
            enable_fp_fusion=False,
        )
