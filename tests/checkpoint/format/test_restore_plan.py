"""Restore plans and shares, against element-wise copies."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.worlds import box_of, grids, holdings, random_tensor, states
from phalanx.checkpoint.format.boxes import (
    DISK,
    OWN_MEMORY,
    PEER,
    Box,
    BoxLocation,
    StoredBox,
    full_box,
    plan_restore,
    require_complete,
    share_of,
)
from phalanx.checkpoint.format.errors import MismatchError, NotCoveredError

FULL = full_box("t", "float32", (8, 6))


def held_at(box: Box, distance: int, holder: str = "0") -> StoredBox:
    return StoredBox(box, BoxLocation("tier", holder, distance))


@given(st.data())
def test_each_needed_element_is_read_exactly_once_between_any_layouts(data: st.DataObject) -> None:
    state = data.draw(states())
    stored = data.draw(holdings(state, 3))
    needed = [box for boxes in data.draw(holdings(state, 2)) for box in boxes]
    sources = [
        held_at(box, data.draw(st.sampled_from([0, 2, 3])), str(r))
        for r, boxes in enumerate(stored)
        for box in boxes
    ]
    reads = plan_restore(needed, sources, reader=data.draw(st.integers(0, 3)))
    times = {name: np.zeros(tuple(tensor.shape), int) for name, tensor in state.items()}
    for read in reads:
        assert read.source.box.contains(read.part)
        times[read.part.name][read.part.slices_in(box_of(read.part.name, state[read.part.name]))] += 1
    expected_times = {name: np.zeros_like(count) for name, count in times.items()}
    for box in needed:
        expected_times[box.name][box.slices_in(box_of(box.name, state[box.name]))] += 1
    assert all((times[name] == expected_times[name]).all() for name in state)


@given(st.data())
def test_no_element_comes_from_further_away_than_it_must(data: st.DataObject) -> None:
    sources = [held_at(box, data.draw(st.integers(0, 4))) for _ in range(2) for box in data.draw(grids(FULL))]
    nearest = np.full(FULL.shape, 9)
    for entry in sources:
        where = entry.box.slices_in(FULL)
        nearest[where] = np.minimum(nearest[where], entry.location.distance)
    for read in plan_restore([FULL], sources):
        assert (nearest[read.part.slices_in(FULL)] == read.source.location.distance).all()


def test_what_memory_lacks_comes_from_a_peer_and_then_from_disk() -> None:
    sources = [held_at(FULL, DISK), held_at(FULL.rows(2, 8), PEER), held_at(FULL.rows(4, 8), OWN_MEMORY)]
    parts = {read.source.location.distance: read.part for read in plan_restore([FULL], sources)}
    assert parts == {OWN_MEMORY: FULL.rows(4, 8), PEER: FULL.rows(2, 4), DISK: FULL.rows(0, 2)}


def test_equal_readers_read_from_different_equally_near_holders() -> None:
    sources = [held_at(FULL, PEER, str(holder)) for holder in range(4)]
    holders = {plan_restore([FULL], sources, reader=rank)[0].source.location.holder for rank in range(4)}
    assert holders == {"0", "1", "2", "3"}


def test_reads_come_in_the_order_in_which_sources_are_listed() -> None:
    sources = [held_at(FULL.rows(row, row + 1), DISK) for row in (5, 0, 7, 1, 2, 6, 3, 4)]
    assert [read.source for read in plan_restore([FULL], sources)] == sources


def test_elements_held_nowhere_are_named() -> None:
    with pytest.raises(NotCoveredError, match=r"t\[3:8,0:6\]") as caught:
        plan_restore([FULL], [held_at(FULL.rows(0, 3), DISK)])
    assert caught.value.names == ("t",)


@pytest.mark.parametrize("other", [full_box("t", "bfloat16", (8, 6)), full_box("t", "float32", (8, 7))])
def test_another_dtype_or_shape_is_refused_and_named(other: Box) -> None:
    with pytest.raises(MismatchError, match=r"needed float32 \(8, 6\), stored") as caught:
        plan_restore([FULL], [held_at(other, DISK)])
    assert caught.value.names == ("t",)


def test_an_empty_box_needs_nothing() -> None:
    assert plan_restore([FULL.rows(3, 3)], []) == ()


@given(st.data(), st.integers(1, 9))
def test_shares_are_disjoint_and_complete(data: st.DataObject, replicas: int) -> None:
    state = data.draw(states())
    boxes = [cell for name, tensor in state.items() for cell in data.draw(grids(box_of(name, tensor)))]
    counts = {name: np.zeros(tuple(tensor.shape), int) for name, tensor in state.items()}
    for replica in range(replicas):
        for box in share_of(boxes, replica, replicas):
            counts[box.name][box.slices_in(box_of(box.name, state[box.name]))] += 1
    assert all((count == 1).all() for count in counts.values())


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 8)), min_size=1, max_size=8), st.integers(1, 9))
def test_a_share_is_within_a_row_of_the_equal_one(sizes: list[tuple[int, int]], replicas: int) -> None:
    boxes = [full_box(f"t{i}", "float32", size) for i, size in enumerate(sizes)]
    shares = [sum(box.nbytes for box in share_of(boxes, replica, replicas)) for replica in range(replicas)]
    longest_row = max(4 * columns for _, columns in sizes)
    equal = sum(shares) / replicas
    assert all(abs(share - equal) <= longest_row + 1 for share in shares)


def test_shares_do_not_depend_on_the_order_of_the_boxes() -> None:
    boxes = [box_of(f"t{i}", random_tensor((5 + i, 3), torch.float32, 0)) for i in range(6)]
    assert share_of(boxes, 1, 3) == share_of(boxes[::-1], 1, 3)


def test_a_replica_out_of_range_has_no_share() -> None:
    for replica in (-1, 2):
        with pytest.raises(ValueError, match="is not one of 2"):
            share_of([FULL], replica, 2)


def test_the_name_of_a_tensor_without_elements_is_kept_by_the_first_replica_alone() -> None:
    empty, nobodys = full_box("empty", "float32", (0, 4)), full_box("t", "float32", (4, 4)).rows(2, 2)
    assert [share_of([empty, nobodys], replica, 3) for replica in range(3)] == [[empty], [], []]


def test_boxes_that_fit_in_a_share_are_not_divided() -> None:
    boxes = [full_box(name, "float32", (4, 2)) for name in "abc"]
    assert [share_of(boxes, replica, 3) for replica in range(3)] == [[box] for box in boxes]
    first, second = share_of(boxes, 0, 2), share_of(boxes, 1, 2)
    assert (first, second) == ([boxes[0], boxes[1].rows(0, 2)], [boxes[1].rows(2, 4), boxes[2]])


def test_a_set_of_boxes_is_complete_if_it_covers_every_tensor_that_it_names_and_all_that_is_required() -> (
    None
):
    other = full_box("u", "float32", (4,))
    halves = [held_at(FULL.rows(0, 4), DISK), held_at(FULL.rows(4, 8), DISK)]
    require_complete(halves, [FULL])
    with pytest.raises(NotCoveredError, match=r"t\[4:8,0:6\]"):
        require_complete(halves[:1])
    with pytest.raises(NotCoveredError, match="u ") as caught:
        require_complete(halves, [FULL, other])
    assert caught.value.names == ("u",)
    with pytest.raises(MismatchError):
        require_complete([*halves, held_at(full_box("t", "float32", (8, 7)), DISK)])


def test_a_long_list_of_missing_tensors_is_cut_and_counted() -> None:
    needed = [full_box(f"t{number:02}", "float32", (2, 3)) for number in range(22)]
    with pytest.raises(NotCoveredError) as caught:
        plan_restore(needed[::-1], [])
    lines = str(caught.value).splitlines()
    assert lines[1] == "  t00 (6 of its elements)"
    assert lines[20:22] == ["  t19 (6 of its elements)", "  ... and 2 more"]
    assert caught.value.names == tuple(box.name for box in needed)
    with pytest.raises(NotCoveredError) as caught:
        plan_restore(needed[:20], [])
    assert "more" not in str(caught.value)


def test_every_tensor_of_another_shape_is_named_in_order() -> None:
    needed = [full_box(name, "float32", (4,)) for name in "ba"]
    sources = [held_at(full_box(name, "float32", size), DISK) for size in ((5,), (6,)) for name in "ba"]
    with pytest.raises(MismatchError) as caught:
        plan_restore(needed, sources)
    assert caught.value.names == ("a", "b")
    assert str(caught.value).splitlines()[1:3] == [
        f"  {name}: needed float32 (4,), stored float32 (5,)" for name in "ab"
    ]


def test_parts_from_one_source_come_in_the_order_of_their_rows() -> None:
    needed = [FULL.rows(4, 6), FULL.rows(0, 2)]
    assert [read.part for read in plan_restore(needed, [held_at(FULL, DISK)])] == needed[::-1]


def test_what_is_held_and_not_needed_is_passed_over() -> None:
    sources = [held_at(full_box("other", "int64", (3,)), OWN_MEMORY), held_at(FULL, DISK)]
    assert [read.source for read in plan_restore([FULL], sources)] == sources[1:]


def test_a_cut_is_moved_to_the_nearest_row() -> None:
    box = full_box("t", "float32", (5, 2))  # cuts at 13 and 26 of 40 bytes, rows of 8
    assert [share_of([box], replica, 3) for replica in range(3)] == [
        [box.rows(0, 2)],
        [box.rows(2, 3)],
        [box.rows(3, 5)],
    ]
