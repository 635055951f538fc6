"""Spikes, as a function of the losses and gradient norms that a run has logged."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.run.spec import TrainSpec
from phalanx.train.lifecycle.progress import TrainProgress
from phalanx.train.step.spikes import SpikeRule
from phalanx.train.step.step import StepFlags, StepReport

RULE = SpikeRule(window=32, deviations=8.0)


def falling(steps: int, noise: float = 0.03, seed: int = 0) -> list[tuple[float, float]]:
    """Losses and norms as a run has them: falling steeply, then slowly, with noise; the norms' is log-normal."""
    chance = random.Random(seed)
    return [
        (
            2.0 + 3.0 * math.exp(-step / 40) + chance.gauss(0, noise),
            (0.4 + 2 * math.exp(-step / 20)) * math.exp(chance.gauss(0, 0.25)),
        )
        for step in range(steps)
    ]


def spikes(rule: SpikeRule, steps: list[tuple[float, float]]) -> list[int]:
    """The indices of the steps that are spikes after those before them."""
    history: list[list[float]] = []
    indices = []
    for index, (loss, norm) in enumerate(steps):
        if rule.find(history, loss, norm):
            indices.append(index)
        history = rule.remember(history, loss, norm)
    return indices


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_has_none(seed: int) -> None:
    assert (
        spikes(SpikeRule(TrainSpec().spike_window, TrainSpec().spike_deviations), falling(600, seed=seed))
        == []
    )


def test_a_lone_jump_of_the_loss_is_one() -> None:
    steps = falling(200)
    steps[150] = (steps[150][0] + 1.0, steps[150][1])
    assert spikes(RULE, steps) == [150]


def test_a_lone_jump_of_the_gradient_norm_is_one_and_is_named() -> None:
    steps = falling(200)
    steps[150] = (steps[150][0], 30.0)
    assert spikes(RULE, steps) == [150]
    spike = RULE.find(steps[118:150], *steps[150])
    assert spike is not None
    assert spike.figure == "gradient norm"


def test_a_loss_that_falls_is_none_however_far() -> None:
    steps = falling(100)
    assert RULE.find(steps[-32:], 0.01, 0.01) is None


def test_until_half_the_window_is_there_nothing_is_usual() -> None:
    steps = falling(200)
    assert RULE.find(steps[100:115], 50.0, 50.0) is None
    assert RULE.find(steps[100:116], 50.0, 50.0) is not None


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_not_finite_is_no_spike_and_is_not_remembered(number: float) -> None:
    steps = falling(100)
    assert RULE.find(steps, number, 1.0) is None
    assert RULE.find(steps, 2.0, number) is None
    assert RULE.remember(steps[-31:], number, 1.0) == [list(step) for step in steps[-31:]]


def test_a_level_that_has_changed_for_good_is_usual_after_half_a_window() -> None:
    steps = falling(200) + [(loss + 2.0, norm) for loss, norm in falling(200, seed=1)[100:]]
    spike_steps = spikes(RULE, steps)
    assert spike_steps[0] == 200
    assert 8 <= len(spike_steps) <= RULE.window // 2 + 1


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.01, 10)), min_size=16, max_size=32),
    st.floats(0.1, 100),
)
def test_a_spike_stays_one_when_the_loss_is_larger_still(
    history: list[tuple[float, float]], loss: float
) -> None:
    if RULE.find(history, loss, 0.0):
        assert RULE.find(history, loss * 1.5, 0.0)


# --- the state --------------------------------------------------------------------------------------


def advance(progress: TrainProgress, loss: float, *, applied: bool = True) -> None:
    train = TrainSpec(batch_size=10, spike_window=8)
    report = StepReport(loss, 1.0, 100, 0.1, applied, StepFlags())
    progress.advance(report, progress.updates + applied, train, progress.spike(report, train))


def test_the_state_lists_what_was_left_out_by_sample_and_joins_neighbors() -> None:
    progress = TrainProgress()
    for _ in range(8):
        advance(progress, 2.0)
    advance(progress, 9.0, applied=False)
    advance(progress, 9.0, applied=False)
    advance(progress, 2.0)
    advance(progress, 9.0, applied=False)
    assert progress.left_out == [[80, 20], [110, 10]]
    assert progress.spikes == [[9, 10], [12, 12]]


def test_the_state_of_a_version_without_spikes_is_read_with_an_empty_history() -> None:
    kept = {"step": 4, "tokens": 9, "updates": 4, "skipped_in_a_row": 0, "loss": 2.0, "next_sample": 40}
    assert TrainProgress.from_extra(kept).recent == []
