"""Narrow formats for AdamW's moments, whose rounding no layout can change.

``bf16`` is rounded stochastically: up or down with probabilities that make the rounding right on average, because an
ordinary rounding would swallow the small change that a step makes to a running mean. The random bits are a function of
(seed, name, step, element), see ``phalanx.model.random_bits``.

``int8`` (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861) keeps a code of one byte per
element and the largest magnitude of every block. Blocks run along the last dimension of the whole parameter, so that they
do not move with the shards. The codes are the paper's dynamic ones, dense near zero; a second moment that is not zero is
never rounded to zero, or an element would be divided by epsilon alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.init import flat_indices
from phalanx.model.random_bits import random_words, stream_key
from phalanx.parallel.mesh.local_slice import LocalSlice
from phalanx.run.kinds.state_blocks import INT8_BLOCK


class Moments(Protocol):
    """One moment of what a rank holds of one parameter: ``(rows, columns)``, all leading dimensions being rows."""

    def read(self, rows: slice) -> Tensor:
        """The values of some rows, fp32."""

    def write(self, rows: slice, values: Tensor, number: int) -> None:
        """Rounds and keeps ``values``, those after step ``number``."""

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        """The tensors kept: name suffix, tensor ``(rows, n)``, and the number of the parameter's columns that one of its columns stands for."""


class Elements:
    """Flat indices, in the whole parameter, of the elements of a box's rows."""

    def __init__(self, whole: tuple[int, ...], box: LocalSlice, device: torch.device) -> None:
        offset, shape = box
        self._begin = flat_indices(whole, offset, (*shape[:-1], 1), device).reshape(-1, 1)
        self._columns = torch.arange(shape[-1], device=device)

    def of(self, rows: slice) -> Tensor:
        """``(rows, columns)``, int64."""
        return self._begin[rows] + self._columns


class Bf16Moments(Moments):
    """A moment in bf16, rounded stochastically; ``name`` is its own name."""

    def __init__(self, like: Tensor, elements: Elements, seed: int, name: str) -> None:
        self.values = torch.zeros_like(like, dtype=torch.bfloat16)
        self._elements, self._seed, self._name = elements, seed, name

    def read(self, rows: slice) -> Tensor:
        return self.values[rows].float()

    def write(self, rows: slice, values: Tensor, number: int) -> None:
        key = stream_key(self._seed, f"{self._name} after step {number}")
        self.values[rows] = stochastic_bf16(values, random_words(key, self._elements.of(rows)))

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        yield "", self.values, 1


def stochastic_bf16(values: Tensor, words: Tensor) -> Tensor:
    """``values`` (finite, fp32) in bf16: away from zero with probability equal to the part that bf16 cannot hold."""
    # bf16 is the upper half of fp32: adding 16 random bits to the lower half carries with just that probability.
    bits = values.contiguous().view(torch.int32) + (words & 0xFFFF).to(torch.int32)
    return (bits & -0x10000).view(torch.float32).to(torch.bfloat16)


class Int8Moments(Moments):
    """A moment as codes of one byte and a scale for every ``INT8_BLOCK`` elements of a row."""

    def __init__(self, like: Tensor, *, signed: bool) -> None:
        rows, self._columns = like.shape
        self._codebook, self._code_of = codebook(signed, like.device)
        self.codes = torch.full_like(like, dynamic_codes(signed).index(0.0), dtype=torch.uint8)
        self.scales = like.new_zeros((rows, math.ceil(self._columns / INT8_BLOCK)))

    def read(self, rows: slice) -> Tensor:
        codes = self.codes[rows]
        values = self._codebook.index_select(0, codes.view(-1).int()).view(codes.shape)
        return values.mul_(self._scale_of_elements(self.scales[rows]))

    def write(self, rows: slice, values: Tensor, number: int) -> None:  # noqa: ARG002
        blocks = F.pad(values, (0, -self._columns % INT8_BLOCK)).view(*self.scales[rows].shape, INT8_BLOCK)
        scales = blocks.abs().amax(-1)
        self.scales[rows] = scales
        # A block of zeros has scale 0; divided by 1 it stays zero.
        divisor = self._scale_of_elements(torch.where(scales == 0, 1.0, scales))
        keys = (values / divisor).to(torch.bfloat16).view(torch.int16).view(-1).int() & 0xFFFF
        self.codes[rows] = self._code_of.index_select(0, keys).view(values.shape)

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        yield "", self.codes, 1
        yield "_scale", self.scales, INT8_BLOCK

    def _scale_of_elements(self, scales: Tensor) -> Tensor:
        return scales.repeat_interleave(INT8_BLOCK, -1)[:, : self._columns]


@functools.cache
def dynamic_codes(signed: bool) -> tuple[float, ...]:
    """The 256 numbers in [-1, 1], or [0, 1], that a code can stand for, ascending (arXiv 2110.02861, section 1.3).

    Decades from 1e-7 to 1; each has twice as many numbers, evenly spaced, as the one below.
    """
    positive = []
    for decade in range(7):
        count = 2 ** (decade if signed else decade + 1)
        width = 0.9 / count
        positive += [10.0 ** (decade - 6) * (0.1 + width * (i + 0.5)) for i in range(count)]
    negative = [-code for code in positive] if signed else []
    return tuple(sorted([*negative, 0.0, *positive, 1.0]))


@functools.cache
def codebook(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The number of each code, fp32 ``(256,)``, and the code next to each number in bf16, uint8 ``(65536,)``.

    A look-up takes a tenth of the time that a search among the codes would; between two codes lie many bf16 numbers.
    """
    numbers = torch.tensor(dynamic_codes(signed), dtype=torch.float32)
    bounds = (numbers[1:] + numbers[:-1]) / 2
    if not signed:
        bounds[0] = 0.0  # only zero itself is zero
    bf16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = torch.bucketize(bf16.nan_to_num(), bounds).to(torch.uint8)
    return numbers.to(device), codes.to(device)
