"""Integer sums: the same bits in any order, within their bound of the exact sum, and words that never overflow."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from phalanx.parallel.divisions import SpanLayout, share_layout
from phalanx.parallel.reduction.reproducible_sums import BinFormat, Bins

LAYOUT = share_layout([(3, 8), (2,)], 1)
"""Three spans of eight elements and two of one."""
SIZES = [8, 8, 8, 1, 1]

EXPONENTS = [-149, -140, -126, -60, -27, -3, 0, 1, 25, 60, 126]


@st.composite
def slots(draw: st.DrawFn) -> Tensor:
    """Gradients ``(slots, elements)``: denormal, near one, and so large that sums overflow; of either sign, and zeros."""
    count, among = draw(st.integers(1, 9)), draw(st.lists(st.sampled_from(EXPONENTS), min_size=1, max_size=4))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (count, LAYOUT.elements)
    numbers = random.choice([-1.0, 0.0, 1.0, 1.0], shape) * random.uniform(0.5, 2, shape)
    return torch.from_numpy((numbers * 2.0 ** random.choice(among, shape)).astype(np.float32))


@dataclass(frozen=True)
class Way:
    """How gradients are added: by one pass in C, or by PyTorch's operations."""

    use_kernel: bool = True
    chunk_elements: int | None = None

    def empty(self, count: int, layout: SpanLayout = LAYOUT) -> Bins:
        return Bins.empty(
            1,
            layout,
            BinFormat(count),
            torch.device("cpu"),
            use_kernel=self.use_kernel,
            chunk_elements=self.chunk_elements,
        )


each_way = pytest.mark.parametrize(
    "way",
    [Way(), Way(use_kernel=False), Way(use_kernel=False, chunk_elements=16)],
    ids=["kernel", "operations", "operations on pieces"],
)


def total(bins: Bins) -> Tensor:
    out = torch.empty(1, bins.layout.elements)
    bins.total(out)
    return out[0]


def summed(way: Way, gradients: Tensor, *groups: list[int]) -> Tensor:
    """The sum of ``gradients`` ``(slots, elements)``: each group is added up alone, and then the groups."""
    sums = []
    for group in groups:
        sums.append(way.empty(len(gradients)))
        for slot in group:
            sums[-1].add_gradient(gradients[slot].unsqueeze(0))
    for other in sums[1:]:
        sums[0].add(other)
    return total(sums[0])


def bits(x: Tensor) -> NDArray[np.int32]:
    return x.numpy().view(np.int32)


@each_way
@given(gradients=slots(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_the_order_of_slots_and_who_adds_them_changes_no_bit(
    way: Way, gradients: Tensor, data: st.DataObject
) -> None:
    in_order = list(range(len(gradients)))
    order = data.draw(st.permutations(in_order))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=3)))
    groups = [order[first:last] for first, last in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    assert (bits(summed(way, gradients, *groups)) == bits(summed(way, gradients, in_order))).all()


@each_way
@given(gradients=slots())
@settings(max_examples=40, deadline=None)
def test_a_sum_is_within_its_bound_of_the_exact_one(way: Way, gradients: Tensor) -> None:
    count, width = len(gradients), BinFormat(len(gradients)).width
    totals, some = summed(way, gradients, list(range(count))).tolist(), gradients.tolist()
    element = 0
    for size in SIZES:
        span = range(element, element + size)
        largest = max(abs(Fraction(slot[i])) for slot in some for i in span)
        for i in span:
            exact = sum(Fraction(slot[i]) for slot in some)
            if abs(exact) >= 2**128:  # so it may be rounded to infinity
                continue
            rounding = max(abs(exact) / 2**23, Fraction(1, 2**149))
            assert abs(Fraction(totals[i]) - exact) <= count * largest / 2**width + rounding
        element += size


@each_way
@given(gradients=slots())
@settings(max_examples=15, deadline=None)
def test_elements_that_were_not_finite_in_a_slot_are_no_numbers_and_no_others(
    way: Way, gradients: Tensor
) -> None:
    gradients = gradients / 16  # no sum overflows
    gradients[0, 3], gradients[-1, 4], gradients[-1, 25] = torch.inf, -torch.inf, torch.nan
    totals = summed(way, gradients, list(range(len(gradients))))
    assert (~totals.isfinite()).nonzero().flatten().tolist() == [3, 4, 25]


@each_way
@pytest.mark.parametrize("doublings", [0, 3, 10, 11])
def test_words_hold_as_many_of_the_largest_digits_as_there_are_slots(way: Way, doublings: int) -> None:
    count, layout = 2**doublings, share_layout([(2,)], 1)
    width = BinFormat(count).width
    # As large as an upper digit can be, twice what it can be, and as large as a lower digit can be.
    largest = 2.0 ** (width - 1) * (1 - 2.0**-24)
    for number in (largest, 2 * largest, 2.0 ** (width - 9) + 0.5 - 2.0**-9):
        x = torch.tensor([[number, -number]])
        bins = way.empty(count, layout)
        bins.add_gradient(x)
        for _ in range(doublings):
            bins.add(copy.deepcopy(bins))
        assert total(bins).tolist() == pytest.approx((x[0].double() * count).tolist(), rel=2**-20)


def test_more_than_1024_slots_get_wider_words_and_not_fewer_digits() -> None:
    assert BinFormat(1024).dtype == torch.int32
    assert BinFormat(1025).dtype == torch.int64
    assert [BinFormat(count).width for count in (8, 64, 1023, 100_000)] == [28, 25, 22, 32]
