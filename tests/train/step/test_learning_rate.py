"""The learning rate over a run."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.run.spec import ScheduleSpec
from phalanx.train.step.learning_rate import multiplier

KINDS = ("cosine", "wsd", "constant")
schedules = st.builds(
    ScheduleSpec,
    kind=st.sampled_from(KINDS),
    warmup_steps=st.integers(0, 50),
    decay_fraction=st.floats(0.0, 1.0),
    floor=st.floats(0.0, 1.0),
)


@given(schedules, st.integers(1, 200))
def test_it_stays_between_zero_and_the_peak(schedule: ScheduleSpec, steps: int) -> None:
    assert all(0.0 <= multiplier(schedule, step, steps) <= 1.0 + 1e-12 for step in range(1, steps + 1))


@given(schedules, st.integers(60, 200))
def test_it_rises_through_the_warm_up_and_never_again(schedule: ScheduleSpec, steps: int) -> None:
    values = [multiplier(schedule, step, steps) for step in range(1, steps + 1)]
    up, down = values[: schedule.warmup_steps], values[schedule.warmup_steps :]
    assert up == sorted(up)
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(down))


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_the_last_step_is_at_the_floor(kind: str) -> None:
    schedule = ScheduleSpec(kind=kind, warmup_steps=5, floor=0.1)  # type: ignore[arg-type]
    assert multiplier(schedule, 100, 100) == pytest.approx(0.1)


def test_wsd_stays_at_the_peak_until_its_decay_begins() -> None:
    schedule = ScheduleSpec(kind="wsd", warmup_steps=10, decay_fraction=0.2)
    assert {multiplier(schedule, step, 100) for step in range(10, 81)} == {1.0}
    assert multiplier(schedule, 81, 100) < 1.0


def test_cosine_is_half_way_down_in_the_middle() -> None:
    schedule = ScheduleSpec(kind="cosine", warmup_steps=0, floor=0.0)
    assert multiplier(schedule, 50, 100) == pytest.approx(0.5)


def test_a_run_that_ends_within_its_warm_up_never_reaches_the_peak() -> None:
    schedule = ScheduleSpec(warmup_steps=10)
    assert [multiplier(schedule, step, 4) for step in range(1, 5)] == [0.1, 0.2, 0.3, 0.4]


@given(schedules, st.integers(1, 200), st.integers(1, 200))
def test_after_the_last_step_it_stays_where_it_ended(schedule: ScheduleSpec, steps: int, beyond: int) -> None:
    assert multiplier(schedule, steps + beyond, steps) == multiplier(schedule, steps, steps)
