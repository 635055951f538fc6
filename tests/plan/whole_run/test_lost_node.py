"""A lost node costs the time of a new deal of the slots, and the note names a number of slots that mends it."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phalanx.parallel.divisions import Deal
from phalanx.run.layout import Layout
from phalanx_plan.planner import MUCH, better_slots, lost_node, lost_node_notes

LAYOUTS = st.one_of(
    st.builds(
        Layout, pipeline=st.integers(1, 4), shard=st.integers(1, 40), tensor=st.sampled_from([1, 2, 8])
    ),
    st.builds(
        Layout, replicate=st.integers(2, 12), shard=st.integers(1, 8), tensor=st.sampled_from([1, 2, 8])
    ),
    st.builds(
        Layout, shard=st.sampled_from([4, 8, 16]), expert=st.sampled_from([2, 4]), pipeline=st.integers(1, 4)
    ),
)


@given(LAYOUTS, st.integers(1, 6), st.sampled_from([1, 4, 8]))
def test_the_slowdown_is_that_of_the_longest_deal(layout: Layout, more: int, per_node: int) -> None:
    slots = layout.data_ranks * more
    lost = lost_node(layout, per_node, slots)
    ranks = layout.data_ranks * layout.pipeline * layout.model_ranks
    assume(lost is not None)
    assert lost is not None
    assert lost.data_ranks * layout.pipeline * layout.model_ranks <= ranks - per_node
    replicas = lost.data_ranks // layout.shard if layout.replicate > 1 else 1
    after = Deal(slots, replicas, lost.data_ranks // replicas, layout.team)
    longest = max(len(after.rounds(replica)) for replica in range(replicas))
    assert lost.slowdown == longest / more


@given(LAYOUTS, st.integers(1, 4), st.sampled_from([1, 8]), st.sampled_from([1, 2, 4, 16]))
def test_the_slots_that_a_note_names_divide_the_batch_and_keep_the_loss_small(
    layout: Layout, more: int, per_node: int, rest: int
) -> None:
    slots = layout.data_ranks * more
    better = better_slots(layout, per_node, slots, slots * rest)
    if better is not None:
        lost = lost_node(layout, per_node, better)
        assert lost is not None
        assert (slots * rest) % better == 0
        assert better > slots
        assert lost.slowdown <= MUCH


def test_as_many_slots_as_ranks_double_the_step_and_the_note_names_a_remedy() -> None:
    layout = Layout(pipeline=16, shard=128, tensor=8)
    (note,) = lost_node_notes(layout, 8, 128, 2048)
    assert "127 of 128" in note
    assert "2 times" in note
    assert "train.slots = 256" in note
    assert lost_node_notes(layout, 8, 256, 2048) == ()


@pytest.mark.parametrize("ranks", [1, 2])
def test_there_is_no_note_where_more_slots_do_not_help(ranks: int) -> None:
    assert lost_node_notes(Layout(shard=ranks), 1, ranks, 64) == ()
