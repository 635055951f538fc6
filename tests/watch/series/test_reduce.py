"""Reducing a series to the columns of a picture: nothing that stands out is hidden."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx_watch.series.table import columns_of, reduce_series, rounded

SERIES = st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=300)


@given(SERIES, st.integers(1, 50))
def test_each_column_keeps_its_lowest_and_highest_value_and_draws_one_that_was_there(
    values: list[float], most: int
) -> None:
    x, y = np.arange(len(values), dtype=np.float64), np.array(values)
    columns = columns_of(x, most)
    reduced = reduce_series(y, columns)
    assert len(columns) <= most
    for number, members in enumerate(y[columns.number == number] for number in range(len(columns))):
        finite = members[np.isfinite(members)]
        if len(finite):
            assert (reduced.lo[number], reduced.hi[number]) == (finite.min(), finite.max())
            assert reduced.y[number] in finite
            assert number < len(columns) - 1 or reduced.y[number] == finite[-1]
        else:
            assert np.isnan([reduced.y[number], reduced.lo[number], reduced.hi[number]]).all()


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=200), st.integers(1, 50))
def test_columns_are_of_equal_width_for_any_gaps_between_points(places: list[float], most: int) -> None:
    x = np.sort(np.array(places))
    columns = columns_of(x, most)
    width = (x[-1] - x[0]) / most
    for number in range(len(columns)):
        members = x[columns.number == number]
        assert members[-1] - members[0] <= width * (1 + 1e-9) + 1e-6


def test_a_spike_of_one_step_in_a_hundred_thousand_is_drawn() -> None:
    x = np.arange(100_000, dtype=np.float64)
    y = 2 + 0.01 * np.sin(x)
    y[54_321] = 9.0
    reduced = reduce_series(y, columns_of(x, 1200))
    assert reduced.hi.max() == 9.0
    assert reduced.y.max() == 9.0


def test_the_line_of_a_noisy_quantity_follows_its_trend() -> None:
    x = np.arange(100_000, dtype=np.float64)
    trend = 2 + 1e-5 * x
    y = trend + np.random.default_rng(7).normal(0, 0.3, len(x))
    reduced = reduce_series(y, columns_of(x, 1200))
    assert (reduced.hi - reduced.lo).min() > 0.8
    assert np.abs(reduced.y - trend[:: len(x) // 1200][: len(reduced.y)]).max() < 0.3


def test_numbers_for_text_keep_seven_digits_and_are_none_if_not_finite() -> None:
    values = np.array([0.1234567891, -123456789.0, 0.0, np.nan, np.inf, 1e-300, 1e300])
    numbers = rounded(values)
    assert numbers[3] is None
    assert numbers[4] is None
    for was, now in zip(values, numbers, strict=True):
        if now is not None:
            assert abs(now - was) <= 1e-6 * abs(was)
    assert numbers[0] == 0.1234568
