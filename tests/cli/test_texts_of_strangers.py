"""Texts of a run's files are printed as they are: no command takes brackets for markup, and no control sequence reaches a terminal."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

import click
import pytest
from click.testing import CliRunner

import phalanx
from phalanx.cli.main import exit_code, phalanx_command
from phalanx.cli.output import SafeStream, text_console
from recorded_runs import RecordedRun

ESCAPES = "\x1b]0;owned\x07\x1b[2J\r\x9b1A\u202e"
MARK = f"[/x] [bold]y{ESCAPES}"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
WORDS = ("kind", "level", "action", "phase", "incident", "fault")
"""Fields whose values are words of a format."""
ROOT = Path(phalanx.__file__).parent
MARKED_UP = re.compile(r"Console\((?!Console)|from_markup|\brich\.print\b|\bmarkup=True")


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


class Terminal(io.StringIO):
    """A stream that may be a terminal."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A fleet's run that has lost a node, with brackets in its folder's name and in every text of its files."""
    run = RecordedRun(tmp_path / "runs[" / f"x]{ESCAPES}", "x", 60, began=time.time() - 200)
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
    "hash RUN",
    "checkpoint list RUN",
    "fleet drain RUN node-0",
    "sinks fill RUN --sink tensorboard",
]


def leaves(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of each command in ``group``."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield from leaves(command, (*path, name)) if isinstance(command, click.Group) else [(*path, name)]


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_that_prints_a_run_prints_its_brackets(run_dir: Path, words: str) -> None:
    result = CliRunner().invoke(
        phalanx_command, [word.replace("RUN", str(run_dir)) for word in words.split()]
    )
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception


@pytest.mark.parametrize("words", COMMANDS)
def test_no_control_sequence_of_a_run_reaches_the_terminal(
    run_dir: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(SystemExit):
        exit_code([word.replace("RUN", str(run_dir)) for word in words.split()])
    output = "".join(capsys.readouterr())
    assert output
    assert not CONTROL.findall(output)


def test_no_command_prints_a_control_sequence_of_a_name_that_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in leaves(phalanx_command):
        with suppress(SystemExit):
            exit_code([*words, f"gone{ESCAPES}", f"--gone{ESCAPES}"])
        assert not CONTROL.findall("".join(capsys.readouterr())), words


@pytest.mark.parametrize("is_terminal", [True, False])
def test_colors_of_a_command_pass_and_a_name_cannot_hide_itself(is_terminal: bool) -> None:
    raw = Terminal(is_terminal)
    click.echo(
        f"{click.style('failed', fg='red', bold=True)} a\x1b[8mb\x1b]0;c", cast("TextIO", SafeStream(raw))
    )
    red = "\x1b[31m\x1b[1mfailed\x1b[0m a\\x1b[8mb\\x1b]0;c\n"
    assert raw.getvalue() == (red if is_terminal else "failed ab\\x1b]0;c\n")


def test_the_control_codes_of_a_console_pass_and_those_of_its_texts_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    raw = Terminal(is_terminal=True)
    console = text_console(file=cast("TextIO", SafeStream(raw)))
    console.show_cursor(show=False)
    console.print(f"name {ESCAPES}")
    assert raw.getvalue().startswith("\x1b[?25lname \\x1b]0;owned")
    assert len(CONTROL.findall(raw.getvalue())) == 1


def test_status_prints_reasons_in_brackets_whole(run_dir: Path) -> None:
    result = CliRunner().invoke(phalanx_command, ["status", str(run_dir)])
    assert "[/x] [bold]y" in result.stdout


def test_every_console_is_one_without_markup() -> None:
    others = [
        str(path.relative_to(ROOT))
        for path in sorted(ROOT.rglob("*.py"))
        if MARKED_UP.search(path.read_text(encoding="utf-8"))
    ]
    assert others == ["cli/output.py"]
