"""Rectangular slices of a tensor: intersections, and their place in an array."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx.parallel.divisions import LocalSlice, intersection, slices_in

FULL = (6, 5)


@st.composite
def slices(draw: st.DrawFn) -> LocalSlice:
    """A slice of a tensor of the shape ``FULL``, with at least one element."""
    offset = tuple(draw(st.integers(0, extent - 1)) for extent in FULL)
    shape = tuple(draw(st.integers(1, extent - start)) for start, extent in zip(offset, FULL, strict=True))
    return LocalSlice(offset, shape)


def elements_of(part: LocalSlice) -> set[tuple[int, ...]]:
    """The indices of a slice's elements, written out."""
    ends = [start + extent for start, extent in zip(*part, strict=True)]
    return {
        (row, column) for row in range(part.offset[0], ends[0]) for column in range(part.offset[1], ends[1])
    }


@given(slices(), slices())
def test_an_intersection_has_the_elements_of_both_or_is_none(first: LocalSlice, second: LocalSlice) -> None:
    common = intersection(first, second)
    both = elements_of(first) & elements_of(second)
    assert (elements_of(common) if common is not None else set()) == both


@given(slices(), slices())
def test_the_index_of_a_part_finds_its_elements_in_an_array_that_begins_elsewhere(
    outer: LocalSlice, other: LocalSlice
) -> None:
    part = intersection(outer, other)
    if part is None:
        return
    numbers = np.arange(FULL[0] * FULL[1]).reshape(FULL)
    array = numbers[slices_in(outer, (0, 0))]  # which begins at the outer slice's offset
    taken = array[slices_in(part, outer.offset)]
    assert taken.shape == part.shape
    assert sorted(taken.ravel().tolist()) == sorted(
        row * FULL[1] + column for row, column in elements_of(part)
    )
