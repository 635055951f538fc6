"""Tables of boxes, against the boxes themselves, element by element."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.worlds import holdings, states
from phalanx.checkpoint.format.boxes import DISK, Box, BoxLocation, StoredBox, full_box, require_complete
from phalanx.checkpoint.format.errors import CheckpointError, MismatchError, NotCoveredError
from phalanx.checkpoint.format.image import (
    BoxTable,
    decode_table,
    encode_table,
    image_layout,
    joined,
    table_of,
)


def table_of_ranks(rank_boxes: Sequence[Sequence[Box]]) -> BoxTable:
    return joined([table_of(image_layout(boxes).entries, rank) for rank, boxes in enumerate(rank_boxes)])


def boxes_of(table: BoxTable) -> list[Box]:
    return [table.box(row) for row in range(len(table))]


def covered(boxes: Sequence[Box]) -> dict[Box, list[bool]]:
    """The elements of each tensor that are in one of its boxes."""
    masks: dict[Box, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]] = {}
    for box in boxes:
        full = full_box(box.name, box.dtype, box.global_shape)
        masks.setdefault(full, np.zeros(box.global_shape, bool))[box.slices_in(full)] = True
    return {full: mask.reshape(-1).tolist() for full, mask in masks.items() if full.numel}


@st.composite
def worlds(draw: st.DrawFn) -> list[list[Box]]:
    """The boxes of a few ranks, on grids of their own; some of them left out."""
    rank_boxes = draw(holdings(draw(states()), draw(st.integers(1, 3))))
    dropped = draw(st.sets(st.integers(0, 10), max_size=2))
    every = [(rank, box) for rank, boxes in enumerate(rank_boxes) for box in sorted(set(boxes))]
    kept = [entry for number, entry in enumerate(every) if number not in dropped]
    return [[box for at, box in kept if at == rank] for rank in range(len(rank_boxes))]


@settings(max_examples=40)
@given(rank_boxes=worlds())
def test_a_table_gives_each_ranks_boxes_back_also_after_it_was_stored(rank_boxes: list[list[Box]]) -> None:
    table = decode_table(encode_table(table_of_ranks(rank_boxes)))
    for rank, boxes in enumerate(rank_boxes):
        rows = table.rows_of(rank).tolist()
        entries = image_layout(boxes).entries
        assert sorted((table.box(row), int(table.start[row])) for row in rows) == sorted(
            (entry.box, entry.start) for entry in entries
        )
        assert [int(table.start[row]) for row in rows] == [entry.start for entry in entries]


@settings(max_examples=40)
@given(rank_boxes=worlds())
def test_merging_keeps_every_element_and_adds_none(rank_boxes: list[list[Box]]) -> None:
    table = table_of_ranks(rank_boxes)
    merged = table.merged(5)
    assert covered(boxes_of(merged)) == {
        full: mask for full, mask in covered(boxes_of(table)).items() if any(mask)
    }
    assert set(merged.holder.tolist()) <= {5}
    assert merged.tensors == table.tensors


@settings(max_examples=40)
@given(rank_boxes=worlds(), data=st.data())
def test_a_table_is_whole_exactly_when_its_boxes_are(
    rank_boxes: list[list[Box]], data: st.DataObject
) -> None:
    required = data.draw(st.sampled_from([[], [full_box("model/other", "float32", (2,))]]))
    place = BoxLocation("", "", DISK)

    def error_of(check: object) -> type[CheckpointError] | None:
        assert callable(check)
        try:
            check()
        except CheckpointError as error:
            return type(error)
        return None

    table = table_of_ranks(rank_boxes)
    for variant in (table, table.merged(0)):
        assert error_of(lambda variant=variant: variant.require_whole(required)) == error_of(
            lambda: require_complete(
                [StoredBox(box, place) for boxes in rank_boxes for box in boxes], required
            )
        )


@settings(max_examples=40)
@given(rank_boxes=worlds(), data=st.data())
def test_what_overlaps_is_found_as_if_every_pair_were_compared(
    rank_boxes: list[list[Box]], data: st.DataObject
) -> None:
    needed = [box for boxes in data.draw(worlds()) for box in boxes]
    table = table_of_ranks(rank_boxes)

    def meets(box: Box) -> bool:
        same = [other for other in needed if other.name == box.name]
        alien = any((other.dtype, other.global_shape) != (box.dtype, box.global_shape) for other in same)
        return alien or any(other.intersection(box) is not None for other in same)

    assert table.overlapping(needed).tolist() == [
        row for row, box in enumerate(boxes_of(table)) if meets(box)
    ]


def test_rows_of_one_rank_after_another_become_one_box() -> None:
    full = full_box("model/w", "float32", (1000, 8))
    rank_boxes = [[full.rows(10 * rank, 10 * rank + 10)] for rank in range(100)]
    assert boxes_of(table_of_ranks(rank_boxes).merged(0)) == [full]


def test_a_grid_of_rows_and_columns_becomes_one_box() -> None:
    full = full_box("model/w", "float32", (12, 8))
    rank_boxes = [[full.part((row, column), (3, 2))] for row in range(0, 12, 3) for column in range(0, 8, 2)]
    assert boxes_of(table_of_ranks(rank_boxes).merged(0)) == [full]


def test_a_tensor_in_two_shapes_is_named() -> None:
    rank_boxes = [[full_box("w", "float32", (4,))], [full_box("w", "float32", (5,))]]
    with pytest.raises(MismatchError, match=r"w: needed float32 \(\d,\), stored float32 \(\d,\)"):
        table_of_ranks(rank_boxes).merged(0).require_whole()


def test_what_is_missing_is_named() -> None:
    full = full_box("w", "float32", (4, 2))
    with pytest.raises(NotCoveredError, match=r"w\[2:4,0:2\]"):
        table_of_ranks([[full.rows(0, 2)]]).merged(0).require_whole()


def test_the_boxes_of_256_regular_ranks_take_a_few_kilobytes() -> None:
    tensors = [full_box(f"model/layer{i}.weight", "float32", (4096, 512)) for i in range(50)]
    rank_boxes = [[tensor.rows(16 * rank, 16 * rank + 16) for tensor in tensors] for rank in range(256)]
    assert len(encode_table(table_of_ranks(rank_boxes))) < 8192


@pytest.mark.parametrize(
    "data", [b"", b"x" * 64, encode_table(table_of_ranks([[full_box("w", "int8", (3,))]]))[:-3]]
)
def test_bytes_that_are_no_table_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a table of boxes"):
        decode_table(data)
