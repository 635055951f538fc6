"""The checksum of gradients: every bit counts, nothing else does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.model.init import random_words, stream_key
from phalanx.parallel.reduction.checksum import named_checksum, piece_checksum, total_checksum

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)


def slot_checksum(gradients: dict[str, torch.Tensor]) -> int:
    """The checksum of a slot's gradient, by name of the parameter."""
    return total_checksum([named_checksum(name, gradient) for name, gradient in gradients.items()])


def noise(elements: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8, generator=random)
    return data.view(dtype)


def flipped(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    copy = tensor.clone()
    copy.view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)
    return copy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit_of_a_small_tensor_changes_the_checksum_in_its_own_way(dtype: torch.dtype) -> None:
    tensor = noise(37, dtype)
    bits = 37 * dtype.itemsize * 8
    sums = {slot_checksum({"w": flipped(tensor, bit)}) for bit in range(bits)}
    assert len(sums | {slot_checksum({"w": tensor})}) == bits + 1


@given(st.integers(1, 400_000), st.sampled_from(DTYPES), st.data())
def test_any_flipped_bit_of_any_tensor_changes_the_checksum(
    elements: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = noise(elements, dtype)
    bit = data.draw(st.integers(0, elements * dtype.itemsize * 8 - 1))
    assert slot_checksum({"w": tensor}) != slot_checksum({"w": flipped(tensor, bit)})


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=20))
def test_the_checksum_of_a_short_tensor_is_the_sum_of_the_docstring(words: list[int]) -> None:
    def odd(stream: str, index: int) -> int:
        key = stream_key(0, f"checksum {stream}")
        return int(random_words(key, torch.tensor([index]))[0]) | 1

    signed = [word - (1 << 64) if word >> 63 else word for word in words]
    length = 8 * len(words)
    total = sum((word ^ word >> 32) * odd("column", i) for i, word in enumerate(words)) * odd("row", 0)
    expected = (total + length * odd("length", length)) * odd("w", 0) % (1 << 64)
    assert slot_checksum({"w": torch.tensor(signed, dtype=torch.int64)}) == expected


@given(st.integers(1, 600_000), st.integers(1, 6))
def test_chunks_do_not_show(elements: int, rows: int) -> None:
    tensor = noise(elements, torch.float32)
    assert named_checksum("w", tensor, rows_at_once=rows) == named_checksum("w", tensor)


def test_strides_and_alignment_do_not_show() -> None:
    tensor = noise(1001, torch.float32)
    shifted = torch.cat((torch.zeros(1), tensor))[1:]
    spread = torch.stack((tensor, tensor), 1)[:, 0]
    assert named_checksum("w", tensor) == named_checksum("w", shifted) == named_checksum("w", spread)


def test_words_that_trade_places_and_errors_that_cancel_show() -> None:
    tensor = noise(20_000, torch.float64).view(torch.int64)
    for left, right in ((0, 1), (5, 4096 + 5), (4096, 1)):
        swapped = tensor.clone()
        swapped[left], swapped[right] = tensor[right], tensor[left]
        moved = tensor.clone()
        moved[left] += 1
        moved[right] -= 1
        assert len({slot_checksum({"w": t}) for t in (tensor, swapped, moved)}) == 3


@given(st.integers(0, 19_999), st.integers(0, 19_999), st.integers(0, 63))
def test_the_same_bit_flipped_in_two_words_shows(left: int, right: int, bit: int) -> None:
    tensor = noise(20_000, torch.float64)
    twice = flipped(flipped(tensor, 64 * left + bit), 64 * right + bit)
    assert (slot_checksum({"w": tensor}) == slot_checksum({"w": twice})) == (left == right)


def test_names_and_lengths_count() -> None:
    tensor = noise(64, torch.float32)
    longer = torch.cat((tensor, torch.zeros(2)))
    sums = {
        slot_checksum({"a": tensor, "b": longer}),
        slot_checksum({"a": longer, "b": tensor}),
        slot_checksum({"a": tensor, "b": tensor}),
        slot_checksum({"a": tensor}),
        slot_checksum({}),
    }
    assert len(sums) == 5


def test_minus_zero_is_not_zero() -> None:
    assert slot_checksum({"w": torch.tensor([0.0])}) != slot_checksum({"w": torch.tensor([-0.0])})


@given(st.data())
def test_the_pieces_of_a_tensor_add_up_to_its_checksum_however_it_is_cut(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3))
    dtype = data.draw(st.sampled_from(DTYPES))
    tensor = noise(math.prod(shape), dtype, data.draw(st.integers(0, 9))).view(shape)
    places = [torch.arange(size) for size in shape]
    full_checksum = piece_checksum("w", tensor, places, shape)
    if not shape:
        return
    dim = data.draw(st.integers(0, len(shape) - 1))
    order = torch.tensor(data.draw(st.permutations(range(shape[dim]))))
    cut = data.draw(st.integers(0, shape[dim]))
    pieces = [
        piece_checksum("w", tensor.index_select(dim, own), [*places[:dim], own, *places[dim + 1 :]], shape)
        for own in (order[:cut], order[cut:])  # also places that are not neighbors, as context ranks have
    ]
    assert total_checksum(pieces) == total_checksum([full_checksum])


def test_every_bit_place_and_name_counts_in_the_checksum_of_a_piece() -> None:
    tensor = noise(24, torch.float32)

    def checksum(part: torch.Tensor, name: str = "w") -> int:
        return total_checksum(
            [piece_checksum(name, part.view(4, 6), [torch.arange(4), torch.arange(6)], (4, 6))]
        )

    others = [checksum(flipped(tensor, bit)) for bit in range(24 * 32)]
    others += [checksum(tensor.flip(0)), checksum(tensor, "v")]
    assert len({checksum(tensor), *others}) == len(others) + 1
