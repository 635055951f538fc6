"""Boxes: the geometry, against NumPy index arrays."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.worlds import shapes
from phalanx.checkpoint.format.boxes import ITEMSIZE, Box, full_box


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[Box, Box]:
    full = full_box("t", "float32", draw(shapes))

    def part() -> Box:
        edges = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in full.global_shape]
        return full.part(tuple(a for a, _ in edges), tuple(b - a for a, b in edges))

    return part(), part()


def elements(box: Box) -> set[int]:
    full = full_box(box.name, box.dtype, box.global_shape)
    numbers = np.arange(full.numel).reshape(full.shape)
    return set(numbers[box.slices_in(full)].ravel().tolist())


@given(two_boxes())
def test_an_intersection_holds_exactly_the_elements_in_both(boxes: tuple[Box, Box]) -> None:
    a, b = boxes
    common = a.intersection(b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)


@given(two_boxes())
def test_a_difference_is_disjoint_and_holds_exactly_the_rest(boxes: tuple[Box, Box]) -> None:
    a, b = boxes
    pieces = a.minus(b)
    assert set().union(*map(elements, pieces)) == elements(a) - elements(b)
    assert sum(piece.numel for piece in pieces) == len(elements(a) - elements(b))
    assert len(pieces) <= max(1, 2 * len(a.shape)), "as many as the dimensions need"
    assert all(piece.numel for piece in pieces)


@given(two_boxes())
def test_containing_is_having_all_elements(boxes: tuple[Box, Box]) -> None:
    a, b = boxes
    assert a.contains(b) == (elements(b) <= elements(a))


def test_a_scalar_is_one_element_and_whole() -> None:
    scalar = full_box("step", "int64", ())
    assert (scalar.numel, scalar.nbytes, scalar.is_whole, str(scalar)) == (1, 8, True, "step")
    assert scalar.intersection(scalar) == scalar
    assert scalar.minus(scalar) == []


def test_a_rank_without_rows_holds_an_empty_box() -> None:
    empty = Box("t", "bfloat16", (5, 4), (0, 0), (0, 4))
    assert empty.nbytes == 0
    assert empty.intersection(full_box("t", "bfloat16", (5, 4))) is None


@pytest.mark.parametrize(("offset", "shape"), [((4,), (3,)), ((-1,), (2,)), ((3,), (-1,))])
def test_a_box_outside_its_tensor_is_refused(offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"t\["):
        Box("t", "float32", (6,), offset, shape)


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"complex256.*supported: .*bfloat16"):
        full_box("t", "complex256", (1,))


def test_an_element_has_as_many_bytes_as_in_pytorch() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEMSIZE} == ITEMSIZE


def test_a_box_is_named_by_what_indexes_the_full_tensor() -> None:
    full = full_box("t", "float32", (5, 4))
    assert (str(full), full.subscript) == ("t", "0:5,0:4")
    assert str(full.rows(1, 3)) == "t[1:3,0:4]"
    assert str(full.rows(1, 4).rows(1, 3)) == "t[2:4,0:4]", "rows are counted from the box's own first one"


def test_boxes_of_different_tensors_do_not_contain_each_other_even_if_they_are_empty() -> None:
    box, other = full_box("one", "float32", (5,)), full_box("other", "float32", (5,))
    assert not box.contains(other)
    assert not box.contains(other.rows(2, 2))
    assert box.contains(box.rows(2, 2))
    vector = full_box("vector", "float32", (8,))  # with another number of dimensions
    assert not box.contains(vector)
    assert not vector.contains(box)


@pytest.mark.parametrize(("offset", "shape"), [((0,), (2, 2)), ((0, 0), (2,)), ((0,), (2,))])
def test_a_box_with_another_number_of_dimensions_than_its_tensor_is_refused(
    offset: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"t: global shape \(6, 6\), .* same number"):
        Box("t", "float32", (6, 6), offset, shape)
