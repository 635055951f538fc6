"""Runs that choose by themselves when to save."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Message
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.rules import check
from phalanx.run.spec import CheckpointSpec, FleetSpec, RunSpec
from ranks import Ranks
from tiny_runs import tiny_run, train_on_this_rank


def choosing(dataset: Path, run_dir: Path, hours: float, keep_every: int = 0) -> RunSpec:
    checkpoint = CheckpointSpec(
        every_steps=0, hours_between_failures=hours, keep_last=100, keep_every=keep_every
    )
    return dataclasses.replace(tiny_run(dataset, run_dir), checkpoint=checkpoint)


def saved(spec: RunSpec) -> list[int]:
    return DiskTier(RunDirectory(Path(spec.run_dir)).checkpoints).steps()


@pytest.fixture(scope="module")
def undisturbed(ranks: Ranks, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    spec = tiny_run(dataset, tmp_path_factory.mktemp("undisturbed") / "run")
    return str(ranks.run(2, train_on_this_rank, spec)[0]["weights_sha256"])


def test_where_failures_are_rare_the_first_step_and_the_last_are_saved_and_what_is_kept_for_good(
    ranks: Ranks, dataset: Path, tmp_path: Path, undisturbed: str
) -> None:
    spec = choosing(dataset, tmp_path / "run", 1e6, keep_every=4)
    result, _ = ranks.run(2, train_on_this_rank, spec)
    assert saved(spec) == [1, 4, 6]
    assert result["weights_sha256"] == undisturbed
    messages = [
        event.body.text
        for event in read_events(tmp_path / "run" / "events.jsonl")
        if isinstance(event.body, Message)
    ]
    assert sum("checkpoints are saved every" in text for text in messages) == 1


def test_a_run_that_was_broken_off_goes_on_from_a_step_that_it_chose_itself_with_the_same_bits(
    ranks: Ranks, dataset: Path, tmp_path: Path, undisturbed: str
) -> None:
    # So rare that the wait for a save to be durable decides.
    spec = choosing(dataset, tmp_path / "run", 1e-9)
    ranks.run(2, train_on_this_rank, spec, 5)
    assert saved(spec)[0] == 1
    result, _ = ranks.run(2, train_on_this_rank, spec)
    assert result["weights_sha256"] == undisturbed


def test_a_fleet_that_audits_saves_in_audited_steps() -> None:
    spec = RunSpec(checkpoint=CheckpointSpec(every_steps=0), fleet=FleetSpec(nodes=2, audit_every_steps=10))
    (problem,) = check(spec)
    assert (problem.path, problem.remedy) == ("checkpoint.every_steps", "a multiple of 10")


def test_hours_between_failures_are_refused_where_steps_decide() -> None:
    (problem,) = check(RunSpec(checkpoint=CheckpointSpec(hours_between_failures=2.0)))
    assert problem.path == "checkpoint.hours_between_failures"
    assert "every_steps = 0" in problem.remedy
