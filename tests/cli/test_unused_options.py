"""Options that a command would ignore are refused by their names: nobody believes that they were heeded."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.cli.main import phalanx_command
from phalanx_process import RUN_FILE

PLACE = ["place", "tiny.toml", "--topology"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["status", ".", "--namespace", "research"], "--namespace: is for --on kubernetes"),
        (["cancel", ".", "--namespace", "research"], "--namespace: is for --on kubernetes"),
        (["logs", ".", "--index", "0"], "--index: is for --on kubernetes"),
        (["logs", "job", "--on", "kubernetes", "--level", "error", "--attempt", "0"], "--level, --attempt: "),
        (["logs", "job", "--on", "kubernetes", "--lines"], "--lines: "),
        (["logs", ".", "--job", "--grep", "nccl"], "--grep: chooses lines"),
        (["runs", "--namespace", "research"], "--namespace: is for --on kubernetes"),
        (["runs", "list", "here", "--on", "kubernetes"], "FOLDERS: is about runs in folders"),
        (["runs", "--on", "ssh"], "'ssh' is not one of 'kubernetes', 'slurm'"),
        (["runs", "--on", "slurm", "--where", "loss<2", "--last", "3"], "--where, --last: "),
        ([*PLACE, "fabric.toml", "--partition", "big"], "--partition: is for --topology slurm"),
        ([*PLACE, "kubernetes", "--free"], "--free: is for --topology slurm"),
        ([*PLACE, "slurm", "--joining", ".", "--allocation", "n1", "--unit", "2"], "--unit: members keep"),
        (["submit", "tiny.toml", "--on", "local", "--spares", "1"], "--spares needs a fleet: add --nodes N"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(RUN_FILE.format(data="words"))
    told = CliRunner().invoke(phalanx_command, words)
    assert told.exit_code == 2
    assert named in told.output
