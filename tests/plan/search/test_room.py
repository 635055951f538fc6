"""Room in memory: the plan that is taken, and the caveat on one that leaves none."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_plan.search.plan import without_room
from phalanx_plan.search.ranking import LEAST_ROOM, NO_ROOM, free_share, with_room_first
from phalanx_plan.step_cost.estimate import Estimate, estimate
from plan.jobs import LAYOUTS, job


@pytest.fixture(scope="module")
def some() -> Estimate:
    return estimate(job(), LAYOUTS["dense"])


def with_free(base: Estimate, share: float, slower: float = 0.0) -> Estimate:
    """The estimate with a step that is longer by ``slower``, on accelerators of which ``share`` is free."""
    time = {name: seconds * (1 + slower) for name, seconds in base.time.items()}
    return dataclasses.replace(base, time=time, capacity_bytes=base.memory_bytes / (1 - share))


@given(st.lists(st.tuples(st.floats(0, 0.2), st.floats(0, 0.05)), min_size=1, max_size=6))
def test_the_best_with_room_goes_first_if_it_costs_at_most_three_percent(
    some: Estimate, plans: list[tuple[float, float]]
) -> None:
    by_time = sorted((with_free(some, *plan) for plan in plans), key=lambda plan: plan.step_s)
    ordered = with_room_first(by_time, lambda plan: plan.step_s)
    near = [
        plan for plan in by_time if free_share(plan) >= LEAST_ROOM and plan.step_s <= by_time[0].step_s * 1.03
    ]
    assert ordered[0] is (near[0] if near else by_time[0])
    assert [plan for plan in by_time if plan is not ordered[0]] == list(ordered[1:])


def test_a_plan_with_less_room_than_memory_may_be_off_by_is_marked_with_one_that_has_it(
    some: Estimate,
) -> None:
    tight, roomy = with_free(some, LEAST_ROOM / 2), with_free(some, 0.3, slower=0.05)
    (caveat,) = without_room(tight, roomy)
    assert str(roomy.layout) in caveat.text
    assert "+5.0%" in caveat.text
    assert not caveat.decides
    (alone,) = without_room(tight, None)
    assert "recompute more" in alone.text
    assert not list(without_room(roomy, roomy))


def test_a_plan_that_fits_by_less_than_any_prediction_is_known_to_is_no_go(some: Estimate) -> None:
    (caveat,) = without_room(with_free(some, NO_ROOM / 2), None)
    assert caveat.decides
