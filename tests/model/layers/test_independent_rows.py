"""Experts whose rows are padded: a row's bits do not depend on the other rows of its expert."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx.model.layers.expert_groups import grouped_product, groups_of_one_slot, groups_of_slots
from phalanx.model.layers.moe import independent_product

_WIDTH, _OUT = 64, 96


def _product(rows: Tensor, matrices: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    rows = rows.clone().requires_grad_()
    out = independent_product(rows, matrices, groups_of_one_slot(torch.tensor(counts)))
    out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
    assert rows.grad is not None
    return out.detach(), rows.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 13), min_size=1, max_size=4).filter(any), st.data())
def test_a_row_has_the_same_bits_alone_as_among_others(
    dtype: torch.dtype, counts: list[int], data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(sum(counts), _WIDTH, generator=generator).to(dtype)
    matrices = torch.randn(len(counts), _OUT, _WIDTH, generator=generator).to(dtype)
    out, gradient = _product(rows, matrices, counts)
    row = data.draw(st.integers(0, len(rows) - 1))
    ends = torch.tensor(counts).cumsum(0)
    expert = int(torch.searchsorted(ends, row, right=True))
    alone, gradient_alone = _product(
        rows[row : row + 1], matrices, [int(number == expert) for number in range(len(counts))]
    )
    assert torch.equal(alone[0], out[row])
    assert torch.equal(gradient_alone[0], gradient[row])


@pytest.mark.parametrize("apart", [False, True])
def test_the_gradients_of_several_slots_are_those_of_the_unpadded_product(apart: bool) -> None:
    counts = torch.tensor([[3, 0], [5, 2], [0, 1]])
    groups = groups_of_slots(counts, counts.sum(1).tolist(), apart=apart)
    results = []
    for product in (grouped_product, independent_product):
        generator = torch.Generator().manual_seed(2)
        rows = torch.randn(11, _WIDTH, generator=generator).requires_grad_()
        matrices = torch.randn(3, _OUT, _WIDTH, generator=generator).requires_grad_()
        out = product(rows, matrices, groups)
        out.sum().backward()  # type: ignore[no-untyped-call]
        results.append((out, rows.grad, matrices.grad))
    for plain, padded in zip(*results, strict=True):
        torch.testing.assert_close(plain, padded, rtol=1e-5, atol=1e-4)
