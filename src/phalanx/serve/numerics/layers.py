"""A probe of layers: whether the kernel that takes few rows through them has the bits that the model's modules give the same rows among many.

The model's own first layer is tried, with random states of several magnitudes and random results of its heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.hardware.kernels.rows.attention import PART, Chains, RowPlace, attended
from phalanx.hardware.kernels.rows.product import row_kernel
from phalanx.model.block import Block
from phalanx.model.layers.attention.attention import Attention, CausalCore
from phalanx.serve.engine.few_rows import FewRows

_LANES = 8
_MANY = 64
_NUMBERS = (1, 2, 3, 4, 5, 7, 8, 16, 33)
_LONGEST = 4096
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


def _behind(block: Block, x: Tensor, mixed: Tensor) -> Tensor:
    """The states ``(1, rows, dim)`` after a layer, from those before it and its attention's result."""
    x = x + mixed
    assert block.ffn_norm is not None
    inner: Tensor = block.ffn(block.ffn_norm(x))
    return x + inner


@torch.no_grad()
def attention_chains(few: FewRows, sequence: int) -> Chains | None:
    """The chains with which the kernel of few rows attends with the bits of PyTorch's over ``sequence`` tokens (0: not known), and over longer texts; ``None`` if
    none are found.

    PyTorch's kernel takes the exponentials of keys that are left over in a vector by another function, so a sequence has whole ones."""
    if sequence % _LANES or few.attends(Chains(PART, PART, PART, fuses_sum=False)) is None:
        return None
    whole = (PART, PART // 2, 192, 384, *range(16, PART, 16))
    lengths = [2 * PART, *([_tried_length(sequence)] if sequence else [])]
    cases = [_Attended(few, length) for length in lengths]
    rest = lengths[-1] % PART
    last = (rest, (rest + 1) // 2, *whole) if rest else (PART,)
    width = few.model.spec.head_dim
    for score in (width, (width + 1) // 2):
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


class _Attended:
    """Random queries, keys and values of a model's heads, and what PyTorch makes of a whole sequence of them."""

    def __init__(self, few: FewRows, length: int) -> None:
        self._few, self._length = few, length
        generator = torch.Generator().manual_seed(length)
        like = few.attends(Chains(PART, PART, PART, fuses_sum=False))
        assert like is not None
        group = like.heads // like.kept
        self._query, self._keys, self._values = (
            torch.randn(heads, length, like.width, generator=generator) for heads in (group, 1, 1)
        )
        # Some attend to all keys alike, others to few.
        self._query *= torch.randint(-3, 4, (group, length, 1), generator=generator).float().exp2()
        core = CausalCore(like.scale)
        self._expected = core(self._query[None], self._keys[None], self._values[None])[0].transpose(0, 1)
        self._like = replace(like, heads=group, kept=1)

    def holds(self, chains: Chains, places: Sequence[int]) -> bool:
        """Whether queries at these places have their bits."""
        kernel = row_kernel()
        assert kernel is not None
        tried = [place for place in places if 0 <= place < self._length]
        rows = [RowPlace(place, self._length) for place in tried]
        query = self._query[:, tried].transpose(0, 1)
        found = attended(kernel, replace(self._like, chains=chains), query, self._keys, self._values, rows)
        return torch.equal(found, self._expected[tried])
