"""Portable products have the bits of their definition, with any other rows beside them and in any layout in memory."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.hardware.portable.library import operations
from phalanx.hardware.portable.operations import unfit_processor

pytestmark = pytest.mark.skipif(bool(unfit_processor()), reason="portable numerics needs AVX2, or 64-bit Arm")
SIZES = st.integers(1, 40)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    product: Tensor = (operations().mm if left.dim() == 2 else operations().bmm)(left, right)
    return product


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """``(b, h, q, v)`` and the logarithms of denominators ``(b, h, q)``."""
    results: tuple[Tensor, Tensor] = operations()._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=scale
    )
    return results


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounded(exact: Fraction) -> np.float32:
    """The fp32 number nearest to ``exact``, the even one of two: a double first would round twice."""
    near = np.float32(float(exact))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) % 2))


def stated(row: Tensor, column: Tensor) -> np.float32:
    """One element of a product by its definition: chains of 256 fused multiply-adds, added one after the other."""
    total: np.float32 | None = None
    for first in range(0, len(row), 256):
        chain = np.float32(0)
        for a, b in zip(row[first : first + 256].tolist(), column[first : first + 256].tolist(), strict=True):
            chain = rounded(Fraction(a) * Fraction(b) + Fraction(float(chain)))
        total = chain if total is None else np.float32(total + chain)
    assert total is not None
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_element_is_its_chains_of_fused_multiply_adds_added_in_order(dtype: torch.dtype) -> None:
    left, right = numbers(7, 600, dtype=dtype), numbers(600, 17, seed=1, dtype=dtype)
    product = multiply(left, right)
    for i, j in ((0, 0), (6, 16), (3, 9)):
        expected = torch.tensor(stated(left[i].float(), right[:, j].float())).to(dtype)
        assert product[i, j] == expected


@given(
    rows=SIZES,
    columns=SIZES,
    depth=st.integers(0, 530),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_product_is_near_that_of_doubles(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    left, right = numbers(rows, depth, dtype=dtype), numbers(depth, columns, seed=1, dtype=dtype)
    exact = left.double() @ right.double()
    allowed = (left.double().abs() @ right.double().abs()) * (2**-20 if dtype == torch.float32 else 2**-8)
    assert ((multiply(left, right).double() - exact).abs() <= allowed + 1e-30).all()


@given(rows=st.integers(1, 120), columns=st.integers(1, 70), data=st.data())
def test_an_element_does_not_depend_on_what_is_computed_beside_it(
    rows: int, columns: int, data: st.DataObject
) -> None:
    left, right = numbers(rows, 300), numbers(300, columns, seed=1)
    top, bottom = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    start, end = sorted(data.draw(st.tuples(st.integers(0, columns), st.integers(0, columns))))
    assert torch.equal(
        multiply(left, right)[top:bottom, start:end], multiply(left[top:bottom], right[:, start:end])
    )


@given(rows=SIZES, columns=SIZES, depth=st.integers(1, 300), narrow=st.booleans())
def test_bits_do_not_depend_on_how_operands_lie_in_memory(
    rows: int, columns: int, depth: int, narrow: bool
) -> None:
    dtype = torch.bfloat16 if narrow else torch.float32
    left, right = numbers(rows, depth, dtype=dtype), numbers(depth, columns, seed=1, dtype=dtype)
    expected = multiply(left, right)
    apart = torch.stack((left, left), -1)[..., 0]  # every second number
    assert torch.equal(multiply(left.t().contiguous().t(), right), expected)
    assert torch.equal(multiply(left, right.t().contiguous().t()), expected)
    assert torch.equal(multiply(apart, right), expected)


@given(columns=st.integers(1, 70), depth=st.integers(1, 530), more=st.integers(0, 3))
def test_a_row_by_itself_is_a_row_of_many_with_any_gaps_between_the_columns(
    columns: int, depth: int, more: int
) -> None:
    rows, weight = numbers(2, depth), numbers(columns, depth + more, seed=1)[:, :depth]
    assert torch.equal(multiply(rows[1:], weight.t()), multiply(rows, weight.t().contiguous())[1:])


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_change_no_bit(threads: int) -> None:
    left, right, batch = numbers(200, 3000), numbers(3000, 210, seed=1), numbers(50, 200, 300, seed=2)
    heads = [numbers(2, 6, 100, 24, seed=seed) for seed in (3, 4, 5)]

    def computed() -> list[Tensor]:
        attended = attend(heads[0], heads[1], heads[2], None, 0.2, causal=True)
        column, row = multiply(left, right[:, :1]), multiply(left[:1], right)
        return [
            multiply(left, right),
            multiply(right.t(), left.t()),
            multiply(batch, batch.mT),
            column,
            row,
            *attended,
        ]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = computed()
        torch.set_num_threads(threads)
        together = computed()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(first, second) for first, second in zip(alone, together, strict=True))


@given(rows=SIZES, columns=st.integers(1, 150), depth=st.integers(0, 530))
def test_doubles_are_multiplied_by_the_same_definition(rows: int, columns: int, depth: int) -> None:
    left, right = numbers(rows, depth).double(), numbers(depth, columns, seed=1).double()
    product = multiply(left, right)
    assert torch.allclose(product, left @ right, rtol=1e-12, atol=1e-12)
    assert torch.equal(multiply(left[-1:], right.t().contiguous().t()), product[-1:])
    vector = operations().mv(right.t(), left[0])
    assert torch.equal(vector, product[0])


def written_out(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, causal: bool) -> Tensor:
    """Attention in fp64, (b, h, q, v), from operands that may share keys among heads."""
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ value


@given(
    queries=st.integers(1, 150),
    heads=st.sampled_from([(1, 1), (4, 2), (2, 2)]),
    widths=st.sampled_from([(8, 8), (24, 16)]),
    kind=st.sampled_from(["causal", "all", "bias"]),
)
def test_attention_and_its_gradients_are_those_of_the_formula(
    queries: int, heads: tuple[int, int], widths: tuple[int, int], kind: str
) -> None:
    causal = kind == "causal"
    query = numbers(2, queries, heads[0], widths[0]).transpose(1, 2)
    key, value = (
        numbers(2, heads[1], queries, widths[0], seed=1),
        numbers(2, heads[1], queries, widths[1], seed=2),
    )
    bias = numbers(2, 1, queries, queries, seed=3) if kind == "bias" else None
    doubles = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    expected = written_out(*doubles, None if bias is None else bias.double(), causal=causal)
    slope = numbers(*expected.shape, seed=4)
    expected_gradients = torch.autograd.grad(expected, doubles, slope.double())

    scale = widths[0] ** -0.5
    out, log_sums = attend(query, key, value, bias, scale, causal=causal)
    gradients = operations()._scaled_dot_product_flash_attention_for_cpu_backward(
        slope, query, key, value, out, log_sums, 0.0, causal, attn_mask=bias, scale=scale
    )
    assert torch.allclose(out.double(), expected, atol=2e-6)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(gradient.double(), expected_gradient, atol=2e-5)


def test_a_query_that_sees_nothing_gives_zero() -> None:
    query, key = numbers(1, 1, 3, 8), numbers(1, 1, 5, 8, seed=1)
    bias = torch.zeros(1, 1, 3, 5)
    bias[..., 1, :] = -torch.inf
    out, log_sums = attend(query, key, key, bias, 0.3, causal=False)
    assert out[0, 0, 1].eq(0).all()
    assert log_sums[0, 0, 1] == -torch.inf
    assert out[0, 0, 0].ne(0).all()


def test_a_query_that_sees_nothing_moves_nothing() -> None:
    query, key, value = (numbers(1, 1, 4, 8, seed=seed) for seed in range(3))
    bias = torch.zeros(4, 4)
    bias[2] = -torch.inf
    backward = operations()._scaled_dot_product_flash_attention_for_cpu_backward

    def gradients(rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        some, mask = query[:, :, rows], bias[rows]
        out, log_sums = attend(some, key, value, mask, 0.3, causal=False)
        slope = torch.ones_like(out)
        result: tuple[Tensor, Tensor, Tensor] = backward(
            slope, some, key, value, out, log_sums, 0.0, False, attn_mask=mask, scale=0.3
        )
        return result

    actual, expected = gradients([0, 1, 2, 3]), gradients([0, 1, 3])
    assert actual[0][0, 0, 2].eq(0).all()
    assert torch.equal(actual[0][:, :, [0, 1, 3]], expected[0])
    assert torch.equal(actual[1], expected[1])
    assert torch.equal(actual[2], expected[2])


def test_what_is_not_a_number_stays_so() -> None:
    query, key = numbers(1, 1, 4, 8), numbers(1, 1, 4, 8, seed=1)
    query[0, 0, 2, 3] = torch.nan
    out, _ = attend(query, key, key, None, 0.3, causal=True)
    assert out[0, 0].isnan().any(-1).tolist() == [False, False, True, False]


def test_other_formats_and_shapes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"products of fp32, bf16 and fp64 alone: .* set runtime\.numerics"
    ):
        multiply(numbers(2, 2).half(), numbers(2, 2).half())
    doubles = numbers(1, 1, 2, 4).double()
    with pytest.raises(RuntimeError, match="attention of fp32 and bf16 alone"):
        attend(doubles, doubles, doubles, None, 1.0, causal=True)
    with pytest.raises(RuntimeError, match="do not go together"):
        multiply(numbers(2, 3), numbers(2, 3))
