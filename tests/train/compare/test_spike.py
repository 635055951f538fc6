"""The verdict on a replayed spike, from its figures alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from phalanx.run.spec import TrainSpec
from phalanx.train.compare.observation import BatchScores, Replay, StepMeasures
from phalanx.train.compare.spike import judge_spike_replay

TRAIN = TrainSpec(spike_window=8, slots=4)
VOCABULARY = 20_000  # an untrained model has a loss of 9.9
HISTORY = [[3.0 + 0.01 * (n % 3), 1.0 + 0.05 * (n % 2)] for n in range(8)]
USUAL_SLOTS = (2.98, 3.0, 3.01, 3.03)
LAYERS = {"embedding": 0.5, "blocks.0": 0.4, "blocks.1": 0.6, "head": 0.3}
SPIKE = 10


def replayed(
    slots: tuple[float, ...] = USUAL_SLOTS,
    norm: float = 1.0,
    batch_before: float | None = 3.0,
    **layers: float,
) -> Replay:
    """A replay of two steps, the second of which has these figures."""
    loss = math.fsum(slots) / len(slots)
    measures = {
        9: StepMeasures(1e-3, USUAL_SLOTS, LAYERS, is_applied=True),
        SPIKE: StepMeasures(1e-3, slots, {**LAYERS, **layers}, is_applied=True),
    }
    numbers = {9: {"loss": 3.0, "grad_norm": 1.0}, SPIKE: {"loss": loss, "grad_norm": norm}}
    scores = BatchScores(0, {}, (), batch_before, HISTORY)
    return Replay({}, [[]], numbers, measures, scores)


def cause(replay: Replay, **wide: Any) -> str:
    return judge_spike_replay(SPIKE, replay, TRAIN, VOCABULARY, **wide).cause


@pytest.mark.parametrize(
    ("replay", "expected"),
    [
        (replayed(), "no spike"),
        (replayed((3.0, 9.0, 3.0, 3.0)), "bad batch"),
        (replayed((9.0, 9.0, 9.0, 9.0)), "bad batch"),
        (replayed((9.0, 9.1, 9.0, 8.9), batch_before=8.8), "rate"),
        (replayed((math.nan,) * 4, math.inf, batch_before=math.nan), "rate"),
        (replayed((3.0, math.nan, 3.0, 3.0), math.inf), "bad batch"),
        (replayed(norm=20.0, **{"blocks.1": 19.9}), "layer"),
        (replayed(norm=20.0, **{name: 20 * norm for name, norm in LAYERS.items()}), "rate"),
    ],
)
def test_each_cause_is_distinguished(replay: Replay, expected: str) -> None:
    assert cause(replay) == expected


@pytest.mark.parametrize("slots", [(40.0, 50.0, 40.0, 40.0), (39.0, 39.0, 39.0, 39.0)])
def test_a_run_whose_loss_was_above_an_untrained_models_before_has_too_high_a_rate(
    slots: tuple[float, ...],
) -> None:
    history = [[40.0 + n, 1.0] for n in range(8)]
    diverged = replayed(slots, 20.0, batch_before=40.0, **{"blocks.1": 19.9})
    assert diverged.scores is not None
    diverged = replace(diverged, scores=replace(diverged.scores, history=history))
    assert cause(diverged) == "rate"


def test_a_run_that_began_above_an_untrained_models_loss_has_not_diverged() -> None:
    history = [[60.0 - n, 1.0] for n in range(9)]
    early = replayed((52.0, 200.0, 52.0, 52.0), batch_before=52.0)
    assert early.scores is not None
    assert cause(replace(early, scores=replace(early.scores, history=history))) == "bad batch"


def test_a_step_that_spikes_only_in_the_narrow_format_is_the_formats() -> None:
    narrow = replayed((9.0, 9.0, 9.0, 9.0))
    assert cause(narrow, in_fp32=replayed()) == "format"
    assert cause(narrow, in_fp32=narrow) == "bad batch"


def test_slots_are_listed_by_their_loss_and_layers_by_their_rise() -> None:
    findings = judge_spike_replay(
        SPIKE, replayed((3.0, 9.0, 3.1, 3.0), **{"blocks.1": 6.0}), TRAIN, VOCABULARY
    )
    assert [slot.slot for slot in findings.slots[:2]] == [1, 2]
    assert (findings.layers[0].layer, findings.layers[0].rise) == ("blocks.1", pytest.approx(10))


def test_without_a_replayed_step_before_slots_are_compared_by_the_losses_of_batches() -> None:
    replay = replayed((3.0, 9.0, 3.0, 3.0))
    alone = replace(replay, measures={SPIKE: replay.measures[SPIKE]}, numbers={SPIKE: replay.numbers[SPIKE]})
    findings = judge_spike_replay(SPIKE, alone, TRAIN, VOCABULARY)
    assert [slot.slot for slot in findings.slots if slot.stands_out] == [1]
    assert all(layer.rise is None for layer in findings.layers)
