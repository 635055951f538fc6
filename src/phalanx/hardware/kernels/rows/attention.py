"""The kernel of ``attend.h``: attention of a few fp32 or bf16 rows, each to the keys and values of its own text.

It is called by the layer that it belongs to (``phalanx.hardware.kernels.rows.layer``), all rows and heads in the parallel region of that layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.hardware.kernels.rows.product import RowKernel

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_WIDENED = 64
"""Keys of another format than fp32 that a thread widens at a time."""
PART = 512
"""Keys that PyTorch's kernel takes at once."""


@dataclass(frozen=True)
class Chains:
    """By which blocks an attention's products add, each a chain of fused multiply-adds."""

    score: int
    """The block of a head's width, for a score."""
    whole: int
    """The block of 512 keys, for a sum of weighted values."""
    last: int
    """The block of the keys of a shorter last part."""
    fuses_sum: bool
    """Whether the sum of exponentials is carried from part to part by a fused multiply-add."""


@dataclass(frozen=True)
class RowPlace:
    """Where a row lies in its text."""

    position: int
    keys: int
    """Keys of its text with those that are hidden from it, a multiple of 512 or the last of them."""


class _Row(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("keys", "values")),
        *((name, _COUNT) for name in ("stride", "position", "last_block", "keys_in_all")),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        ("rows", _POINTER),
        *((name, _COUNT) for name in ("heads", "kept", "width", "score_block", "block", "fuses_sum")),
        ("scale", ctypes.c_float),
        ("scratch", _POINTER),
        *((name, _COUNT) for name in ("scratch_stride", "next")),
    )


def _scratch(elements: int) -> Tensor:
    return torch.empty(elements, dtype=torch.float32, device="cpu")  # whatever the process's defaults are


@dataclass
class RowAttention:
    """Attention of heads of one ``width``, whose scores are multiplied with ``scale``."""

    heads: int
    kept: int
    """Heads of keys and values, a divisor of ``heads``."""
    width: int
    """The width of a head, in whole vectors of eight."""
    scale: float
    chains: Chains
    threads: int
    _scratch: Tensor = field(default_factory=lambda: _scratch(0))

    def begin(self, places: Sequence[RowPlace]) -> RowTable:
        """A step of rows at these places, which has all that is the same in each layer."""
        longest = max(place.position for place in places) + 8
        group = self.heads // self.kept
        # A result, queries and scores of a group, and keys, all in fp32.
        stride = (1 + group + _WIDENED) * self.width + group * longest
        if self._scratch.numel() < self.threads * stride:
            self._scratch = _scratch(2 * self.threads * stride)
        chains = self.chains
        rows = (_Row * len(places))()
        for row, place in zip(rows, places, strict=True):
            row.position, row.keys_in_all, row.last_block = place.position, place.keys, chains.last
        made = _Attention(
            ctypes.addressof(rows), self.heads, self.kept, self.width, chains.score, chains.whole
        )
        made.fuses_sum, made.scale = chains.fuses_sum, self.scale
        made.scratch, made.scratch_stride = self._scratch.data_ptr(), self._scratch.numel() // self.threads
        return RowTable(rows, made)


class RowTable:
    """The rows of a step: where a layer keeps each one's keys and values."""

    def __init__(self, rows: ctypes.Array[_Row], made: _Attention) -> None:
        self._rows, self._made = rows, made
        self.address = ctypes.addressof(made)
        """What the layer's kernel reads."""

    def point(self, texts: Sequence[tuple[Tensor, Tensor, int]]) -> None:
        """Sets keys and values, each ``(kept, capacity, width)``, of texts that have so many rows each, in turn."""
        number = 0
        for keys, values, count in texts:
            first, second, stride = keys.data_ptr(), values.data_ptr(), keys.stride(0)
            for row in self._rows[number : number + count]:
                row.keys, row.values, row.stride = first, second, stride
            number += count


def attended(
    kernel: RowKernel,
    attention: RowAttention,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Sequence[RowPlace],
) -> Tensor:
    """The results ``(rows, heads, width)`` of rows of ``query`` ``(rows, heads, width)`` in one text, by one thread."""
    query = query.contiguous()
    table, mixed = attention.begin(places), torch.empty_like(query)
    table.point([(keys, values, len(places))])
    library = kernel.library
    call = library.half_attend_rows if query.dtype == torch.bfloat16 else library.attend_rows
    call.argtypes, call.restype = [_POINTER, _POINTER, _POINTER, _COUNT], None
    call(table.address, query.data_ptr(), mixed.data_ptr(), len(places))
    return mixed
