"""Norms that do not show how the numbers were spread."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.parallel.reduction.reproducible_sums import extracted_sums, extraction_constants, largest
from ranks import Ranks

CPU = torch.device("cpu")
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)
small_numbers = st.floats(width=32, min_value=-(2.0**-30), max_value=2.0**-30)
lists = st.lists(st.one_of(numbers, small_numbers), min_size=1, max_size=200)


def sums_in_pieces(values: Tensor, cuts: list[int]) -> list[float]:
    """The extracted sums as several ranks would compute and add them."""
    constants = extraction_constants(largest([values], CPU).item(), values.numel())
    bounds = sorted({0, values.numel(), *(cut % (values.numel() + 1) for cut in cuts)})
    parts = [values[a:b] for a, b in itertools.pairwise(bounds)]
    total = torch.zeros(2, dtype=torch.float64)
    for part in reversed(parts):
        total += extracted_sums([part], constants, CPU)
    return [value.hex() for value in total.tolist()]


@given(lists.filter(lambda v: any(v)), st.lists(st.integers(0, 200), max_size=6), st.randoms())
def test_the_sum_has_the_same_bits_in_any_order_and_any_pieces(values, cuts, shuffler) -> None:  # type: ignore[no-untyped-def]
    tensor = torch.tensor(values)
    shuffled = values[:]
    shuffler.shuffle(shuffled)
    assert sums_in_pieces(tensor, []) == sums_in_pieces(torch.tensor(shuffled), cuts)


@given(lists.filter(lambda v: any(v)))
def test_the_norm_is_that_of_exact_arithmetic(values: list[float]) -> None:
    tensor = torch.tensor(values)
    constants = extraction_constants(largest([tensor], CPU).item(), tensor.numel())
    computed = math.sqrt(sum(extracted_sums([tensor], constants, CPU).tolist()))
    exact = math.sqrt(sum(Fraction(value) ** 2 for value in tensor.tolist()))
    assert computed == pytest.approx(exact, rel=1e-12)


@given(lists.filter(lambda v: any(v)))
def test_each_piece_is_a_multiple_of_a_power_of_two_so_that_adding_them_is_exact(values: list[float]) -> None:
    tensor = torch.tensor(values)
    peak = largest([tensor], CPU).item()
    first, second = extraction_constants(peak, tensor.numel())
    for constant in (first, second):
        unit = math.ulp(constant)
        bound = Fraction(unit) * 2**53
        total = sum(abs(Fraction(value) ** 2) for value in tensor.tolist())
        if constant == first:
            assert total <= bound


def test_a_number_that_is_not_finite_makes_the_peak_infinite() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        assert largest([torch.tensor([1.0, bad])], CPU).item() == math.inf


def norm_on_ranks(cuts: tuple[int, ...], values: list[float]) -> str:
    import torch.distributed as dist

    from phalanx.parallel.reduction.reproducible_sums import norm

    bounds = (0, *cuts, len(values))
    rank = dist.get_rank()
    part = torch.tensor(values[bounds[rank] : bounds[rank + 1]])
    assert dist.group.WORLD is not None
    return norm([part], len(values), torch.device("cpu")).hex()


def test_ranks_that_share_the_numbers_out_differently_agree_to_the_last_bit(ranks: Ranks) -> None:
    values = torch.randn(3001, generator=torch.Generator().manual_seed(0)).mul(1e-3).tolist()
    alone = ranks.run(1, norm_on_ranks, (), values)
    for cuts in [(1500,), (1, 3000), (0, 3001), (700, 1400)]:
        assert set(ranks.run(len(cuts) + 1, norm_on_ranks, cuts, values)) == set(alone)


def test_a_plain_sum_would_depend_on_the_pieces() -> None:
    squares = torch.randn(3001, generator=torch.Generator().manual_seed(0)) ** 2
    sums = {(squares[:cut].sum() + squares[cut:].sum()).item() for cut in range(100, 3000, 100)}
    assert len(sums) > 1
