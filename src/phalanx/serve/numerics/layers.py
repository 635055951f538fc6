"""A probe of layers: whether the kernel that takes few rows through them has the bits that the model's modules give the same rows among many.

The model's own first layer is tried, with random states of several magnitudes and random results of its heads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.hardware.kernels.rows.attention import (
    PART,
    Chains,
    RowAttention,
    RowPlace,
    attended,
)
from phalanx.hardware.kernels.rows.layer import Affinity, LayerSteps
from phalanx.hardware.kernels.rows.product import BF16_CHAINS, row_kernel
from phalanx.model.block import Block
from phalanx.model.layers.attention.attention import Attention, CausalCore
from phalanx.model.layers.norm import RMSNorm
from phalanx.serve.engine.few_rows import FewRows

_LANES = 8
_MANY = 64
_NUMBERS = (1, 2, 3, 4, 5, 7, 8, 16, 33)
_LONGEST = 4096
_LARGE = 9
_GAINS, _SEEN = 64, 256
"""Rows of which each has a gain of its own, and elements of each that are looked at."""
_RESULTS, _MOST_HEADS = 1 << 21, 32
_PLAIN_HEADS: dict[str, Any] = {"query_norm": None, "key_norm": None, "width": _LANES, "rotated": 0}
ANY_CHAINS = Chains(PART, PART, PART, fuses_sum=False)
"""Where the order of additions is nobody's concern."""
_PLACES = (
    *range(0, _LONGEST, 13),
    *(border + beside for border in range(0, _LONGEST, 64) for beside in (-1, 0, 1)),
)


@torch.no_grad()
def keeps_bits(few: FewRows) -> bool:
    """Whether ``few`` rows have the bits of many in the first layer of its model."""
    model = few.model
    block = next(iter(model.blocks.values()))
    assert isinstance(block, Block)
    attention = block.attention
    assert isinstance(attention, Attention)
    assert block.attention_norm is not None
    if few.steps.dtype == torch.bfloat16 and not (_silu_holds(few) and _norm_holds(few)):
        return False
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.randint(-6, 5, (_MANY, 1), generator=generator).float().exp2()
    states = (torch.randn(_MANY, model.spec.dim, generator=generator) * magnitudes).to(few.steps.dtype)
    heads = torch.randn(1, model.spec.heads, _MANY, attention.head_dim, generator=generator).to(states.dtype)
    cos, sin = model.tables(torch.arange(_MANY), states.dtype, _MANY)[0]
    rows = states[None]
    begun = attention.projected((block.attention_norm(rows),), cos, sin)
    ended = _behind(block, rows, attention.result(heads))
    mixed = heads[0].transpose(0, 1).reshape(_MANY, -1)
    for number in _NUMBERS:
        part = slice(_MANY - number, _MANY)
        moved = states[part].clone()
        few.steps.go(-1, moved, None, cos[part], sin[part])
        found = few.steps.projected(number)
        if not all(torch.equal(one, other[:, :, part]) for one, other in zip(found, begun, strict=True)):
            return False
        few.steps.go(0, moved, mixed[part], cos[part], sin[part])
        if not torch.equal(moved, ended[0, part]):
            return False
    return True


def _silu_holds(few: FewRows) -> bool:
    """Whether the kernel has PyTorch's SiLU of every bf16 number. Few of them tell one exponential from another."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every.where(every.isfinite(), 0.0)
    one = torch.ones(_LANES, dtype=every.dtype)

    def of_first(column: Tensor | None, outputs: int = _LANES, inputs: int = _LANES) -> Affinity:
        matrix = torch.zeros(outputs, inputs, dtype=every.dtype)
        if column is not None:
            matrix[:, 0] = column
        return Affinity(matrix, None, BF16_CHAINS)

    nothing = of_first(None)
    layer = replace(
        few.steps.layers[0],
        query=nothing,
        key=nothing,
        value=nothing,
        output=nothing,
        gate=of_first(every, len(every)),
        up=of_first(torch.ones_like(every), len(every)),
        down=of_first(None, inputs=len(every)),
        attention_norm=one,
        ffn_norm=one,
        **_PLAIN_HEADS,
        eps=0.0,
    )
    kernel = row_kernel()
    assert kernel is not None
    steps, none = LayerSteps(kernel, [layer], 1), every.new_empty(1, 0)
    steps.go(0, one[None].clone(), torch.zeros_like(one[None]), none, none)
    return torch.equal(steps.activated(), F.silu(every).float())


def _norm_holds(few: FewRows) -> bool:
    """Whether the kernel has the norm of bf16 rows. A rounding before the last shows in one of some ten thousand numbers, so each row has a gain that brings its
    own as near as can be to the middle between two of bf16."""
    kernel, dim, eps = row_kernel(), few.model.spec.dim, few.steps.layers[0].eps
    assert kernel is not None
    generator, dtype = torch.Generator().manual_seed(0), torch.bfloat16
    seen = torch.randperm(dim, generator=generator)[:_SEEN]
    chosen = torch.zeros(len(seen), dim, dtype=dtype)
    chosen[torch.arange(len(seen)), seen] = 1.0
    first = Affinity(chosen[:_LANES], None, BF16_CHAINS)
    gains = 1 + torch.arange(128, dtype=torch.float64) / 128
    norm, none = RMSNorm(dim, eps).to(dtype).requires_grad_(False), torch.empty(1, 0, dtype=dtype)
    norm.weight.fill_(1.0)
    for _ in range(_GAINS * _SEEN // len(seen)):
        row = torch.randn(1, dim, generator=generator).to(dtype)
        unit = row[0].double() * (row.double().square().mean() + eps).rsqrt()
        parts = torch.frexp((unit[seen, None] * gains).abs()).mantissa * 256
        norm.weight[seen] = gains[(parts % 1 - 0.5).abs().argmin(1)].to(dtype)
        layer = replace(
            few.steps.layers[0],
            query=Affinity(chosen, None, BF16_CHAINS),
            key=first,
            value=first,
            attention_norm=norm.weight,
            **_PLAIN_HEADS,
        )
        steps = LayerSteps(kernel, [layer], 1)
        steps.go(-1, row.clone(), None, none, none)
        if not torch.equal(steps.projected(1)[0].flatten(), norm(row)[0, seen]):
            return False
    return True


def _behind(block: Block, x: Tensor, mixed: Tensor) -> Tensor:
    """The states ``(1, rows, dim)`` after a layer, from those before it and its attention's result."""
    x = x + mixed
    assert block.ffn_norm is not None
    inner: Tensor = block.ffn(block.ffn_norm(x))
    return x + inner


def attention_chains(few: FewRows, sequence: int) -> Chains | None:
    """The chains with which the kernel of few rows attends with the bits of PyTorch's over ``sequence`` tokens (0: not known), and over longer texts; ``None`` if
    none are found.

    PyTorch's kernel takes the exponentials of keys that are left over in a vector by another function, so a sequence has whole ones. They are sought in fp32, where each
    rounding shows. bf16 numbers are multiplied by the same library, widened, so their chains are the same, if they hold where roundings show in bf16 too."""
    like = few.attends(ANY_CHAINS)
    if sequence % _LANES or like is None:
        return None
    kind = TriedAttention(like.heads // like.kept, like.width, like.scale, few.steps.dtype)
    return _chains(kind, sequence, torch.get_num_threads())


@dataclass(frozen=True)
class TriedAttention:
    """What decides an attention's bits besides lengths: heads that read the same keys, their width, the factor of scores, and the format."""

    heads: int
    width: int
    scale: float
    dtype: torch.dtype


@functools.cache
@torch.no_grad()
def _chains(kind: TriedAttention, sequence: int, threads: int) -> Chains | None:  # noqa: ARG001  what is found holds for a number of threads
    lengths = [2 * PART, *([_tried_length(sequence)] if sequence else [])]
    found = _chains_in_fp32(replace(kind, dtype=torch.float32), lengths)
    if found is None or kind.dtype == torch.float32:
        return found
    # Roundings of a sum of weights show in one of some hundred thousand results.
    many = replace(kind, heads=min(_MOST_HEADS, _RESULTS // (lengths[0] * kind.width) + 1))
    if not Attended(many, lengths[0]).holds(found, range(lengths[0])):
        return None
    for length in lengths:
        cancelling = Attended(kind, length, cancels=True).holds(found, (PART - 1, length - 1))
        if not cancelling or not Attended(kind, length).holds(found, _PLACES):
            return None
    return found


def _chains_in_fp32(kind: TriedAttention, lengths: Sequence[int]) -> Chains | None:
    whole = (PART, PART // 2, 192, 384, *range(16, PART, 16))
    cases = [Attended(kind, length) for length in lengths]
    rest = lengths[-1] % PART
    last = (rest, (rest + 1) // 2, *whole) if rest else (PART,)
    for score in (kind.width, (kind.width + 1) // 2):
        for fuses in (True, False):
            for block in whole:
                if not cases[0].holds(Chains(score, block, PART, fuses), (300, 511, 700)):
                    continue
                for end in last:
                    chains = Chains(score, block, end, fuses)
                    if cases[-1].holds(chains, (lengths[-1] - 1,)) and all(
                        case.holds(chains, _PLACES) for case in cases
                    ):
                        return chains
    return None


def _tried_length(sequence: int) -> int:
    """A length that stands for ``sequence``: no longer than is tried, with as many keys in its last part."""
    return sequence if sequence <= _LONGEST else _LONGEST - -sequence % PART


class Attended:
    """Random queries, keys and values, and what PyTorch makes of a whole sequence of them."""

    def __init__(self, kind: TriedAttention, length: int, *, cancels: bool = False) -> None:
        """What ``cancels`` adds up to zero over all elements of a head, for scores, and over all keys of a part of 512: what is left are roundings."""
        self._kind, self._length = kind, length
        generator = torch.Generator().manual_seed(length)
        query, keys, values = (
            torch.randn(heads, length, kind.width, generator=generator) for heads in (kind.heads, 1, 1)
        )
        if cancels:
            _cancel(query, keys, values)
        else:
            # Some attend to all keys alike, others to few.
            query *= torch.randint(-3, 4, (kind.heads, length, 1), generator=generator).float().exp2()
        self._query, self._keys, self._values = (one.to(kind.dtype) for one in (query, keys, values))
        core = CausalCore(kind.scale)
        self._expected = core(self._query[None], self._keys[None], self._values[None])[0].transpose(0, 1)

    def holds(self, chains: Chains, places: Sequence[int]) -> bool:
        """Whether queries at these places have their bits."""
        kernel, kind = row_kernel(), self._kind
        assert kernel is not None
        tried = [place for place in places if 0 <= place < self._length]
        rows = [RowPlace(place, self._length) for place in tried]
        query = self._query[:, tried].transpose(0, 1)
        attention = RowAttention(kind.heads, 1, kind.width, kind.scale, chains, threads=1)
        found = attended(kernel, attention, query, self._keys, self._values, rows)
        return torch.equal(found, self._expected[tried])


def _cancel(query: Tensor, keys: Tensor, values: Tensor) -> None:
    """Makes the second half of a head's products, and of a part's values, the negatives of the first, in place: tensors ``(heads, length, width)``."""
    apart = query.shape[2] // 2
    # As large as lets the roundings of a score move its exponential.
    query[:, :, apart : 2 * apart] = query[:, :, :apart].mul_(2.0**_LARGE)
    keys[:, :, apart : 2 * apart] = -keys[:, :, :apart].mul_(2.0**_LARGE)
    for begin in range(0, keys.shape[1], PART):
        half = min(PART, keys.shape[1] - begin) // 2
        first, second = slice(begin, begin + half), slice(begin + half, begin + 2 * half)
        keys[:, second], values[:, second] = keys[:, first], -values[:, first]
