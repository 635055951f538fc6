"""The formats in which keys and values are kept: that of the computation, or eight bits with a power-of-two scale for 32 neighbors.

A narrow row is rounded when it is computed, in the request's own copy too, and rounding what was rounded changes nothing; so a token reads the same numbers
whether a page is its own, was held, or came from another worker. Latent attention's rotated part, which carries the positions, keeps the computation's format.
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

KeptName = Literal["compute", "int8", "fp8"]
"""What users write."""
_NARROW = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_MANTISSA = 23
_INFINITE = 255
"""The exponent of an infinite scale, which makes all that share it infinite or NaN."""


@dataclass(frozen=True)
class KeptFormat:
    """How the two tensors that a layer keeps of a token are kept: keys and values, or latents and rotated keys."""

    name: KeptName
    dtype: torch.dtype
    """The number format of the computation."""
    heads: int
    widths: tuple[int, int]
    narrow: tuple[bool, bool]

    def rounded(self, part: int, rows: Tensor) -> Tensor:
        """The numbers ``(..., width)`` that are kept of those computed."""
        return self.unpacked(part, self.packed(part, rows)) if self.narrow[part] else rows

    def packed(self, part: int, rows: Tensor) -> tuple[Tensor, ...]:
        """What is stored of ``(..., width)``: themselves, or eight bits each and the exponents ``(..., width / 32)`` of their scales."""
        if not self.narrow[part]:
            return (rows,)
        values, scale = quantize(rows, _NARROW[self.name], "block")
        exponents = (scale.view(torch.int32) >> _MANTISSA).to(torch.uint8)
        # Whole numbers have no NaN, and one must not become a zero that nobody hears of: the scale of its neighbors is infinite instead.
        finite = rows.isfinite().view(*rows.shape[:-1], -1, SHARING).all(-1)
        return values, exponents.masked_fill_(~finite, _INFINITE)

    def unpacked(self, part: int, stored: tuple[Tensor, ...]) -> Tensor:
        """The numbers that are stored so."""
        if not self.narrow[part]:
            return stored[0]
        values, exponents = stored
        return dequantize(
            Quantized(values, (exponents.to(torch.int32) << _MANTISSA).view(torch.float32)), self.dtype
        )

    def stores(self) -> Iterator[tuple[tuple[int, torch.dtype], ...]]:
        """Widths and formats of what is stored of a head's row, for each of the two tensors."""
        for width, narrow in zip(self.widths, self.narrow, strict=True):
            if narrow:
                yield (width, _NARROW[self.name]), (width // SHARING, torch.uint8)
            else:
                yield ((width, self.dtype),)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in a layer."""
        return self.heads * sum(width * dtype.itemsize for part in self.stores() for width, dtype in part)


def kept_as(name: KeptName, spec: ModelSpec, dtype: torch.dtype) -> KeptFormat:
    """The format ``name`` for a model that computes in ``dtype``. Raises EngineError for widths that have no whole blocks."""
    heads, first, second = attention_kind(spec).cache_row(spec)
    narrow = (name != "compute", name != "compute" and spec.mla is None)
    for width, rounds in zip((first, second), narrow, strict=True):
        if rounds and width % SHARING:
            what = "mla.kv_rank" if spec.mla is not None else "head_dim"
            raise EngineError(
                f"keys and values in {name} share a scale among {SHARING} neighbors, and model.{what} = {width} is no multiple of that: "
                "keep them in the format computed in (--kv compute)"
            )
    return KeptFormat(name, dtype, heads, (first, second), narrow)
