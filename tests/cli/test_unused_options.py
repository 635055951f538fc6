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
        (
            ["profile", ".", "--show", "--steps", "3", "--ranks", "all"],
            "--steps, --ranks: --show records nothing",
        ),
        (["profile", ".", "--show", "--cluster", "cpu"], "--cluster: is for one profile"),
        (["reproduce", ".", "--make-env", "then", "--steps", "2", "--json"], "--steps, --json: --make-env"),
        (["reproduce", ".", "--dry-run", "--ranks", "1", "--into", "x"], "--ranks, --into: --dry-run runs"),
        (["ui", "--export", "x.html", "--port", "80", "--no-open"], "--port, --open: --export writes a file"),
        (
            ["pack", "--verify", "x.pack", "--step", "3", "--format", "int8"],
            "--format, --step: --verify writes",
        ),
        (["show", "tiny.toml", "--ranks", "4", "--rank", "3"], "--rank: is for --dry-run"),
        (["train", "tiny.toml", "--check-steps", "5"], "--check-steps: is for --check-layout"),
        (["serve", "run", "--new-key", "keys", "--port", "80"], "PLACE, --port: --new-key writes a key"),
        (["export", "run", "out", "--verify-tokens", "5"], "--verify-tokens: is for --verify"),
        (["export", "run", "out", "--to", "dcp", "--dtype", "bfloat16"], "--dtype: is for --to hf"),
        (["simulate", "fleet", "--small", "--nodes", "5"], "--nodes: is for a large fleet"),
        (["simulate", "traffic", "--trace", "tiny.toml", "--rate", "5"], "--rate: --trace has the times"),
        (["simulate", "fleet", "--seeds", "0:2"], "--seeds: is for --small"),
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
