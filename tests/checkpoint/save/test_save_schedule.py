"""When a run saves, and which checkpoints it keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.save.save_schedule import Retention, SaveInterval, daly_interval_s

times = st.floats(1e-3, 1e3)


def lost_share(interval_s: float, mtti_s: float, stall_s: float) -> float:
    """Time lost to saves and to failures, to first order: each failure costs half an interval and a save."""
    return stall_s / interval_s + (interval_s / 2 + stall_s) / mtti_s


@given(mtti_s=st.floats(1e3, 1e7), stall_s=st.floats(1e-3, 1.0), other=st.floats(0.1, 10.0))
def test_no_other_interval_loses_notably_less_time(mtti_s: float, stall_s: float, other: float) -> None:
    chosen = SaveInterval(mtti_s, stall_s=stall_s).seconds
    assert lost_share(chosen, mtti_s, stall_s) <= 1.01 * lost_share(other * chosen, mtti_s, stall_s)
    assert chosen == pytest.approx(daly_interval_s(mtti_s, stall_s), rel=0.01)


def test_the_first_step_is_saved_to_learn_what_a_save_costs() -> None:
    assert SaveInterval(1e6, saved_at_s=50.0).due(50.0)


@given(now_s=times, stall_s=times, write_s=times, later_s=st.floats(0, 1e7))
def test_a_save_is_due_when_the_interval_is_over_and_the_last_one_durable(
    now_s: float, stall_s: float, write_s: float, later_s: float
) -> None:
    interval = SaveInterval(1e5)
    interval.saved(now_s, stall_s)
    interval.written(write_s)
    assert interval.seconds >= write_s
    at_s = now_s + later_s
    assert interval.due(at_s) == (at_s - now_s >= interval.seconds)


def test_a_save_that_failed_is_tried_again_before_the_interval_is_over() -> None:
    interval = SaveInterval(1e5)
    interval.saved(1000.0, 2.0)
    interval.failed(1005.0)
    assert not interval.due(1005.0)
    assert interval.due(1005.0 + 0.11 * interval.seconds)


steps_strategy = st.lists(st.integers(0, 500), unique=True)


@given(steps_strategy, st.integers(1, 5), st.none() | st.integers(1, 100))
def test_exactly_the_newest_and_the_periodic_stay(
    steps: list[int], keep_last: int, keep_every: int | None
) -> None:
    deleted_steps = Retention(keep_last, keep_every).expired(steps)
    for step in steps:
        newer = sum(other > step for other in steps)
        stays = newer < keep_last or (keep_every and step % keep_every == 0)
        assert (step in deleted_steps) == (not stays)


@given(steps_strategy)
def test_applying_the_rule_twice_changes_nothing(steps: list[int]) -> None:
    rule = Retention(keep_last=2, keep_every=50)
    left = set(steps) - set(rule.expired(steps))
    assert rule.expired(sorted(left)) == []


@pytest.mark.parametrize(("keep_last", "keep_every"), [(0, None), (1, 0)])
def test_a_rule_that_makes_no_sense_is_refused(keep_last: int, keep_every: int | None) -> None:
    with pytest.raises(ValueError, match="keep_"):
        Retention(keep_last, keep_every)


def test_the_newest_checkpoint_before_a_step_that_is_named_is_kept() -> None:
    rule = Retention(keep_last=1, before=(13, 31))
    assert rule.expired([4, 8, 12, 16, 20, 24, 28, 32]) == [4, 8, 16, 20, 24]
    assert Retention(keep_last=1, before=(3,)).expired([4, 8]) == [4]
