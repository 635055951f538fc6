"""Problems planted in real runs of real ranks are named by what the runs have left."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from phalanx.observe.event_log import read_events
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.sections.monitoring import StatisticsSpec
from phalanx.run.spec import RunSpec
from phalanx.train.start.open_run import take_lock
from phalanx_watch.why.observed import Observed, Reason
from phalanx_watch.why.reasons import judge, observe, reasons
from ranks import Ranks
from spiking_runs import SPIKE, make_noise, spiking_run
from tiny_runs import make_dataset, tiny_run, train_on_this_rank


def named(run_dir: Path, code: str) -> Reason:
    all_reasons = reasons(RunDirectory(run_dir), time.time())
    assert code in [reason.code for reason in all_reasons], all_reasons
    return next(reason for reason in all_reasons if reason.code == code)


@contextmanager
def going_on(run_dir: Path) -> Iterator[None]:
    """Hold the run directory, as a process does that trains."""
    import os

    (run_dir / "result.json").unlink(missing_ok=True)
    lock = take_lock(run_dir / "lock")
    try:
        yield
    finally:
        os.close(lock)


def with_nan(spec: RunSpec, number: int) -> Any:
    """Train with a gradient that is not a number in one step."""
    import torch

    from phalanx.train.step.step import Stepper

    original = Stepper._run_slots

    def run_slots(self: Any, audit: Any) -> Any:
        losses, tokens = original(self, audit)
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen == number:
            losses[5] = torch.nan
            next(iter(self.built.model.parts[0].parameters())).grad[0, 0] = torch.nan
        return losses, tokens

    Stepper._run_slots = run_slots  # type: ignore[method-assign]
    try:
        return train_on_this_rank(spec)
    finally:
        Stepper._run_slots = original  # type: ignore[method-assign]


def test_a_loss_that_is_not_a_number_is_named_with_its_batch_slot_layer_and_rank(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="not finite"):
        ranks.run(1, with_nan, tiny_run(dataset, tmp_path / "run"), 4)
    reason = named(tmp_path / "run", "not-finite")
    assert reason.severity == "critical"
    assert reason.where == "step 4, slot 5, gradient of embedding.weight, rank 0"
    assert "samples 48 to 63" in reason.evidence[1]


def test_a_spike_is_named_with_its_batch_and_the_checkpoint_that_was_kept(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    ranks.run(2, train_on_this_rank, spiking_run(dataset, make_noise(tmp_path / "noise"), tmp_path / "run"))
    with going_on(tmp_path / "run"):
        # The window of this run is short: eight steps later it would be no news.
        directory = RunDirectory(tmp_path / "run")
        seen = upto(observe(directory, time.time()), SPIKE + 4)
        reason = next(reason for reason in judge(seen) if reason.code == "loss-spike")
    assert reason.where.startswith(f"step {SPIKE}, slot ")
    assert f"samples {(SPIKE - 1) * 16} to {SPIKE * 16 - 1}" in reason.evidence[1]
    assert f"step {SPIKE - 1}" in reason.doing


def upto(seen: Observed, step: int) -> Observed:
    """The same when this step was the newest."""
    end = next(index for index, event in enumerate(seen.events) if getattr(event.body, "step", 0) > step)
    return dataclasses.replace(
        seen, events=seen.events[:end], now=seen.events[end - 1].t, finished=False, is_held=True
    )


def without_disk(spec: RunSpec) -> Any:
    """Train while no file of a checkpoint can be written."""
    from phalanx.checkpoint.tiers.disk import DiskTier

    original = DiskTier.write

    def write(*_args: object, **_named: object) -> None:
        raise OSError(5, "Input/output error")

    DiskTier.write = write  # type: ignore[method-assign,assignment]
    try:
        return train_on_this_rank(spec)
    finally:
        DiskTier.write = original  # type: ignore[method-assign]


def test_a_disk_that_takes_no_checkpoint_is_named_with_its_error(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="could not be saved"):
        ranks.run(1, without_disk, tiny_run(dataset, tmp_path / "run"))
    reason = named(tmp_path / "run", "checkpoint-failed")
    assert reason.severity == "critical"
    assert "Input/output error" in reason.evidence[0]
    assert reason.where == str(tmp_path / "run" / "checkpoints")


def test_another_version_of_the_data_is_named(ranks: Ranks, tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "words")
    spec = tiny_run(dataset, tmp_path / "run")
    ranks.run(1, train_on_this_rank, spec, 4)
    with going_on(tmp_path / "run"):
        assert "other-data" not in [
            reason.code for reason in reasons(RunDirectory(tmp_path / "run"), time.time())
        ]
        shutil.rmtree(dataset)
        assert named(tmp_path / "run", "data-gone").evidence
        make_dataset(dataset, "another")
        reason = named(tmp_path / "run", "other-data")
    assert reason.severity == "critical"
    assert str(dataset) in reason.where


def test_checkpoints_that_lack_files_are_named_before_a_start_and_not_offered_to_go_on_from(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    ranks.run(1, train_on_this_rank, tiny_run(dataset, tmp_path / "run", steps=4))
    (tmp_path / "run" / "result.json").unlink()  # as of a run that is to train on
    older, newer = (tmp_path / "run" / "checkpoints" / f"step-{step:08d}" for step in (2, 4))
    (newer / "rank-00000.safetensors").unlink()
    damaged = named(tmp_path / "run", "checkpoint-damaged")
    assert damaged.severity == "warning"
    assert "rank-00000.safetensors" in damaged.evidence[0]
    assert "step 2 is saved" in damaged.doing
    (older / "rank-00000.safetensors").write_bytes(b"cut")
    damaged = named(tmp_path / "run", "checkpoint-damaged")
    assert damaged.severity == "critical"
    assert "no checkpoint can be restored" in damaged.doing


def test_a_checkpoint_whose_bytes_have_changed_is_named_once_a_start_has_passed_it_over(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    ranks.run(1, train_on_this_rank, tiny_run(dataset, tmp_path / "run", steps=8), 6)
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*")) / "rank-00000.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    ranks.run(1, train_on_this_rank, tiny_run(dataset, tmp_path / "run", steps=8), 7)
    with going_on(tmp_path / "run"):
        damaged = named(tmp_path / "run", "checkpoint-damaged")
    assert damaged.severity == "warning"
    assert "rank-00000.safetensors" in damaged.evidence[0]


def test_a_run_whose_processes_were_killed_is_missed(ranks: Ranks, dataset: Path, tmp_path: Path) -> None:
    ranks.run(2, train_on_this_rank, tiny_run(dataset, tmp_path / "run"), 4)
    with going_on(tmp_path / "run"):
        seen = observe(RunDirectory(tmp_path / "run"), time.time())
        # Without the disk: its room depends on the machine.
        assert judge(dataclasses.replace(seen, disk=None)) == []
    reason = named(tmp_path / "run", "gone")
    assert "it resumes from there" in reason.doing


def test_a_healthy_run_has_no_reason_in_any_of_its_moments(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    spec = tiny_run(dataset, tmp_path / "run", 12)
    spec = dataclasses.replace(spec, statistics=StatisticsSpec(every_steps=1))
    ranks.run(1, train_on_this_rank, spec, 6)
    ranks.run(2, train_on_this_rank, spec)
    directory = RunDirectory(tmp_path / "run")
    assert reasons(directory, time.time()) == []
    assert reasons(directory, time.time() + 1e6) == []
    last = dataclasses.replace(observe(directory, time.time()), disk=None)
    events = list(read_events(directory.events))
    for count in range(1, len(events)):
        for now in (events[count - 1].t, events[count].t):
            then = {"events": tuple(events[:count]), "now": now, "finished": False, "is_held": True}
            assert judge(dataclasses.replace(last, **then, checkpoints=())) == [], (count, events[count - 1])
