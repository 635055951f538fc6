"""Formats of the KV cache: that of the computation, or eight bits with a power-of-two scale for 32 neighbors.

A narrow row is rounded when it is computed, in the text's own copy too. A second rounding changes nothing, so a token reads the same numbers
whether a page is its own, was cached, or came from another worker. Latent attention's rotated part, which carries the positions, keeps the computation's format.
The blocks are those of ``phalanx.model.narrow`` (OCP Microscaling, arXiv 2310.10537).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from phalanx.model.narrow import SHARING, Quantized, dequantize, quantize
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.spec import ModelSpec
from phalanx.serve.engine.errors import EngineError

KVFormatName = Literal["compute", "int8", "fp8"]
"""The values of the option ``--kv``."""
_NARROW = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_MANTISSA = 23
_INFINITE = 255
"""The exponent of an infinite scale, which makes all that share it infinite or NaN."""


@dataclass(frozen=True)
class KVFormat:
    """Storage format of the two tensors of a layer: keys and values, or latents and rotated keys."""

    name: KVFormatName
    dtype: torch.dtype
    """The number format of the computation."""
    heads: int
    widths: tuple[int, int]
    narrow: tuple[bool, bool]

    def rounded(self, part: int, rows: Tensor) -> Tensor:
        """Round ``(..., width)`` as storing does."""
        return self.unpacked(part, self.packed(part, rows)) if self.narrow[part] else rows

    def packed(self, part: int, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the stored tensors of ``(..., width)``: itself, or eight bits each and the exponents ``(..., width / 32)`` of their scales."""
        if not self.narrow[part]:
            return (rows,)
        values, scale = quantize(rows, _NARROW[self.name], "block")
        exponents = (scale.view(torch.int32) >> _MANTISSA).to(torch.uint8)
        # Integers have no NaN, and a NaN must not become a zero silently: the scale of its neighbors is infinite instead.
        finite = rows.isfinite().view(*rows.shape[:-1], -1, SHARING).all(-1)
        return values, exponents.masked_fill_(~finite, _INFINITE)

    def unpacked(self, part: int, stored: tuple[Tensor, ...]) -> Tensor:
        """Return the numbers of stored tensors."""
        if not self.narrow[part]:
            return stored[0]
        values, exponents = stored
        return dequantize(
            Quantized(values, (exponents.to(torch.int32) << _MANTISSA).view(torch.float32)), self.dtype
        )

    def stores(self) -> Iterator[tuple[tuple[int, torch.dtype], ...]]:
        """Yield, for each of the two tensors, the widths and dtypes that are stored of a head's row."""
        for width, narrow in zip(self.widths, self.narrow, strict=True):
            if narrow:
                yield (width, _NARROW[self.name]), (width // SHARING, torch.uint8)
            else:
                yield ((width, self.dtype),)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in a layer."""
        return self.heads * sum(width * dtype.itemsize for part in self.stores() for width, dtype in part)


def kv_format(name: KVFormatName, spec: ModelSpec, dtype: torch.dtype) -> KVFormat:
    """Return the format ``name`` for a model that computes in ``dtype``. Raises EngineError for widths that are no multiple of a block."""
    heads, first, second = attention_kind(spec).cache_row(spec)
    narrow = (name != "compute", name != "compute" and spec.mla is None)
    for width, rounds in zip((first, second), narrow, strict=True):
        if rounds and width % SHARING:
            field_name = "mla.kv_rank" if spec.mla is not None else "head_dim"
            raise EngineError(
                f"keys and values in {name} share a scale among {SHARING} neighbors, and model.{field_name} = {width} is no multiple of that: "
                "keep them in the format computed in (--kv compute)"
            )
    return KVFormat(name, dtype, heads, (first, second), narrow)
