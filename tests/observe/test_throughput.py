"""Speeds and estimates, and numbers as people read them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.throughput import (
    format_bytes,
    format_count,
    format_duration,
    smooth,
    time_left_s,
    typical,
)

FINITE = st.floats(-1e6, 1e6)


def test_one_slow_step_does_not_change_the_typical_step() -> None:
    assert typical([1.0, 1.0, 900.0, 1.0, math.nan]) == 1.0


def test_only_recent_steps_count() -> None:
    assert typical([9.0] * 100 + [1.0] * 50) == 1.0


def test_there_is_no_typical_step_before_the_first() -> None:
    assert typical([]) is None
    assert time_left_s(10, []) is None


def test_time_left_is_stretched_by_what_is_not_spent_in_steps() -> None:
    assert time_left_s(10, [2.0], step_share=0.5) == 40.0


def test_no_time_is_left_past_the_end() -> None:
    assert time_left_s(-3, [2.0]) == 0.0


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1])
def test_a_share_outside_zero_to_one_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="step_share"):
        time_left_s(1, [1.0], share)


@given(value=FINITE, count=st.integers(1, 50), half_span=st.integers(0, 60))
def test_a_constant_stays_that_constant_when_smoothed(value: float, count: int, half_span: int) -> None:
    assert smooth([value] * count, half_span) == pytest.approx([value] * count, abs=1e-6)


@given(slope=st.floats(-10, 10), count=st.integers(1, 60), half_span=st.integers(0, 10))
def test_a_straight_line_does_not_lag_when_smoothed(slope: float, count: int, half_span: int) -> None:
    line = [slope * index for index in range(count)]
    reliable = max(0, count - half_span)
    assert smooth(line, half_span)[:reliable] == pytest.approx(line[:reliable], abs=1e-6)


@given(values=st.lists(FINITE, min_size=1, max_size=40), half_span=st.integers(0, 50))
def test_smoothing_is_the_plain_mean_of_the_neighbors(values: list[float], half_span: int) -> None:
    for index, mean in enumerate(smooth(values, half_span)):
        reach = min(half_span, index)
        neighbors = values[index - reach : index + reach + 1]
        assert mean == pytest.approx(sum(neighbors) / len(neighbors), abs=1e-4)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "–"),
        (math.inf, "–"),
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1:00"),
        (187, "3:07"),
        (3599.6, "1:00:00"),
        (7389, "2:03:09"),
        (5 * 86_400 + 7200, "5 d 02 h"),
    ],
)
def test_durations_read_like_a_clock(seconds: float | None, shown: str) -> None:
    assert format_duration(seconds) == shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00 k"),
        (12_345, "12.3 k"),
        (999_951, "1.00 M"),
        (7.891e9, "7.89 G"),
        (0.5, "0.50"),
    ],
)
def test_counts_have_three_digits_and_a_letter(number: float, shown: str) -> None:
    assert format_count(number) == shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1 << 30, "1.00 GiB"), (1 << 50, "1024 TiB")],
)
def test_bytes_are_in_powers_of_1024(size: int, shown: str) -> None:
    assert format_bytes(size) == shown
