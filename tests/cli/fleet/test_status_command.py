"""What ``phalanx status`` says of a run that waits for its data, or for its disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w
from click.testing import CliRunner

from phalanx.cli import errors
from phalanx.cli.fleet.status_command import command
from phalanx.fleet.control.fleet_file import write_fleet_file
from phalanx.fleet.core.state import FleetPhase
from phalanx.observe.event_log import EventLog
from phalanx.observe.events import Step
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.read import to_table
from phalanx.run.spec import DataSpec, RunSpec, TrainSpec
from watch.why.watched import fleet_file

STEP = Step(
    step=10,
    steps=20,
    loss=2.0,
    grad_norm=1.0,
    lr=1e-3,
    tokens=10,
    tokens_per_s=3100,
    step_s=1.0,
    logged_s=4.0,
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    spec = RunSpec(name="waiting", data=DataSpec(path="none"), train=TrainSpec(steps=20, seq_len=100))
    (tmp_path / "run.toml").write_text(tomli_w.dumps(to_table(spec)))
    (tmp_path / "record.json").write_text('{"attempts": 1}')
    return tmp_path


def told(run_dir: Path, step: Step) -> str:
    with EventLog(RunDirectory(run_dir).events, 0) as log:
        log.append(step)
    return CliRunner().invoke(command, [str(run_dir)]).output


def test_a_run_that_waits_for_samples_says_how_many_come_and_how_many_it_could_use(run_dir: Path) -> None:
    # A quarter of the time goes by waiting: without it, 31 sequences would have been trained on in three quarters of the time.
    assert "data-bound: 25%" in told(run_dir, replace(STEP, data_wait_s=1.0))
    assert "31 sequences/s come, and 41.3 could be trained on" in told(
        run_dir, replace(STEP, data_wait_s=1.0)
    )


def test_a_run_that_does_not_wait_says_nothing_of_it(run_dir: Path) -> None:
    assert "data-bound" not in told(run_dir, replace(STEP, data_wait_s=0.01))


def test_how_far_a_run_is_that_has_saved_nothing_yet_is_its_newest_step(run_dir: Path) -> None:
    assert told(run_dir, STEP).splitlines()[0] == "waiting: step 10 of 20, no checkpoint yet"


def test_the_length_of_a_run_is_that_of_its_last_start_and_not_of_an_edited_run_file(run_dir: Path) -> None:
    (run_dir / "record.json").write_text('{"attempts": 1, "fields": {"train.steps": 15}}')
    assert told(run_dir, STEP).splitlines()[0] == "waiting: step 10 of 15, no checkpoint yet"


@pytest.mark.parametrize(("phase", "said"), [(FleetPhase.RUNNING, True), (FleetPhase.FINISHED, False)])
def test_a_fleet_that_stands_still_because_the_disk_is_full_says_so(
    phase: FleetPhase, said: bool, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fleet_file(run_dir, fleet_file(0.0, phase=phase))
    assert "is full" not in told(run_dir, STEP)
    monkeypatch.setattr(
        "shutil.disk_usage", lambda _: SimpleNamespace(total=1 << 40, used=(1 << 40) - 65_535, free=65_535)
    )
    assert (f"the disk of {run_dir} is full" in " ".join(told(run_dir, STEP).split())) == said


def test_a_disk_that_does_not_say_how_large_it_is_is_not_called_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=0, used=0, free=0))
    assert errors.full_disk(Path()) == ""


def test_of_a_fleet_that_is_over_neither_the_last_heartbeats_step_nor_its_pace_is_printed(
    run_dir: Path,
) -> None:
    write_fleet_file(run_dir, fleet_file(0.0, phase=FleetPhase.FINISHED, step=3, step_s=0.4))
    line = CliRunner().invoke(command, [str(run_dir)]).output.splitlines()[-5]
    assert line.startswith("finished epoch 0, 2 ranks; 0 recoveries")


def test_a_verdict_on_nodes_is_printed_once(run_dir: Path) -> None:
    (run_dir / "launch").mkdir()
    (run_dir / "launch" / "submitted.json").write_text(
        '{"engine":"local","job":"this machine","name":"x","nodes":1,"spares":0,"unix_s":0,"working_dir":""}'
    )
    for name in ("given", "given-41"):
        (run_dir / "launch" / name).write_text("not verified: no price\n")
    output = CliRunner().invoke(command, [str(run_dir)]).output
    assert output.count("no price") == 1
    assert "the nodes that it got, with those of 41: not verified" in output


def test_events_that_cannot_be_read_are_named_without_a_traceback(run_dir: Path) -> None:
    RunDirectory(run_dir).events.mkdir()
    result = CliRunner().invoke(command, [str(run_dir)])
    assert result.exit_code == 1
    assert "Error: cannot read" in result.output
    assert "events.jsonl" in result.output
