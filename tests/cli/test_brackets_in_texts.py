"""Brackets in the texts of a run's files are printed as they are: no command takes them for markup."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import phalanx
from phalanx.cli.main import phalanx_command
from recorded_runs import RecordedRun

MARK = "[/x] [bold]y"
WORDS = ("kind", "level", "action", "phase", "incident", "fault")
"""Fields whose values are words of a format."""
ROOT = Path(phalanx.__file__).parent
MARKED_UP = re.compile(r"\bConsole\(|from_markup|\brich\.print\b|\bmarkup=True")


def planted(value: object) -> object:
    """The value with ``MARK`` behind every text in it, but for words of a format."""
    match value:
        case str():
            return value + MARK
        case dict():
            return {key: part if key in WORDS else planted(part) for key, part in value.items()}
        case list():
            return [planted(part) for part in value]
        case _:
            return value


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A fleet's run that has lost a node, with brackets in its folder's name and in every text of its files."""
    run = RecordedRun(tmp_path / "runs[" / "x]", "x", 60, began=time.time() - 200)
    run.train(20)
    run.evaluate()
    run.save()
    run.say("gloo::connect")
    run.lose_a_node()
    run.train(20)
    run.measure_ranks(2, slow=1, steps=40)
    run.log_lines(0, ["Traceback (most recent call last):"], "error")
    directory = run.directory
    for path in (directory.path / "fleet.json", directory.events, *directory.logs.glob("*.jsonl")):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        path.write_text("".join(json.dumps(planted(json.loads(line))) + "\n" for line in lines))
    (directory.path / "labels.json").write_text(json.dumps({"tags": ["[/x]"], "note": MARK}))
    (directory.path / "record.json").write_text('{"attempts": 2}')
    return directory.path


COMMANDS = [
    "status RUN",
    "why RUN",
    "goodput RUN",
    "watch RUN --once",
    "logs RUN",
    "logs RUN --grouped",
    "ranks RUN",
    "ranks RUN --map",
    "profile RUN --show",
    "runs list RUN",
    "runs show RUN",
    "runs compare RUN RUN",
    "diff RUN RUN",
    "show RUN/run.toml",
]


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_that_prints_a_run_prints_its_brackets(run_dir: Path, words: str) -> None:
    result = CliRunner().invoke(
        phalanx_command, [word.replace("RUN", str(run_dir)) for word in words.split()]
    )
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception


def test_status_prints_reasons_in_brackets_whole(run_dir: Path) -> None:
    assert MARK in CliRunner().invoke(phalanx_command, ["status", str(run_dir)]).stdout


def test_every_console_is_one_without_markup() -> None:
    others = [
        str(path.relative_to(ROOT))
        for path in sorted(ROOT.rglob("*.py"))
        if MARKED_UP.search(path.read_text(encoding="utf-8"))
    ]
    assert others == ["cli/text_console.py"]
