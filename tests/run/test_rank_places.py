"""Places of ranks: every rank has one, and is where the mesh puts it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.run.layout import Layout, rank_groups, rank_place

DEGREES = st.integers(1, 3)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts, also with experts over a part of the inner ranks."""
    layout = Layout(*(draw(DEGREES) for _ in range(5)))
    inner = layout.shard * layout.model_ranks
    expert_tensor = draw(st.sampled_from([1, layout.tensor]))
    expert = draw(
        st.sampled_from([n for n in range(1, inner + 1) if inner % (n * expert_tensor) == 0] or [1])
    )
    return dataclasses.replace(layout, expert=expert, expert_tensor=expert_tensor)


@given(layouts())
def test_ranks_are_numbered_with_the_tensor_axis_fastest(layout: Layout) -> None:
    grid = np.arange(layout.ranks).reshape([*layout.degrees.values()])
    for rank in range(layout.ranks):
        place = rank_place(layout, rank)
        assert [*place][:5] == [*layout.degrees]
        assert grid[tuple(place[axis] for axis in layout.degrees)] == rank


@given(layouts())
def test_a_group_has_all_that_differ_along_its_axis_alone(layout: Layout) -> None:
    places = [rank_place(layout, rank) for rank in range(layout.ranks)]
    for rank in range(layout.ranks):
        groups = rank_groups(layout, rank)
        axes = {axis for axis, degree in layout.degrees.items() if degree > 1}
        assert groups.keys() == axes | ({"expert"} if layout.expert > 1 else set())
        for axis in axes:
            others = [other for other in layout.degrees if other != axis]
            alike = [r for r, place in enumerate(places) if all(place[o] == places[rank][o] for o in others)]
            assert groups[axis] == alike


@given(layouts())
def test_experts_groups_are_lines_of_the_view_that_the_mesh_takes(layout: Layout) -> None:
    shape = (-1, layout.expert_shard, layout.expert, layout.expert_tensor)
    view = np.arange(layout.ranks).reshape(shape)
    lines = {tuple(line) for line in view.swapaxes(2, 3).reshape(-1, layout.expert).tolist()}
    if layout.expert > 1:
        assert {tuple(rank_groups(layout, rank)["expert"]) for rank in range(layout.ranks)} == lines


def test_a_rank_that_is_not_there_has_no_place() -> None:
    with pytest.raises(ValueError, match="no rank 4 among 4"):
        rank_place(Layout(tensor=4), 4)
