"""Stragglers: found soon, and nobody accused for nothing."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from phalanx.fleet.health.stragglers import History, StragglerRule, judge_window, roles
from phalanx.run.layout import Layout

RANKS, STEPS = 64, 16
RULE = StragglerRule()
ALIKE = (0,) * 256


def windows(seed: int, count: int, ranks: int = RANKS) -> NDArray[np.float64]:
    """Window times (s) ``(count, ranks)`` of healthy ranks: heavy-tailed noise (Student's t, two degrees of freedom, so
    that its variance is infinite) of 3 % on 1 s, and one step in a hundred that takes up to three times as long."""
    random = np.random.default_rng(seed)
    shape = (count, STEPS, ranks)
    noise = 1 + 0.03 * np.abs(random.standard_t(2, shape))
    hiccups = np.where(random.random(shape) < 0.01, random.uniform(1, 3, shape), 1.0)
    return np.median(noise * hiccups, axis=1)


def judged(times: NDArray[np.float64], rule: StragglerRule = RULE) -> list[tuple[int, ...]]:
    """The stragglers named after each window."""
    history, named = History(), []
    for row in times:
        history, stragglers = judge_window(history, dict(enumerate(row.tolist())), ALIKE, rule)
        named.append(tuple(straggler.rank for straggler in stragglers))
    return named


def test_nobody_is_named_in_ten_thousand_clean_windows_with_heavy_tailed_noise() -> None:
    named = [names for seed in range(10) for names in judged(windows(seed, 1000))]
    assert named == [()] * 10_000


def test_a_rank_that_is_ten_per_cent_slower_is_found_within_six_windows() -> None:
    delays = []
    for seed in range(200):
        times = windows(1000 + seed, 8)
        slow = seed % RANKS
        times[:, slow] *= 1.10
        named = judged(times)
        assert all(set(names) <= {slow} for names in named)
        delays.append(1 + next(i for i, names in enumerate(named) if names == (slow,)))
    assert max(delays) <= RULE.windows + 1
    assert np.median(delays) == RULE.needed


def test_a_whole_slow_node_of_eight_is_named_and_nobody_else() -> None:
    times = windows(5, 6)
    times[:, 8:16] *= 1.2
    assert set(judged(times)[-1]) == set(range(8, 16))


def test_of_two_ranks_the_slower_one_is_named() -> None:
    times = np.array([[1.0, 1.2]] * 5)
    assert judged(times)[-1] == (1,)


def test_a_stage_that_has_more_to_do_is_no_straggler() -> None:
    layout = Layout(pipeline=2, shard=2, tensor=2)
    assert roles(layout) == (0, 0, 0, 0, 1, 1, 1, 1)
    history = History()
    for _ in range(10):
        times = {rank: 1.0 + 0.5 * stage for rank, stage in enumerate(roles(layout))}
        history, named = judge_window(history, times, roles(layout), RULE)
        assert named == ()


def test_a_rank_that_recovers_is_not_named_any_more() -> None:
    slow = np.array([[1.0, 1.0, 1.0, 1.2]] * 3 + [[1.0] * 4] * 3 + [[1.0, 1.0, 1.0, 1.2]])
    assert judged(slow) == [()] * 7


def test_a_rank_that_stops_reporting_is_forgotten() -> None:
    history = History()
    for _ in range(3):
        history, _ = judge_window(history, {0: 1.0, 1: 1.0, 2: 1.2}, ALIKE, RULE)
    assert dict(history.flags) == {2: 0b111}
    history, _ = judge_window(history, {0: 1.0, 1: 1.0}, ALIKE, RULE)
    assert history == History()


@given(
    st.integers(0, 2**32),
    st.floats(1e-3, 1e3),
    st.permutations(range(8)),
)
def test_neither_the_unit_nor_the_numbering_of_ranks_changes_who_is_named(
    seed: int, unit: float, order: list[int]
) -> None:
    times = windows(seed, 5, ranks=8)
    times[:, 3] *= 1.3
    assert judged(times)[-1] == (3,)
    assert judged(unit * times[:, order])[-1] == (order.index(3),)


def test_history_survives_json() -> None:
    history, _ = judge_window(History(), {0: 1.0, 1: 1.0, 2: 1.2}, ALIKE, RULE)
    stored = json.loads(json.dumps(dataclasses.asdict(history)))
    assert History(tuple((rank, bits) for rank, bits in stored["flags"])) == history


def test_a_rule_that_could_never_name_anybody_is_refused() -> None:
    with pytest.raises(ValueError, match="needed = 6 of windows = 5"):
        StragglerRule(needed=6)
