"""Exit codes of commands: success, bad usage, bad run files, missing and damaged files, and findings."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path

import pytest

from contract.conftest import Contract
from phalanx.cli.main import exit_code

CASES = (
    "--help",
    "--version",
    "nonsense",
    "checkpoint list nowhere",
    "checkpoint list runs/tiny",
    "checkpoint verify damaged",
    "checkpoint verify runs/tiny",
    "data order runs/tiny",
    "data prepare nowhere --out prepared",
    "data show runs/tiny --step 99",
    "data verify damaged-words",
    "data verify nowhere",
    "data verify words",
    "diff runs/tiny nowhere",
    "diff runs/tiny other",
    "diff runs/tiny runs/tiny",
    "fleet stop runs/tiny",
    "goodput nowhere",
    "goodput runs/tiny",
    "hash nowhere",
    "hash runs/tiny",
    "hash runs/tiny --nonsense",
    "hash runs/tiny --step 9",
    "logs nowhere",
    "logs runs/tiny",
    "models",
    "new",
    "pack runs/tiny --step 9",
    "plan bad.toml --cluster h100:8",
    "plan nowhere.toml --cluster h100:8",
    "plan tiny.toml --cluster nonsense:8",
    "plan tiny.toml --cluster h100:0",
    "profile runs/tiny",
    "ranks nowhere",
    "runs list nowhere",
    "runs list runs",
    "runs show nowhere",
    "runs show runs/tiny",
    "show bad.toml",
    "show nowhere.toml",
    "show tiny.toml",
    "show tiny.toml --set nonsense=1",
    "sinks fill nowhere",
    "spec",
    "spec nonsense",
    "status runs/tiny",
    "submit tiny.toml",
    "train bad.toml",
    "train nowhere.toml",
    "train tiny.toml --ranks 0",
    "train tiny.toml --set data.path=nowhere",
    "watch nowhere",
    "why nowhere",
    "why runs/tiny",
)


@pytest.fixture
def work(in_stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored files, a run file with mistakes, a damaged run, a damaged dataset, and another run."""
    shutil.copytree(in_stored, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text("[train]\nstepz = 5\n")
    shutil.copytree("runs/tiny", "damaged")
    shutil.copytree("words", "damaged-words")
    for path in (
        Path("damaged/checkpoints/step-00000002/rank-00000.safetensors"),
        Path("damaged-words/train-00000.bin"),
    ):
        content = bytearray(path.read_bytes())
        content[-8] ^= 1
        path.write_bytes(content)
    shutil.copytree("runs/tiny", "other")
    events = Path("other/events.jsonl")
    events.write_text(events.read_text().replace('"loss":5.55', '"loss":5.56'))


def code_of(words: str) -> int:
    """Run a command in this process; return its exit code."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return exit_code(words.split())
        except SystemExit as ending:
            return int(ending.code or 0)


@pytest.mark.usefixtures("work")
def test_exit_codes_are_those_recorded(contract: Contract) -> None:
    contract("exit_codes", {words: str(code_of(words)) for words in CASES})
