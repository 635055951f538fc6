"""Layouts as arrays and back."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx.run.layout import Layout
from phalanx_plan.workload.candidates import (
    PARTS,
    RECOMPUTE,
    candidates_of,
    distinct,
    divisors,
)
from plan.jobs import one, planned

LAYOUT = Layout(pipeline=2, replicate=3, shard=4, context=2, tensor=8, expert=16, expert_tensor=1)


def test_a_layout_survives_the_way_through_arrays() -> None:
    layout = planned(LAYOUT, zero=2, micro_batch=3, schedule="zbv", recompute="full", precision="fp8")
    assert layout.mesh == LAYOUT
    assert candidates_of([planned(Layout()), layout], RECOMPUTE).at(1, RECOMPUTE) == layout


def test_derived_degrees_are_those_of_the_layout() -> None:
    candidates = one(LAYOUT)
    assert candidates.ranks[0] == LAYOUT.ranks
    assert candidates.data[0] == LAYOUT.data_ranks
    assert candidates.expert_shard[0] == LAYOUT.expert_shard
    assert candidates.dense_shard[0] == LAYOUT.shard * LAYOUT.context


def test_rows_are_taken_only_of_fields_that_have_them() -> None:
    both = candidates_of([planned(LAYOUT), planned(Layout(tensor=4))], RECOMPUTE)
    assert both.rows(np.array([False, True])).at(0, RECOMPUTE).tensor == 4


def test_full_recomputation_is_that_of_every_part() -> None:
    assert RECOMPUTE[-1].parts == set(PARTS)
    assert not any(mode.parts == set(PARTS) for mode in RECOMPUTE[:-1])
    assert all(mode.parts <= set(PARTS) for mode in RECOMPUTE)


def test_divisors_are_all_and_ascending() -> None:
    assert list(divisors(12)) == [1, 2, 3, 4, 6, 12]
    assert list(divisors(12, 5)) == [1, 2, 3, 4]


@given(
    st.lists(st.tuples(*(st.integers(0, most) for most in (3, 100_000, 2, 100_000))), min_size=1, max_size=30)
)
def test_distinct_combinations_are_those_that_occur_in_order(rows: list[tuple[int, ...]]) -> None:
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    values, row = distinct(columns)
    combinations = list(zip(*(column.tolist() for column in values), strict=True))
    assert combinations == sorted(set(rows))
    assert [combinations[index] for index in row.tolist()] == rows
