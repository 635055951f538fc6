"""The interval that a run chooses between checkpoints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.save.interval import SaveInterval, daly_interval_s

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
