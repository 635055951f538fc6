"""Spans of parameters: within rows, and the same however rows are divided over ranks."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from phalanx.parallel.divisions import share_layout

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
