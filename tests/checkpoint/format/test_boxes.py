"""Boxes: the geometry, against NumPy index arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.worlds import shapes
from phalanx.checkpoint.format.boxes import Box, whole


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[Box, Box]:
    full = whole("t", "float32", draw(shapes))

    def part() -> Box:
        edges = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in full.global_shape]
        return full.part(tuple(a for a, _ in edges), tuple(b - a for a, b in edges))

    return part(), part()


def elements(box: Box) -> set[int]:
    full = whole(box.name, box.dtype, box.global_shape)
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


@given(two_boxes())
def test_containing_is_having_all_elements(boxes: tuple[Box, Box]) -> None:
    a, b = boxes
    assert a.contains(b) == (elements(b) <= elements(a))


def test_a_scalar_is_one_element_and_whole() -> None:
    scalar = whole("step", "int64", ())
    assert (scalar.numel, scalar.nbytes, scalar.is_whole, str(scalar)) == (1, 8, True, "step")
    assert scalar.intersection(scalar) == scalar
    assert scalar.minus(scalar) == []


def test_a_rank_without_rows_holds_an_empty_box() -> None:
    empty = Box("t", "bfloat16", (5, 4), (0, 0), (0, 4))
    assert empty.nbytes == 0
    assert empty.intersection(whole("t", "bfloat16", (5, 4))) is None


@pytest.mark.parametrize(("offset", "shape"), [((4,), (3,)), ((-1,), (2,)), ((0, 0), (1, 1))])
def test_a_box_outside_its_tensor_is_refused(offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"t\["):
        Box("t", "float32", (6,), offset, shape)


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"complex256.*known: .*bfloat16"):
        whole("t", "complex256", (1,))
