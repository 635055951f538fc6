"""Numbers of eight bits with scales: how a tensor is quantized, and the exact way back.

Elements that share a scale (all, a row's, or 32 neighbors) are divided by it, so that the largest of them comes within the format's range.
Scales are powers of two: dividing by one rounds nothing, and a quantized number is exact in bf16. Training multiplies in such formats
(``phalanx.train.precision``), and weights are stored in them (``phalanx.checkpoint.pack``). The blocks of 32 are those of OCP
Microscaling (arXiv 2310.10537), whose int8 has a fixed point; here its numbers are whole.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Scaling = Literal["tensor", "row", "block"]

SHARING = 32
"""Neighbors that share a scale when scaling is by "block"."""


class Quantized(NamedTuple):
    """Narrow numbers ``(..., r, k)`` and their scales: the value of an element is ``values * scale``.

    ``scale`` is fp32: ``(..., 1, 1)`` by tensor, ``(..., r, 1)`` by row, ``(..., r, k / 32)`` by block.
    """

    values: Tensor
    scale: Tensor


def quantize(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> Quantized:
    """Quantizes ``x`` ``(..., r, k)`` to an 8-bit floating-point format or int8; by block, ``k`` must be a multiple of 32.

    An element that is not finite makes all elements that share its scale not finite (int8 has no such numbers: refuse them before).
    """
    # Every size is said: of a tensor without rows, a view cannot find one by itself.
    grouped = x.view(*x.shape[:-1], x.shape[-1] // SHARING, SHARING) if scaling == "block" else x
    largest = grouped.abs().amax(dim=(-2, -1) if scaling == "tensor" else -1, keepdim=True)
    # -128 is left out: a range that is not symmetric would move the mean.
    limit = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    scale = _scale(largest, limit)
    scaled = grouped.float() / scale
    values = (scaled if dtype.is_floating_point else scaled.round()).to(dtype)
    return (
        Quantized(values.flatten(-2), scale.squeeze(-1)) if scaling == "block" else Quantized(values, scale)
    )


def _scale(largest: Tensor, limit: float) -> Tensor:
    """The least power of two that brings ``largest`` within ``limit``; infinite if ``largest`` is."""
    # On the bits of the quotient: adding a mantissa's largest value carries into the exponent unless the mantissa is zero.
    # Logarithms and powers would round differently from device to device.
    bits = (largest.float() / limit).view(torch.int32)
    exponent = ((bits + 0x7FFFFF) >> 23).clamp(1, 255)
    return (exponent << 23).view(torch.float32)


def dequantize(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """Converts back, exactly, to ``dtype``, which is fp32 or bf16."""
    values, scale = quantized
    # Each scale belongs to as many neighbors as there are columns for it.
    groups = scale.shape[-1]
    parts = values.to(dtype).view(*values.shape[:-1], groups, values.shape[-1] // groups)
    return (parts * scale.to(dtype).unsqueeze(-1)).flatten(-2)
