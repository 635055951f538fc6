"""Verdicts from logs and replays: functions on values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.train.compare.observation import Observation, Replay
from phalanx.train.compare.runs import (
    CheckpointDifference,
    Logged,
    NothingToReplayError,
    RunComparison,
    first_difference,
    judge_replays,
    steps_to_replay,
)


def log(*losses: float) -> Logged:
    return Logged({step: {"loss": loss, "grad_norm": 1.0} for step, loss in enumerate(losses, start=1)})


@given(st.lists(st.floats(width=64), min_size=1, max_size=5), st.data())
def test_the_first_logged_number_whose_bits_differ_is_found(losses: list[float], data: st.DataObject) -> None:
    assert first_difference(log(*losses), log(*losses)) == (None, len(losses), len(losses))
    place = data.draw(st.integers(0, len(losses) - 1))
    after = math.nextafter(losses[place], math.inf) if math.isfinite(losses[place]) else 0.0
    difference, last, _ = first_difference(log(*losses), log(*losses[:place], after))
    assert difference is not None
    assert (difference.step, last, list(difference.numbers)) == (place + 1, place, ["loss"])


def comparison(parts_at: int | None, read: tuple[int, ...]) -> RunComparison:
    checkpoint = None if parts_at is None else CheckpointDifference(parts_at, ())
    return RunComparison(True, (), {}, None, 0, 0, checkpoint, read, ())


def test_a_replay_begins_at_the_newest_equal_checkpoint_before_the_runs_part() -> None:
    assert steps_to_replay(comparison(45, (20, 40, 45)), from_start=False) == (40, 45)
    assert steps_to_replay(comparison(3, ()), from_start=False) == (0, 3)
    assert steps_to_replay(comparison(400, ()), from_start=True) == (0, 400)
    with pytest.raises(NothingToReplayError, match="--from-start"):
        steps_to_replay(comparison(400, ()), from_start=False)
    with pytest.raises(NothingToReplayError, match="do not part"):
        steps_to_replay(comparison(None, (20,)), from_start=False)


def replay(loss: float, value: int = 1) -> Replay:
    return Replay({}, [[Observation(2, "forward", "norm", value, 0, 0)]], {2: {"loss": loss}})


def test_a_run_whose_log_its_replay_does_not_confirm_is_named() -> None:
    verdict = judge_replays((replay(2.0), replay(2.0)), (log(1.0, 2.0), log(1.0, 2.5)), (0, 2))
    (unconfirmed_number,) = verdict.unconfirmed
    assert (
        unconfirmed_number.run,
        unconfirmed_number.step,
        unconfirmed_number.name,
        unconfirmed_number.logged,
        unconfirmed_number.replayed,
    ) == ("B", 2, "loss", 2.5, 2.0)
    assert "not with what B logged" in verdict.sentence


def test_the_sentence_on_replays_that_part_names_the_place() -> None:
    verdict = judge_replays((replay(2.0), replay(2.5, 3)), (log(1.0, 2.0), log(1.0, 2.5)), (0, 2))
    assert verdict.unconfirmed == ()
    assert verdict.sentence == (
        "the replays part at step 2, slot 0, micro-batch 0, forward of norm: rank 0 of A, rank 0 of B"
    )
