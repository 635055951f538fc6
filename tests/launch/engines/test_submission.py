"""One submission of a run at a time, whoever makes it and wherever it is to start."""

from __future__ import annotations

import errno
import json
import os
import resource
import shlex
import signal
import stat
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from launch.engines.slurm_cluster import missing
from phalanx.cli.train.session import resume_command
from phalanx.launch.engines.engine import SubmitRequest, engine_named, standing_or_end
from phalanx.launch.engines.order import EngineError, LaunchOrder
from phalanx.launch.engines.submission import (
    Submitted,
    how_to_follow,
    mark_stopped,
    only_submission,
)
from phalanx.run.directory.paths import RunDirectory, RunResult
from phalanx.run.spec import DataSpec, FleetSpec, LaunchSpec, RunSpec


def order(run_dir: Path) -> LaunchOrder:
    return LaunchOrder("tiny", run_dir, run_dir.parent, 2, 0, 0, 0, sys.executable, LaunchSpec())


def test_a_second_submission_is_refused_while_the_first_prepares_and_taken_when_that_has_ended(
    tmp_path: Path,
) -> None:
    with (
        only_submission(order(tmp_path)),
        pytest.raises(EngineError, match=r"is being submitted by process \d+ on "),
        only_submission(order(tmp_path)),
    ):
        pass
    with pytest.raises(ZeroDivisionError), only_submission(order(tmp_path)):
        raise ZeroDivisionError
    with only_submission(order(tmp_path)), only_submission(order(tmp_path / "another")):
        pass


def finished_run(run_dir: Path, launch: LaunchSpec) -> RunSpec:
    """A run with a complete result, as it is submitted once more."""
    run_dir.mkdir(exist_ok=True)
    RunDirectory(run_dir).write_result(RunResult(step=9, weights_sha256=""))
    return RunSpec(data=DataSpec(path=str(run_dir)), run_dir=str(run_dir), launch=launch)


def test_a_finished_run_is_refused_on_hosts_with_all_other_problems(tmp_path: Path) -> None:
    spec = finished_run(tmp_path, LaunchSpec(engine="local", gpus_per_node=8))
    with pytest.raises(EngineError) as refused:
        engine_named("local").submit(spec, tmp_path, SubmitRequest())
    assert "is finished; give another run_dir" in str(refused.value)
    assert "launch.gpus_per_node = 8" in str(refused.value)
    assert not order(tmp_path).folder.exists()


def test_a_finished_run_is_refused_under_slurm_with_all_other_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("squeue", "scontrol", "sinfo", "sacctmgr"):  # a cluster without jobs and partitions
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    spec = finished_run(tmp_path / "run", LaunchSpec(engine="slurm", partition="nowhere"))
    with pytest.raises(EngineError) as refused:
        engine_named("slurm").submit(spec, tmp_path, SubmitRequest())
    assert "is finished; give another run_dir" in str(refused.value)
    assert "there is no partition 'nowhere'" in str(refused.value)


def test_a_full_disk_is_said_before_anything_is_submitted(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (0, limits[1])
    )  # files can be made, and nothing be written into them
    try:
        with (
            pytest.raises(EngineError, match=r"submitting: .*; give another run_dir"),
            only_submission(order(tmp_path)),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    with only_submission(order(tmp_path)):
        pass


def test_a_run_that_another_user_has_stopped_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "launch").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        with pytest.raises(EngineError, match="keeps the run from queueing itself again: Permission denied"):
            mark_stopped(tmp_path)
    mark_stopped(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        mark_stopped(tmp_path)


def test_commands_that_are_told_can_be_given_to_a_shell() -> None:
    told = how_to_follow(Path("/runs/a b's"))
    (status, _, cancel) = (shlex.split(command) for command in told.removeprefix("follow it with").split("|"))
    assert status == ["phalanx", "status", "/runs/a b's"]
    assert cancel == ["phalanx", "cancel", "/runs/a b's"]


def test_a_group_that_shares_run_directories_shares_the_lock(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with only_submission(order(tmp_path)):
            pass
    finally:
        os.umask(before)
    (lock,) = order(tmp_path).folder.iterdir()
    assert stat.S_IMODE(lock.stat().st_mode) == 0o664


def test_a_run_directory_that_cannot_be_written_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match="give another run_dir"), only_submission(order(tmp_path / "file")):
        pass


def test_who_stops_a_submitted_run_is_not_told_to_start_an_agent_of_its_job_by_hand(tmp_path: Path) -> None:
    frozen = order(tmp_path).run_file
    job = ["agent", "--run", str(frozen), "--coordinator", "n1:20008"]
    assert resume_command(tmp_path, job, child=False) == "the same phalanx submit"
    by_hand = ["train", "big.toml", "--set", "train.steps=5"]
    assert resume_command(tmp_path, by_hand, child=False).endswith(" train big.toml --set train.steps=5")
    assert resume_command(tmp_path, by_hand, child=True).endswith(f" train {tmp_path}")


@pytest.mark.servers
@pytest.mark.skipif(bool(missing()), reason=f"no Slurm: {missing()}")
@pytest.mark.parametrize(("number", "title"), [("7", "job 7"), ("", "job of unknown number")])
def test_a_run_whose_cluster_does_not_answer_is_not_started_elsewhere_before_somebody_says_that_it_is_over(
    number: str, title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Submitted("slurm", number, "tiny", 2, 0, 0.0, str(tmp_path))
    (tmp_path / "slurm.conf").write_text(
        "nonsense\n"
    )  # with none at all, or of a dead controller, squeue tries for a minute
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    with pytest.raises(EngineError, match=rf"{title} \(slurm\) .* still runs is not known.*submitted\.json"):
        engine_named(made.engine).submitted(tmp_path, made).refuse_second()
    # The run was taken to a machine of no cluster.
    monkeypatch.setenv("PATH", str(tmp_path))
    engine_named(made.engine).submitted(tmp_path, made).refuse_second()


def test_data_that_the_submitting_machine_does_not_see_and_one_core_for_all_workers_are_doubtful(
    tmp_path: Path,
) -> None:
    (tmp_path / "words").mkdir()
    spec = RunSpec(
        fleet=FleetSpec(nodes=2, workers_per_node=8), launch=LaunchSpec(engine="slurm", exclusive=False)
    )
    missing = replace(spec, data=DataSpec(path="/no/such"))
    slurm = engine_named("slurm")
    data, cores = slurm.doubts(missing, tmp_path)
    assert data.startswith("data.path: /no/such is not there on this machine")
    assert "--cpus-per-task=N" in cores
    asked = replace(spec.launch, options=("--cpus-per-task=64",))
    assert list(slurm.doubts(replace(spec, data=DataSpec(path="words"), launch=asked), tmp_path)) == []
    prepared = DataSpec(path="/no/such", corpus=("python-stdlib",))
    assert list(slurm.doubts(replace(spec, data=prepared, launch=asked), tmp_path)) == []


def test_a_run_that_has_ended_on_this_machine_is_known_by_the_last_line_of_its_log(tmp_path: Path) -> None:
    folder = tmp_path / "launch"
    folder.mkdir()
    made = Submitted("local", "this machine", "x", 1, 0, 0.0, "", "this-machine")
    (folder / "submitted.json").write_text(json.dumps(asdict(made)))
    (folder / "this-machine.log").write_text("starts\nError: there is no dataset at data.path\n\n")
    job = standing_or_end(tmp_path)
    assert job is not None
    assert job.has_ended
    assert job.doing.endswith("this-machine.log): Error: there is no dataset at data.path")
