"""Pieces of boxes that end where blocks do: together exactly the part, each out of one block."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.worlds import grids, shapes
from phalanx.checkpoint.format.blocks import spans_in_blocks
from phalanx.checkpoint.format.boxes import full_box
from phalanx.checkpoint.format.image import view_of


@given(st.data(), shapes, st.integers(1, 64), st.integers(0, 100))
def test_pieces_hold_exactly_the_part_and_are_in_one_block_but_for_single_elements(
    data: st.DataObject, shape: tuple[int, ...], block_bytes: int, start: int
) -> None:
    full = full_box("t", "float32", shape)
    numbers = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    stored = numbers.reshape(-1).view(np.uint8)
    for part in data.draw(grids(full)):
        out = np.full(part.shape, -1, np.int64)
        begins = []
        for span in spans_in_blocks(full, part, start, block_bytes):
            first, last = (start + span.start) // block_bytes, (start + span.stop - 1) // block_bytes
            assert first == last or span.part.numel == 1
            assert (out[span.part.slices_in(part)] == -1).all(), "no element comes twice"
            out[span.part.slices_in(part)] = view_of(full, span, stored[span.start : span.stop])
            begins.append(span.start)
        assert begins == sorted(begins)
        assert (out == numbers[part.slices_in(full)]).all()


def test_a_tensor_across_blocks_is_cut_once_at_each() -> None:
    full = full_box("t", "float32", (100, 8))
    pieces = list(spans_in_blocks(full, full, 64, 1024))
    assert [piece.stop - piece.start for piece in pieces] == [960, 1024, 1024, 192]
