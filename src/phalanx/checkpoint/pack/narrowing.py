"""Bytes of packed tensors from fp32 weights, and tensors back from the bytes: rounding, scales, and what they have changed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.checkpoint.format.shards import torch_dtype
from phalanx.checkpoint.pack.index import PackError, Rounding
from phalanx.checkpoint.pack.layout import SHARING, PackedTensor
from phalanx.model.narrow import quantize

_EXPONENT_BITS = 23


def narrowed(weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Elements ``(r, k)`` in an 8-bit ``dtype``, and the exponents of their scales ``(r, k / 32 rounded up)``, uint8."""
    columns = weights.shape[-1]
    values, scale = quantize(F.pad(weights, (0, -columns % SHARING)), dtype, "block")
    exponents = (scale.view(torch.int32) >> _EXPONENT_BITS).to(torch.uint8)
    return values[:, :columns], exponents


def widened(values: Tensor, exponents: Tensor, out: Tensor) -> None:
    """Writes the elements ``(r, k)`` of ``values`` with the scales of these ``exponents`` into ``out``, fp32 or bf16, exactly."""
    scale = (exponents.to(torch.int32) << _EXPONENT_BITS).view(torch.float32).to(out.dtype)
    out.copy_(values)
    columns = out.shape[-1]
    together = columns // SHARING * SHARING
    if together:
        shared = out.as_strided((len(out), together // SHARING, SHARING), (out.stride(0), SHARING, 1))
        shared.mul_(scale[:, : together // SHARING, None])
    if together < columns:
        out[:, together:].mul_(scale[:, -1:])


def tensor_in(section: Tensor, place: PackedTensor) -> Tensor:
    """The elements of a packed tensor as a view of its section's bytes (uint8), without their scales."""
    flat = section[place.start : place.start + place.nbytes].view(torch_dtype(place.dtype))
    return flat.view(place.shape)


def write_wide(section: Tensor, place: PackedTensor, out: Tensor) -> None:
    """Writes a packed tensor in ``out``'s dtype into ``out``, whose shape is the tensor's."""
    stored = tensor_in(section, place)
    if place.scale_start is None:
        out.copy_(stored)
        return
    count = math.prod(place.scale_shape)
    exponents = section[place.scale_start : place.scale_start + count].view(place.scale_shape)
    widened(stored, exponents, out)


@dataclass(slots=True)
class RoundingMeter:
    """Adds up how far stored weights are from the fp32 ones, tensor by tensor."""

    _sums: dict[str, tuple[float, float]] = field(default_factory=dict)

    def stored(self, name: str, weights: Tensor, dtype: torch.dtype) -> list[bytes]:
        """The bytes of fp32 ``weights`` in ``dtype``: elements, and the exponents of scales if there are any.

        Raises PackError for numbers that the format does not have.
        """
        if dtype == torch.float32:
            self._add(name, 0.0, 1.0)
            return [_bytes(weights)]
        if not torch.isfinite(weights.sum()) and not torch.isfinite(weights).all():
            raise PackError(
                f"{name}: weights that are not finite (NaN or infinite) cannot be rounded; take an earlier step"
            )
        if dtype.itemsize == 1:
            values, exponents = narrowed(weights, dtype)
            back = torch.empty_like(weights)
            widened(values, exponents, back)
            parts = [_bytes(values), _bytes(exponents)]
        else:
            values = weights.to(dtype)
            back = values.float()
            if torch.isinf(back).any():
                raise PackError(f"{name}: {float(weights.abs().max()):g} is beyond {dtype}; pack as fp32")
            parts = [_bytes(values)]
        norm = float(torch.linalg.vector_norm(weights, dtype=torch.float64)) ** 2
        error = float(torch.linalg.vector_norm(back.sub_(weights), dtype=torch.float64)) ** 2
        self._add(name, error, norm)
        return parts

    def _add(self, name: str, error: float, norm: float) -> None:
        before = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (before[0] + error, before[1] + norm)

    def result(self) -> Rounding:
        """The errors of all that was stored."""
        relative = {name: math.sqrt(error / norm) for name, (error, norm) in self._sums.items() if norm}
        worst = max(relative, key=relative.__getitem__, default="")
        lossy = [sums for sums in self._sums.values() if sums[0]]
        total = math.sqrt(sum(s[0] for s in lossy) / sum(s[1] for s in lossy)) if lossy else 0.0
        return Rounding(total, relative.get(worst, 0.0), worst if lossy else "")


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
