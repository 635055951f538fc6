"""What ``phalanx submit`` and ``phalanx cancel`` do where Slurm takes no job or gives no right, without a Slurm."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.cli.fleet import resize_command
from phalanx.cli.launch import cancel_command, submit_command
from phalanx.launch.engines import slurm
from phalanx.launch.engines.order import FOLDER
from phalanx.launch.engines.submission import Submitted, order_of, read_record
from phalanx.launch.engines.tools import EngineError
from phalanx.run.spec import FleetSpec, RunSpec
from phalanx_process import RUN_FILE


def test_nodes_of_a_job_that_slurm_does_not_take_are_not_given_back_as_those_of_an_earlier_loan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, lender = tmp_path / "urgent", tmp_path / "lender"
    folder = run_dir / FOLDER
    lends(lender, "slurm")
    (folder / "returned").mkdir(parents=True)
    earlier = Submitted("slurm", "7", "urgent", 2, 0, 0.0, str(tmp_path), taken_from=str(lender), taken=2)
    (folder / "submitted.json").write_text(json.dumps(asdict(earlier)))
    assert read_record(run_dir) == earlier

    def refuse(_script: Path) -> str:
        raise EngineError("sbatch: the queue is closed")

    monkeypatch.setattr(slurm, "refuse_second", lambda *_: None)
    monkeypatch.setattr(slurm, "test_submit", lambda _: "")
    monkeypatch.setattr(slurm, "idle_nodes", lambda _: 0)
    monkeypatch.setattr(slurm, "submit", refuse)
    monkeypatch.setattr(resize_command, "asked_to_go", lambda *_: ["n1", "n2"])
    monkeypatch.setattr(resize_command, "wait_until_gone", lambda *_: {})
    grown: list[Path] = []
    monkeypatch.setattr(resize_command, "grown", lambda run, *_: grown.append(run))

    spec = RunSpec(name="urgent", run_dir=str(run_dir), fleet=FleetSpec(nodes=2))
    with pytest.raises(EngineError, match=r"phalanx fleet grow .* --by 2 takes them again"):
        submit_command._submit(spec, tmp_path, None, "", False, lender)
    cancel_command._give_back(run_dir, earlier)
    assert grown == []


def lends(run_dir: Path, engine: str) -> None:
    """Makes the folder of a run that was submitted."""
    (run_dir / FOLDER).mkdir(parents=True)
    made = Submitted(engine, "3", "lender", 4, 0, 0.0, str(run_dir.parent))
    (run_dir / FOLDER / "submitted.json").write_text(json.dumps(asdict(made)))


def test_nodes_that_slurm_does_not_manage_are_not_taken_from_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lends(tmp_path / "by-ssh", "ssh")
    monkeypatch.setattr(slurm, "idle_nodes", lambda _: 0)
    order = order_of(
        RunSpec(name="urgent", run_dir=str(tmp_path / "urgent"), fleet=FleetSpec(nodes=2)), tmp_path
    )
    with pytest.raises(EngineError, match="by-ssh: no nodes of Slurm's to give back"):
        submit_command._borrowed(order, tmp_path / "by-ssh")


def test_a_dry_run_prints_the_lines_that_give_borrowed_nodes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lends(tmp_path / "lender", "slurm")
    (tmp_path / "tiny.toml").write_text(RUN_FILE.format(data="words"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "idle_nodes", lambda _: 1)
    words = ["tiny.toml", "--on", "slurm", "--nodes", "3", "--dry-run", "--take-from", "lender"]
    shown = CliRunner().invoke(submit_command.command, words)
    assert f"fleet grow {tmp_path / 'lender'} --by 2" in shown.output
    assert not (tmp_path / "runs").exists()


def test_nodes_of_a_job_are_not_left_in_it_by_who_does_not_wait_for_them(tmp_path: Path) -> None:
    lends(tmp_path, "slurm")
    told = CliRunner().invoke(resize_command.shrink, [str(tmp_path), "--by", "1", "--no-wait"])
    assert told.exit_code == 2
    assert "without it they would stay in the job" in " ".join(told.output.split())


@pytest.mark.parametrize("now", [(), ("--now",)], ids=["saving", "at-once"])
def test_a_run_that_somebody_else_has_submitted_is_not_said_to_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: tuple[str, ...]
) -> None:
    run_dir, tools = tmp_path / "shared", tmp_path / "tools"
    (run_dir / FOLDER).mkdir(parents=True)
    made = Submitted("slurm", "7", "shared", 2, 0, 0.0, str(tmp_path), taken_from=str(tmp_path), taken=2)
    (run_dir / FOLDER / "submitted.json").write_text(json.dumps(asdict(made)))
    line = f"7|RUNNING|None|2|n[1-2]|N/A|1:00|phalanx-shared|main|phalanx:{run_dir}"
    tools.mkdir()
    for name, does in (
        ("squeue", f"[ \"$2\" = --me ] || echo '{line}'"),
        ("scancel", "echo Access/permission denied >&2; exit 1"),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{does}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    ended = CliRunner().invoke(cancel_command.command, [str(run_dir), "--no-wait", *now])
    assert ended.exit_code == 1
    assert "Access/permission denied" in ended.output
    assert not (run_dir / FOLDER / "returned").exists()


def test_a_lender_that_does_not_answer_can_be_asked_once_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FOLDER).mkdir()
    lender = tmp_path / "lender"
    made = Submitted("slurm", "7", "urgent", 2, 0, 0.0, str(tmp_path), taken_from=str(lender), taken=2)
    cancel_command._give_back(tmp_path, made)
    assert f"phalanx fleet grow {lender} --by 2 asks once more" in capsys.readouterr().err
