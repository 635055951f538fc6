"""What is said of a run directory that is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.cli.errors import newest_runs
from phalanx.cli.main import exit_code


def made(folder: Path, age_s: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.toml").touch()
    os.utime(folder, (1e9 - age_s, 1e9 - age_s))
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "why {}",
        "logs {}",
        "ranks {}",
        "status {}",
        "goodput {}",
        "watch {}",
        "profile {}",
        "runs show {}",
        "runs compare {}",
        "runs tag {} good",
        "runs note {}",
        "runs rm {}",
        "reproduce {} --dry-run",
        "data show {} --step 3",
        "ui {}",
        "hash {}",
        "checkpoint list {}",
        "checkpoint verify {}",
        "generate {} --prompt a",
    ],
)
def test_a_command_about_a_run_that_is_not_there_names_the_newest_that_are(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = made(tmp_path / "older", 9), made(tmp_path / "newer", 1)
    assert exit_code(words.format(tmp_path / "gone").split()) == (
        2 if words.startswith(("why", "reproduce")) else 1
    )
    assert (
        f"no folder {tmp_path / 'gone'}; the newest runs there: {newer}, {older}" in capsys.readouterr().err
    )


def test_runs_in_the_usual_folder_are_named_where_there_is_none_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code(["why", "gone"]) == 2
    assert "phalanx train RUN_FILE starts one" in capsys.readouterr().err
    made(tmp_path / "runs" / "one", 1)
    assert exit_code(["why", "gone"]) == 2
    assert "the newest run there: runs/one (" in capsys.readouterr().err


def test_folders_that_are_no_runs_are_not_named(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    assert newest_runs(tmp_path) == [] == newest_runs(tmp_path / "nowhere")
    assert newest_runs(made(tmp_path / "run", 1).parent) == [tmp_path / "run"]
