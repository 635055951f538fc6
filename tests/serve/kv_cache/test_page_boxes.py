"""Boxes of a page hold its bytes, and all of them together are the page."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from phalanx_serve.kv_cache.memory import PageBox, PageShape

boxes = st.integers(1, 3).flatmap(
    lambda layers: st.integers(1, 4).flatmap(
        lambda heads: st.tuples(
            st.just(PageShape(layers, heads, (3, 1, 2))),
            st.sets(st.integers(1, layers - 1) if layers > 1 else st.nothing()),
            st.sets(st.integers(1, heads - 1) if heads > 1 else st.nothing()),
        )
    )
)


@given(boxes)
def test_a_box_of_a_page_has_the_bytes_of_its_layers_and_heads_and_all_boxes_are_the_page(
    drawn: tuple[PageShape, set[int], set[int]],
) -> None:
    shape, layer_cuts, head_cuts = drawn
    places = [
        (tensor, layer, head, byte)
        for tensor, cell in enumerate(shape.cells)
        for layer in range(shape.layers)
        for head in range(shape.heads)
        for byte in range(cell)
    ]
    page = bytes(range(len(places)))
    parts = [
        PageBox(range(*layers), range(*heads))
        for layers in pairwise([0, *sorted(layer_cuts), shape.layers])
        for heads in pairwise([0, *sorted(head_cuts), shape.heads])
    ]
    for box in parts:
        assert bytes(shape.cut(page, box)) == bytes(
            number
            for number, (_, layer, head, _) in enumerate(places)
            if layer in box.layers and head in box.heads
        )
    assert shape.assemble((box, shape.cut(page, box)) for box in parts) == page
