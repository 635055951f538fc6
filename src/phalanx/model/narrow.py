"""8-bit numbers with scales: quantization, and exact dequantization.

Elements that share a scale (all, those of a row, or 32 neighbors) are divided by it, so that the largest is within the format's
range. Scales are powers of two: division by one is exact, and a quantized number is exact in bf16. Training multiplies in such formats
(``phalanx.train.precision``), and weights are stored in them (``phalanx.checkpoint.pack``). The blocks of 32 are those of
OCP Microscaling (arXiv 2310.10537). Its int8 is a fixed-point format; here int8 values are integers.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Scaling = Literal["tensor", "row", "block"]

SHARING = 32
"""Number of neighbors that share a scale with scaling "block"."""


class Quantized(NamedTuple):
    """Narrow numbers ``(..., r, k)`` and their scales: the value of an element is ``values * scale``.

    ``scale`` is fp32: ``(..., 1, 1)`` by tensor, ``(..., r, 1)`` by row, ``(..., r, k / 32)`` by block.
    """

    values: Tensor
    scale: Tensor


def quantize(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> Quantized:
    """Return ``x`` ``(..., r, k)`` in an 8-bit floating-point format or int8, with power-of-two scales by tensor,
    row, or block of 32, of which ``k`` must then be a multiple.

    An element that is not finite makes all elements with its scale not finite. int8 cannot represent these: check for
    them before.
    """
    # All sizes are explicit, because a view of an empty tensor cannot infer one.
    # (..., r, k / 32, 32) by block
    grouped = x.view(*x.shape[:-1], x.shape[-1] // SHARING, SHARING) if scaling == "block" else x
    largest = grouped.abs().amax(dim=(-2, -1) if scaling == "tensor" else -1, keepdim=True)
    # -128 is not used: an asymmetric range would shift the mean.
    limit = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    scale = _scale(largest, limit)
    scaled = grouped.float() / scale
    values = (scaled if dtype.is_floating_point else scaled.round()).to(dtype)
    # (..., r, k), and by block (..., r, k / 32)
    return (
        Quantized(values.flatten(-2), scale.squeeze(-1)) if scaling == "block" else Quantized(values, scale)
    )


def _scale(largest: Tensor, limit: float) -> Tensor:
    """Return the smallest power of two that brings ``largest`` within ``limit``; infinite if ``largest`` is not finite."""
    # Round up on the bits of the quotient: adding the largest mantissa carries into the exponent unless the mantissa is zero.
    # Logarithms and powers would round differently on different devices.
    # NaN has bits beyond those of infinity, to which the carry gives another sign.
    quotient = (largest.float() / limit).nan_to_num(nan=math.inf, posinf=math.inf)
    bits = quotient.view(torch.int32)
    exponent = ((bits + 0x7FFFFF) >> 23).clamp(1, 255)
    return (exponent << 23).view(torch.float32)


def dequantize(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the numbers ``(..., r, k)`` in ``dtype``, which is fp32 or bf16. The conversion is exact."""
    values, scale = quantized
    # Each scale belongs to as many neighbors as there are columns for it.
    groups = scale.shape[-1]
    # (..., r, scales of a row, their elements)
    parts = values.to(dtype).view(*values.shape[:-1], groups, values.shape[-1] // groups)
    return (parts * scale.to(dtype).unsqueeze(-1)).flatten(-2)  # (..., r, k)
