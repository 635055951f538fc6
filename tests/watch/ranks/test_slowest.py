"""Slow ranks are found afterwards as a fleet finds them, and nobody is accused for nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from observe.rank_frames import drawn_frame, write
from phalanx.observe.rank_stream import RankStream
from phalanx.run.layout import Layout
from phalanx_watch.ranks import newest_windows, slowest, values_of


def noise(seed: int, windows: int, ranks: int, spread: float = 0.03) -> NDArray[np.float32]:
    """Computing times around 0.2 s, with heavy tails."""
    random = np.random.default_rng(seed)
    return (0.2 * (1 + spread * np.abs(random.standard_t(2, (windows, ranks))))).astype(np.float32)


@given(st.integers(0, 2**32), st.integers(0, 31))
def test_a_planted_slow_rank_is_first_and_the_only_one_that_is_slow(seed: int, planted: int) -> None:
    values = noise(seed, 20, 32)
    values[:, planted] *= 1.4
    ranking = slowest("compute_s", values, Layout(replicate=32), 5)
    assert len(ranking) == 5
    assert ranking[0].rank == planted
    assert [entry.rank for entry in ranking if entry.slow] == [planted]
    assert 0.2 < ranking[0].slowdown < 0.6
    assert ranking[0].value == pytest.approx(ranking[0].typical * (1 + ranking[0].slowdown))


def test_a_rank_that_was_slow_for_a_short_while_is_not_called_slow() -> None:
    values = noise(1, 20, 8)
    values[:6, 3] *= 2
    assert not any(entry.slow for entry in slowest("compute_s", values, Layout(replicate=8), 8))


def test_few_ranks_on_a_noisy_machine_are_judged_by_all_windows_together() -> None:
    values = noise(2, 20, 3, spread=0.1)
    values[:, 1] *= 1.9
    assert [entry.rank for entry in slowest("compute_s", values, Layout(replicate=3), 3) if entry.slow] == [1]


def test_a_stage_that_has_more_to_do_is_not_slow_and_a_rank_is_compared_within_its_stage() -> None:
    values = noise(3, 10, 8)
    values[:, 4:] *= 3
    values[:, 6] *= 1.5
    ranking = slowest("compute_s", values, Layout(pipeline=2, replicate=4), 8)
    assert [entry.rank for entry in ranking if entry.slow] == [6]


def test_ranks_that_do_not_know_are_left_out() -> None:
    values = noise(4, 10, 4)
    values[:, 2] = np.nan
    values[3, 0] = np.nan
    ranking = slowest("compute_s", values, Layout(replicate=4), 8)
    assert {entry.rank for entry in ranking} == {1, 3}
    assert slowest("compute_s", values * np.nan, Layout(replicate=4), 8) == []


def test_one_rank_that_waits_for_data_stands_out_from_many_that_never_do() -> None:
    values = np.zeros((10, 6), np.float32)
    values[:, 4] = 0.5
    ranking = slowest("data_wait_s", values, Layout(replicate=6), 2)
    assert [entry.rank for entry in ranking if entry.slow] == [4]
    assert np.isfinite(ranking[0].deviations)


def test_windows_are_the_newest_of_one_attempt_with_equally_many_ranks(tmp_path: Path) -> None:
    path = tmp_path / "ranks.bin"
    write(path, *(drawn_frame(1, step, 3, step // 30) for step in range(0, 90, 10)), drawn_frame(1, 90, 2, 2))
    with RankStream(path) as stream:
        assert list(newest_windows(stream, 20)) == [9]
        assert list(newest_windows(stream, 20, attempt=1)) == [3, 4, 5]
        assert list(newest_windows(stream, 2, attempt=1)) == [4, 5]
        assert list(newest_windows(stream, 2, attempt=7)) == []
        assert values_of(stream, "compute_s", newest_windows(stream, 9, attempt=0)).shape == (3, 3)
    with RankStream(tmp_path / "none") as stream:
        assert list(newest_windows(stream, 2)) == []


def test_fewer_windows_than_a_fleet_needs_to_replace_a_straggler_call_no_rank_slow() -> None:
    values = noise(5, 4, 8)
    values[:, 3] *= 3
    for windows, slow in ((1, []), (3, []), (4, [3])):
        ranking = slowest("compute_s", values[:windows], Layout(replicate=8), 8)
        assert [entry.rank for entry in ranking if entry.slow] == slow
        assert ranking[0].rank == 3
