"""A run's work besides stepping: it reports, saves, recovers and refuses."""

from __future__ import annotations

import dataclasses
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.committed.copying import verify
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.data.errors import DataError
from phalanx.data.formats.document import Document
from phalanx.data.preparing.prepare import prepare
from phalanx.data.reading.dataset import RunData
from phalanx.data.stored.shard_writer import BLOCK_BYTES
from phalanx.observe.event_log import read_events
from phalanx.observe.events import (
    CheckpointSaved,
    Evaluated,
    Finished,
    Message,
    NonFinite,
    Restored,
    Step,
)
from phalanx.observe.goodput import goodput
from phalanx.process.this_process import StopRequest
from phalanx.run.directory.paths import newest_in_words
from phalanx.run.spec import CheckpointSpec, EvalSpec, RunSpec
from phalanx.train.evaluation import observers
from phalanx.train.lifecycle import loop
from phalanx.train.lifecycle.bad_steps import BadStep
from ranks import Ranks
from tiny_runs import on_layout, tiny_run, train_on_this_rank

CLOCKS_S = 0.05
"""By so much may the time of day, in events, and the monotonic clock, in ledgers, drift apart in a test."""


def bodies(run_dir: Path, kind: type) -> list[Any]:
    return [event.body for event in read_events(run_dir / "events.jsonl") if isinstance(event.body, kind)]


@pytest.fixture(scope="module")
def finished(ranks: Ranks, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was broken off in step 4 and finished on other ranks."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    spec = tiny_run(dataset, run_dir)
    ranks.run(2, train_on_this_rank, spec, 4)
    began(run_dir).write_text(repr(time.time()))
    ranks.run(3, train_on_this_rank, spec)
    return run_dir


def began(run_dir: Path) -> Path:
    """The file with the time of day at which the last attempt was about to start."""
    return run_dir.with_suffix(".began")


def test_every_step_is_in_the_event_stream_and_redone_ones_have_the_same_loss(finished: Path) -> None:
    losses: dict[int, set[float]] = {}
    for step in bodies(finished, Step):
        losses.setdefault(step.step, set()).add(step.loss)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    assert all(len(values) == 1 for values in losses.values())


def test_a_restart_goes_on_from_the_newest_checkpoint(finished: Path) -> None:
    assert [restored.step for restored in bodies(finished, Restored)] == [2]


def test_evaluations_come_when_they_are_due_and_at_the_end(finished: Path) -> None:
    assert {evaluation.step for evaluation in bodies(finished, Evaluated)} == {2, 4, 6}


def test_a_step_is_logged_then_evaluated_then_reported_as_saved(finished: Path) -> None:
    kinds = Step, Evaluated, CheckpointSaved
    events = list(read_events(finished / "events.jsonl"))
    bodies = [event.body for event in events if event.attempt == events[-1].attempt]
    order = [type(body) for body in bodies if isinstance(body, kinds) and body.step == 4]
    assert order == list(kinds)


def test_old_checkpoints_are_let_go(finished: Path) -> None:
    # The disk decides if the first attempt reports that step 2 was written: it was broken off two steps later.
    assert [saved.step for saved in bodies(finished, CheckpointSaved)] in ([2, 4, 6], [4, 6])
    assert DiskTier(finished / "checkpoints").steps() == [2, 4, 6]


def test_tokens_are_counted_over_the_run_and_not_over_attempts(finished: Path) -> None:
    assert bodies(finished, Step)[-1].tokens == 6 * 16 * 24


def test_the_ledger_of_each_step_sums_to_the_time_since_the_start(finished: Path) -> None:
    everything = list(read_events(finished / "events.jsonl"))
    events = [event for event in everything if event.attempt == everything[-1].attempt]
    began_s = float(began(finished).read_text())
    for before, event in pairwise(events):
        if isinstance(event.body, Step):
            held_s = sum(event.body.ledger.values())
            # The ledger began between the start of the attempt and its first event, and was read between the event
            # before and this one: bounds that hold however slow the machine is.
            assert before.t - events[0].t - CLOCKS_S <= held_s <= event.t - began_s + CLOCKS_S


def test_the_time_of_redone_steps_is_counted_as_lost(finished: Path) -> None:
    result = goodput(read_events(finished / "events.jsonl"))
    assert result.rollback_ns > 0
    assert result.committed_ns > 0


def test_the_result_has_the_figures_that_runs_are_compared_by(finished: Path) -> None:
    (end,) = bodies(finished, Finished)
    assert {"run_dir", "step", "loss", "tokens_per_s", "mfu", "weights_sha256"} <= end.result.keys()


# --- numbers that are not finite ----------------------------------------------------------------


def poisoned(spec: RunSpec, steps: set[int]) -> Any:
    """Trains with embeddings that are NaN throughout the given steps, on one rank."""
    import torch

    from phalanx.train.step.step import Stepper

    original = Stepper._run_slots

    def run_slots(self: Any, audit: Any) -> Any:
        losses, tokens = original(self, audit)
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen in steps:
            next(iter(self.built.model.parts[0].parameters())).grad[0, 0] = torch.nan
        return losses, tokens

    Stepper._run_slots = run_slots  # type: ignore[method-assign]
    try:
        return train_on_this_rank(spec)
    finally:
        Stepper._run_slots = original  # type: ignore[method-assign]


def test_a_gradient_that_is_not_a_number_stops_the_run_with_the_weights_saved(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(AssertionError, match=r"step 4: .*gradient of embedding\.weight \(1 of"):
        ranks.run(1, poisoned, tiny_run(dataset, run_dir), {4})
    assert DiskTier(run_dir / "checkpoints").steps() == [2, 3]
    (report,) = bodies(run_dir, NonFinite)
    assert (report.step, report.skipped) == (4, False)


def test_a_step_that_is_not_finite_is_skipped_and_recorded_if_the_run_file_skips(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    spec = tiny_run(dataset, tmp_path / "run", on_nonfinite="skip")
    result = ranks.run(1, poisoned, spec, {2, 5})[0]
    assert result["step"] == 6
    assert [(report.step, report.skipped) for report in bodies(tmp_path / "run", NonFinite)] == [
        (2, True),
        (5, True),
    ]


def train_without_memory_for(function: str, spec: RunSpec) -> Any:
    """Trains on a rank whose memory does not suffice for a function of the loop."""

    def no_memory(*_args: object) -> Any:
        raise MemoryError(function)

    user = loop if function == "weights_sha256" else observers
    kept = getattr(user, function)
    setattr(user, function, no_memory)
    try:
        return train_on_this_rank(spec)
    finally:
        setattr(user, function, kept)


@pytest.mark.parametrize("function", ["evaluate", "weights_sha256"])
def test_a_run_that_fails_after_its_last_step_has_saved_it(
    function: str, ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    spec = dataclasses.replace(
        tiny_run(dataset, tmp_path / "run", steps=3),
        checkpoint=CheckpointSpec(every_steps=100),
        evaluation=EvalSpec(every_steps=0),
    )
    with pytest.raises(Exception, match=f"MemoryError: {function}"):
        ranks.run(1, train_without_memory_for, function, spec)
    assert DiskTier(tmp_path / "run" / "checkpoints").steps() == [3]


def test_too_many_skipped_steps_in_a_row_stop_the_run(ranks: Ranks, dataset: Path, tmp_path: Path) -> None:
    spec = tiny_run(dataset, tmp_path / "run", on_nonfinite="skip", max_skipped=2)
    with pytest.raises(AssertionError, match="2 steps in a row were skipped"):
        ranks.run(1, poisoned, spec, {3, 4})


# --- damaged checkpoints ------------------------------------------------------------------------


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


def test_a_corrupted_checkpoint_is_named_and_the_one_before_is_used(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    spec = tiny_run(dataset, tmp_path / "run")
    undisturbed = ranks.run(
        2, train_on_this_rank, dataclasses.replace(spec, run_dir=str(tmp_path / "whole"))
    )[0]
    ranks.run(2, train_on_this_rank, spec, 6)
    newest = DiskTier(tmp_path / "run" / "checkpoints").folder(4)
    flip_a_byte(newest / "rank-00001.safetensors")
    result = ranks.run(3, train_on_this_rank, spec)[0]
    assert [restored.step for restored in bodies(tmp_path / "run", Restored)] == [2]
    assert any("step-00000004" in note.text for note in bodies(tmp_path / "run", Message))
    assert result["weights_sha256"] == undisturbed["weights_sha256"]
    # The damaged step was set aside when training passed it again, so what is there now is good.
    tier = DiskTier(tmp_path / "run" / "checkpoints")
    assert tier.steps() == [2, 4, 6]
    assert not verify(tier.root)


def test_when_no_checkpoint_is_good_the_run_refuses_to_begin_from_scratch(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    spec = on_layout(tiny_run(dataset, tmp_path / "run"), "none", 0)
    ranks.run(1, train_on_this_rank, spec, 6)
    tier = DiskTier(tmp_path / "run" / "checkpoints")
    for step in tier.steps():
        flip_a_byte(tier.folder(step) / "rank-00000.safetensors")
    with pytest.raises(AssertionError, match=r"no checkpoint can be restored(.|\n)*step 4(.|\n)*step 2"):
        ranks.run(1, train_on_this_rank, spec)


def first_unreadable(spec: RunSpec, folder: Path) -> tuple[int, list[int]]:
    """The first step of a run that cannot read its samples in ``folder``, and its slots that cannot; (0, []) if there is none."""
    data = RunData.open(folder, spec.train.seq_len, spec.runtime.seed)
    per_slot = spec.train.batch_size // spec.train.slots
    for step in range(1, spec.train.steps + 1):
        bad = []
        for slot in range(spec.train.slots):
            try:
                data.train_samples((step - 1) * spec.train.batch_size + slot * per_slot, per_slot)
            except DataError:
                bad.append(slot)
        if bad:
            return step, bad
    return 0, []


@pytest.mark.parametrize(("sharding", "shard_ranks"), [("none", 0), ("zero3", 2)])
def test_if_one_of_two_ranks_cannot_read_its_samples_both_save_the_steps_before(
    ranks: Ranks, tmp_path: Path, sharding: str, shard_ranks: int
) -> None:
    texts = (" ".join(f"{n * i % 991:x}" for i in range(200)) for n in range(1_500))
    prepare(
        [Document(f"document-{n}", text) for n, text in enumerate(texts)],
        tmp_path / "data",
        tokenizer="bytes",
    )
    spec = on_layout(tiny_run(tmp_path / "data", tmp_path / "run"), sharding, shard_ranks)
    spec = dataclasses.replace(spec, checkpoint=CheckpointSpec(every_steps=1_000))
    (shard,) = (tmp_path / "data").glob("train-*.bin")
    content = shard.read_bytes()
    for block in range(len(content) // BLOCK_BYTES):
        at = block * BLOCK_BYTES
        shard.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        step, slots = first_unreadable(spec, tmp_path / "data")
        if step >= 3 and len(slots) == 1:
            break
    else:
        raise AssertionError("no block is first read by one slot of a later step")
    with pytest.raises(AssertionError, match="not what was written"):
        ranks.run(2, train_on_this_rank, spec)
    tier = DiskTier(tmp_path / "run" / "checkpoints")
    assert tier.steps() == [step - 1]
    shard.write_bytes(content)
    (resumed, *_) = ranks.run(2, train_on_this_rank, spec)
    alone = on_layout(dataclasses.replace(spec, run_dir=str(tmp_path / "undisturbed")), "none", 0)
    (undisturbed,) = ranks.run(1, train_on_this_rank, alone)
    assert resumed["weights_sha256"] == undisturbed["weights_sha256"]


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("begin_step", [0, 7])
def test_a_run_that_stops_before_its_first_step_does_not_report_a_saved_step(
    begin_step: int, saved: bool
) -> None:
    newest = newest_in_words(begin_step)
    kept = loop.what_is_kept(begin_step, begin_step, saved=saved, newest=newest)
    assert kept.startswith("no step was done since the start")
    assert (
        loop.what_is_kept(begin_step, begin_step + 1, saved=True, newest=newest)
        == f"step {begin_step + 1} is saved"
    )


def test_words_of_what_is_kept_claim_a_checkpoint_only_where_there_is_one() -> None:
    bad = BadStep(NonFinite(5, "loss nan", skipped=False, first_sample=0, samples=8), "loss nan")
    for step, newest in ((0, "there is no checkpoint yet"), (4, "the newest checkpoint is of step 4")):
        assert newest_in_words(step) == newest
        assert loop.what_is_kept(0, 5, saved=False, newest=newest) == f"the last checkpoint failed; {newest}"
        assert f"could not be saved: {newest}" in str(bad.error(saved=False, newest=newest))
        assert newest not in str(bad.error(saved=True, newest=newest))


class StopAfter(StopRequest):
    """A request to stop that is there once it has been looked at so many times: once a step, and once in each round of an evaluation."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "made":
            self.looks += 1
            return self.looks > 3
        return super().__getattribute__(name)


def train_and_stop(spec: RunSpec) -> dict[str, Any] | None:
    return train_on_this_rank(spec, stop=StopAfter())


@pytest.mark.parametrize("count", [1, 2])
def test_a_request_to_stop_ends_an_evaluation_and_its_step_is_saved(
    ranks: Ranks, dataset: Path, tmp_path: Path, count: int
) -> None:
    spec = tiny_run(dataset, tmp_path / "run")
    spec = dataclasses.replace(
        spec,
        evaluation=EvalSpec(every_steps=2, sequences=1000, final_sequences=16),
        checkpoint=dataclasses.replace(spec.checkpoint, every_steps=5),
    )
    assert ranks.run(count, train_and_stop, spec) == [None] * count
    assert DiskTier(tmp_path / "run" / "checkpoints").steps() == [2], "no further step was computed"
    assert bodies(tmp_path / "run", Evaluated) == []
    (result, *_) = ranks.run(1, train_on_this_rank, spec)
    undisturbed = dataclasses.replace(spec, run_dir=str(tmp_path / "undisturbed"))
    assert result["weights_sha256"] == ranks.run(1, train_on_this_rank, undisturbed)[0]["weights_sha256"]
