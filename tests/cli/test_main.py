"""The command line's own part: what the system refuses is an error message with a name, not a traceback."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from phalanx.cli.main import exit_code, phalanx_command
from phalanx.model.facts.presets import PRESETS


@pytest.mark.parametrize(
    "command", ["export --to hf {} out", "hash {}", "checkpoint verify {}", "goodput {}", "show {}"]
)
def test_a_place_that_the_system_refuses_is_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    too_long = "x" * 300
    assert exit_code(command.format(too_long).split()) in (1, 2)
    assert too_long in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
def test_output_that_a_full_disk_refuses_is_an_error_without_a_traceback(unbuffered: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, *unbuffered, "-m", "phalanx", "spec"],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"Error: cannot write the output: No space left on device\n")


def test_a_folder_that_is_no_run_keeps_what_it_has_when_a_tracker_is_to_be_filled(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "mine").touch()
    assert exit_code(["sinks", "fill", str(tmp_path), "--sink", "tensorboard"]) == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["tensorboard", "mine"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --from runs/x", "phalanx train runs/x --from STEP"),
        ("train configs/quickstart.toml --from 4", "is a file"),
        ("train --from-model imported/x", "give both"),
    ],
)
def test_half_of_what_goes_on_with_a_run_or_a_model_is_refused_with_the_other_half(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(words.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian configs/quickstart.toml", "no such command 'trian'; did you mean train?"),
        ("train configs/quickstrat.toml", "did you mean configs/quickstart.toml?"),
        ("train runs/a runs/b --from", "give one run file or run directory, not 2: runs/a, runs/b"),
    ],
)
def test_a_slip_of_the_pen_is_answered_with_what_is_nearly_that(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(words.split()) in (1, 2)
    assert message in capsys.readouterr().err


def test_no_name_of_a_model_is_cut_off_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert exit_code(["models"]) == 0
    names = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.split()}
    assert PRESETS.keys() <= names


def test_every_command_is_listed_under_one_task(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code(["--help"])
    listed = re.findall(r"^  ([a-z]+) {2,}", capsys.readouterr().out.partition("\nTrain:\n")[2], re.MULTILINE)
    assert sorted(listed) == sorted(phalanx_command.list_commands(click.Context(phalanx_command)))


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("spec >&-", 0),
        ("runs list . >&-", 0),
        ("hash nothing 2>&-", 1),
        ("score nothing - <&-", 1),
        ("spec <&- >&- 2>&-", 0),
    ],
)
def test_a_command_whose_streams_are_closed_ends_as_with_open_ones(
    command: str, code: int, tmp_path: Path
) -> None:
    line = f"{shlex.quote(sys.executable)} -m phalanx {command}"
    done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (code, False)


@pytest.mark.parametrize("text", ["nan", "inf"])
@pytest.mark.parametrize("command", ["simulate fleet --days", "generate run --temperature"])
def test_an_option_takes_no_number_that_is_not_finite(
    command: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code([*command.split(), text]) == 2
    assert f"{text} is no finite number" in capsys.readouterr().err


def _interrupted_command(interruption: BaseException) -> SimpleNamespace:
    """A module whose command is interrupted while it makes a class with a descriptor."""

    class Descriptor:
        def __set_name__(self, owner: type, name: str) -> None:
            raise interruption

    @click.command()
    def command() -> None:
        type("Owner", (), {"field": Descriptor()})

    return SimpleNamespace(command=command)


def test_a_signal_while_a_class_is_made_ends_the_command_as_at_any_other_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        sys.modules, "phalanx.cli.launch.logs_command", _interrupted_command(KeyboardInterrupt())
    )
    assert exit_code(["logs"]) == 130
    monkeypatch.setitem(sys.modules, "phalanx.cli.launch.logs_command", _interrupted_command(SystemExit(143)))
    with pytest.raises(SystemExit, match="143"):
        exit_code(["logs"])
