"""Sums and softmax have the bits of their definition, on any number of threads and with any other numbers beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from phalanx.hardware.portable.library import operations
from phalanx.hardware.portable.operations import unfit_processor

pytestmark = pytest.mark.skipif(bool(unfit_processor()), reason="portable numerics needs AVX2, or 64-bit Arm")
PIECE, CHAIN = 4096, 256


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stated_row(row: NDArray[np.float32]) -> np.float32:
    """Sixteen sums of each piece, added in pairs; pieces one after the other."""
    total: np.float32 | None = None
    for first in range(0, len(row), PIECE):
        sums = np.zeros(16, np.float32)
        for place, number in enumerate(row[first : first + PIECE]):
            sums[place % 16] += number
        eight = sums[:8] + sums[8:]
        four = eight[:4] + eight[4:]
        two = four[:2] + four[2:]
        piece = two[0] + two[1]
        total = piece if total is None else np.float32(total + piece)
    return np.float32(0) if total is None else total


def stated_columns(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """Chains of 256 rows, one after the other."""
    total: NDArray[np.float32] | None = None
    for first in range(0, len(matrix), CHAIN):
        chain = np.zeros(matrix.shape[1], np.float32)
        for row in matrix[first : first + CHAIN]:
            chain += row
        total = chain if total is None else total + chain
    return np.zeros(matrix.shape[1], np.float32) if total is None else total


@pytest.mark.parametrize("width", [1, 15, 16, 17, 4095, 4096, 4097, 9000])
def test_a_row_is_sixteen_sums_of_each_piece(width: int) -> None:
    rows = numbers(3, width)
    row_sums = operations().sum.dim_IntList(rows, [1])
    assert row_sums.tolist() == [stated_row(row) for row in rows.numpy()]
    assert operations().sum(rows[0]) == stated_row(rows[0].numpy())


@given(rows=st.integers(1, 600), columns=st.integers(2, 40))
def test_columns_are_chains_of_rows(rows: int, columns: int) -> None:
    matrix = numbers(rows, columns)
    column_sums = operations().sum.dim_IntList(matrix, [0])
    assert np.array_equal(column_sums.numpy(), stated_columns(matrix.numpy()))


def test_bf16_is_added_in_fp32_and_rounded_once() -> None:
    matrix = numbers(300, 70).bfloat16()
    wide = matrix.float().numpy()
    ours = operations().sum.dim_IntList
    rows = torch.tensor(np.array([stated_row(row) for row in wide]))
    assert torch.equal(ours(matrix, [1]), rows.bfloat16())
    assert torch.equal(ours(matrix, [0]), torch.tensor(stated_columns(wide)).bfloat16())


@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    data=st.data(),
)
def test_a_sum_does_not_depend_on_how_its_numbers_lie_in_memory(
    shape: list[int], data: st.DataObject
) -> None:
    x = numbers(*shape) * 1e3
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True))
    order = data.draw(st.permutations(range(len(shape))))
    back = sorted(range(len(shape)), key=lambda d: order[d])
    lying = x.permute(order).contiguous().permute(back)
    ours = operations().sum.dim_IntList
    assert torch.equal(ours(lying, dims), ours(x, dims))


def computed() -> list[Tensor]:
    ours, matrix = operations(), numbers(700, 900)
    soft = ours._softmax(matrix, 1, False)
    return [
        ours.sum(matrix),
        ours.sum.dim_IntList(matrix, [0]),
        ours.sum.dim_IntList(matrix, [1]),
        ours.sum.dim_IntList(matrix.view(70, 10, 900), [1]),
        soft,
        ours._log_softmax(matrix, 1, False),
        ours._softmax_backward_data(matrix, soft, 1, torch.float32),
        ours.exp(matrix),
        ours.silu_backward(matrix, matrix),
    ]


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_change_no_bit(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = computed()
        torch.set_num_threads(threads)
        together = computed()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(first, second) for first, second in zip(alone, together, strict=True))


@given(rows=st.integers(1, 20), width=st.integers(1, 70), row=st.integers(0, 19))
def test_a_row_of_a_softmax_does_not_depend_on_other_rows(rows: int, width: int, row: int) -> None:
    scores, ours = numbers(rows, width), operations()
    place = row % rows
    for name in ("_softmax", "_log_softmax"):
        soft = getattr(ours, name)
        assert torch.equal(soft(scores, 1, False)[place], soft(scores[place], 0, False))


@given(width=st.integers(1, 70), more=st.integers(1, 40))
def test_keys_that_are_masked_behind_a_row_change_no_bit_of_its_softmax(width: int, more: int) -> None:
    scores = numbers(width)
    padded = torch.cat((scores, torch.full((more,), -torch.inf)))
    soft = operations()._softmax
    assert torch.equal(soft(padded, 0, False)[:width], soft(scores, 0, False))


@pytest.mark.parametrize("dimensions", [[0], [1], [0, 1]])
def test_a_part_of_a_tensor_has_the_sums_and_the_softmax_of_its_copy(dimensions: list[int]) -> None:
    matrix = numbers(9, 40)
    part = matrix[3:7, 5:29]
    sums = operations().sum.dim_IntList(part, dimensions)
    assert torch.equal(sums, operations().sum.dim_IntList(part.clone(), dimensions))
    assert torch.equal(operations()._softmax(part, 0, False), operations()._softmax(part.clone(), 0, False))
    assert torch.equal(
        operations().sum(matrix.flatten()[90:100]), operations().sum(matrix.flatten()[90:100].clone())
    )
