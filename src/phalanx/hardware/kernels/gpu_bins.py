"""Addition of a gradient to an integer sum in bins (``phalanx.parallel.reduction.reproducible_sums``) on a GPU, in one pass over memory, in Triton.

The same operations as in ``bins.c``. A program takes some spans of one size, which is a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from phalanx.hardware.kernels.reference import SpanRun

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
    """Add ``SPANS`` spans of one share, the program's second number, to words ``(shares, 2, elements)`` and tops
    ``(shares, spans)``.
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
    """Add to words and tops, in place. As ``phalanx.hardware.kernels.choose.BinKernel.add``."""
    for element, span, spans, size in runs:
        at_once = _TILE // size
        _add[(triton.cdiv(spans, at_once), len(gradient))](
            *(gradient, words, tops, gradient.stride(0), words.shape[-1], tops.shape[-1]),
            *(element, span, spans, width, size, at_once),
            enable_fp_fusion=False,
        )
