"""Spans of parameters: within rows, and the same however rows are divided over ranks."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from phalanx.parallel.divisions import share_layout, span_size, word_bytes

shapes = st.lists(
    st.integers(1, 6).flatmap(lambda n: st.sampled_from([(n,), (n, 3), (n, 64), (n, 2, 128)])), min_size=1
)


@given(shapes, st.integers(1, 4))
def test_spans_fill_a_share_from_its_first_element_to_its_last(
    some: list[tuple[int, ...]], ranks: int
) -> None:
    layout = share_layout(some, ranks)
    rows = [-(-shape[0] // ranks) for shape in some]
    assert layout.elements == sum(n * math.prod(shape[1:]) for n, shape in zip(rows, some, strict=True))
    element = span = 0
    for segment in layout.segments:
        assert (segment.first_element, segment.first_span) == (element, span)
        element, span = element + segment.spans * segment.size, span + segment.spans
    assert (element, span) == (layout.elements, layout.spans)


@given(st.sampled_from([(5,), (5, 3), (5, 64), (5, 2, 128), (5, 200)]), st.integers(1, 6))
def test_no_span_reaches_over_the_end_of_a_row_so_none_is_cut_on_any_fleet(
    shape: tuple[int, ...], ranks: int
) -> None:
    (segment,) = share_layout([shape], ranks).segments
    (alone,) = share_layout([shape], 1).segments
    assert math.prod(shape[1:]) % segment.size == 0
    assert segment.size == alone.size <= 128


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4))
def test_a_span_is_the_largest_power_of_two_that_divides_a_row_up_to_128(shape: list[int]) -> None:
    row = math.prod(shape[1:])
    assert span_size(shape) == max(size for size in (1, 2, 4, 8, 16, 32, 64, 128) if row % size == 0)


def test_a_number_without_dimensions_is_one_span_of_one_element() -> None:
    for ranks in (1, 3):
        layout = share_layout([()], ranks)
        assert (layout.elements, layout.spans) == (1, 1)


def test_words_have_four_bytes_in_sums_of_up_to_1024_numbers_and_eight_beyond() -> None:
    assert [word_bytes(count) for count in (1, 1024, 1025, 100_000)] == [4, 4, 8, 8]
