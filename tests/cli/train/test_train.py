"""``phalanx train`` where what it prints goes nowhere: a closed pipe ends neither the run nor the reason for its end."""

from __future__ import annotations

import dataclasses
import io
import os
from pathlib import Path
from typing import Literal

import click
import pytest
from rich.console import Console

from phalanx.cli.train.session import event_display
from phalanx.cli.train.train_command import train_as_rank
from phalanx.cli.train.train_fleet import fleet_story, train_fleet
from phalanx.fleet.fault import fault_marker
from phalanx.hardware.catalog import cluster
from phalanx.hardware.local.detect import system_here
from phalanx.observe.event_log import EventLog
from phalanx.observe.events import Message
from phalanx.process.exit_codes import EXIT_FAILED
from phalanx.process.this_process import StopRequest
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.spec import FleetSpec, ParallelSpec, RunSpec
from phalanx.train.start.checks import checkpoint_bytes
from phalanx.train.start.open_run import OpenRun
from phalanx_plan.planner import first_halved
from run.specs import replace_at
from tiny_runs import tiny_run


class ClosedPipe:
    """A stream whose reader has gone."""

    encoding = "utf-8"

    def write(self, _text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


class Exited(BaseException):
    """Stands for the end of the process."""


def test_a_display_that_breaks_is_told_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path)
    with EventLog(directory.events, 0) as log:
        log.append(Message("warning", "anything"))
    show = event_display(OpenRun(directory, RunSpec(), 0, -1), Console(file=ClosedPipe()))  # type: ignore[arg-type]
    show(lambda: True)
    assert "training continues" in capsys.readouterr().err


def test_a_display_names_the_folder_of_its_run_that_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    with EventLog(directory.events, 0) as log:
        log.append(Message("warning", "anything"))
    show = event_display(OpenRun(directory, RunSpec(), 0, -1), Console(file=io.StringIO()))

    looks: list[None] = []

    def ended() -> bool:
        looks.append(None)
        if len(looks) == 2:
            directory.path.rename(tmp_path / "moved")
        return len(looks) > 2

    show(ended)
    assert f"{directory.path} is gone, renamed or removed: move it back" in capsys.readouterr().err


def test_an_empty_token_file_is_named_with_the_remedy_before_a_fleet_starts(
    folder: Path, tmp_path: Path
) -> None:
    spec = tiny_run(folder / "words", tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "fleet.token").touch()
    with pytest.raises(click.ClickException, match=r"fleet\.token is empty.*start the run again"):
        train_fleet(replace_at(spec, "fleet.nodes", 1), tmp_path / "run.toml", (), as_json=True)


@pytest.mark.parametrize("given", ["planned", "tensor", "context"])
def test_which_degree_falls_first_is_the_users_or_the_planners_to_say_and_then_the_runs(
    given: Literal["planned", "tensor", "context"], folder: Path, tmp_path: Path
) -> None:
    spec = tiny_run(folder / "words", tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "fleet.token").touch()  # which ends the start behind what is looked at
    spec = dataclasses.replace(
        spec,
        model=dataclasses.replace(spec.model, lanes=2, context_tiles=2),
        train=dataclasses.replace(spec.train, seq_len=24),
        parallel=ParallelSpec(tensor=2, context=2, context_mode="allgather"),
        fleet=FleetSpec(nodes=4, least_tensor=1, least_context=1, halve_first=given),
    )
    with pytest.raises(click.ClickException, match=r"fleet\.token is empty"):
        train_fleet(spec, tmp_path / "run.toml", (), as_json=True)
    kept = read_resolved(RunDirectory(tmp_path / "run")).fleet.halve_first
    if given == "planned":
        answer = first_halved(spec, cluster(f"{system_here()}:4"))
        assert answer is not None
        assert kept == answer.axis
    else:
        assert kept == given


def test_a_rank_that_fails_where_nothing_can_be_printed_still_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = []

    def exit_at_once(code: int) -> None:
        codes.append(code)
        raise Exited

    monkeypatch.setattr(os, "_exit", exit_at_once)
    # The signals and the variables would be this process's.
    monkeypatch.setattr(StopRequest, "end_at_once", lambda _self: None)
    monkeypatch.setattr("phalanx.cli.train.train_command.set_for_rank", lambda: None)
    monkeypatch.setattr("sys.stderr", ClosedPipe())
    monkeypatch.setenv("RANK", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Exited):
        train_as_rank(RunSpec(), tmp_path / "run.toml", as_json=False)
    assert codes == [EXIT_FAILED]


def test_a_fault_whose_moment_did_not_come_is_told_from_those_that_happened(tmp_path: Path) -> None:
    marker = fault_marker(tmp_path, 1)
    marker.parent.mkdir()
    marker.touch()
    story = fleet_story(OpenRun(RunDirectory(tmp_path), RunSpec(), 0, -1), ("kill rank 1", "kill rank 2"))
    assert story.faults == ("kill rank 2",)
    assert story.faults_missed == ("kill rank 1",)


def test_a_checkpoint_on_disk_is_as_large_as_was_foreseen_before_the_first_step(
    folder: Path, result: dict[str, object]
) -> None:
    directory = RunDirectory(folder / str(result["run_dir"]))
    files = [path for path in (directory.checkpoints / "step-00000006").iterdir() if path.is_file()]
    foreseen = checkpoint_bytes(read_resolved(directory))
    assert foreseen <= sum(path.stat().st_size for path in files) <= foreseen + (64 << 10)
