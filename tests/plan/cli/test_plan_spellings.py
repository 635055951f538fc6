"""``phalanx plan`` with and without the name of its command."""

from __future__ import annotations

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from phalanx.cli.main import phalanx_command

SMALL = "--model llama3-8b --cluster h100:8"


@pytest.mark.parametrize(
    ("earlier", "present"),
    [
        (f"{SMALL} --layout tp=2 --batch 64 --json", f"layout {SMALL} --layout tp=2 --batch 64 --json"),
        (f"{SMALL} --layout tp=3", f"layout {SMALL} --layout tp=3"),
        ("--budget 1e22FLOP --kind dense --json", "budget 1e22FLOP --kind dense --json"),
        ("--budget 40M$", "budget 40M$"),
        ("--fit nowhere", "fit nowhere"),
        (f"{SMALL} --serve --traffic in=200,out=50 --json", f"serve {SMALL} --traffic in=200,out=50 --json"),
        (f"{SMALL} --serve", f"serve {SMALL}"),
        ("--stacks --json", "stacks --json"),
    ],
)
def test_the_earlier_spelling_prints_what_the_command_prints(earlier: str, present: str) -> None:
    first, second = (
        CliRunner().invoke(phalanx_command, ["plan", *words.split()]) for words in (earlier, present)
    )
    # A usage error begins with the synopsis of its command.
    assert first.output.partition("Error: ")[1:] == second.output.partition("Error: ")[1:]
    assert (first.stdout, first.exit_code) == (second.stdout, second.exit_code)


@pytest.mark.parametrize(
    "words",
    [
        "budget 1e22FLOP --layout tp=2",
        "fit runs/a --cluster h100:8",
        f"layout {SMALL} --kind dense",
        f"serve {SMALL} --traffic in=1,out=1 --optimize cost",
        "stacks --top 3",
    ],
)
def test_a_command_refuses_the_options_of_another(words: str) -> None:
    result = CliRunner().invoke(phalanx_command, ["plan", *words.split()])
    assert result.exit_code == 2
    assert words.split()[-2] in result.output.partition("No such option")[2]


@pytest.mark.parametrize(
    ("typed", "incomplete", "completed"),
    [
        (["plan"], "s", {"serve", "stacks"}),
        (["plan"], "--bud", {"--budget"}),
        (["plan", "budget"], "--un", {"--unique-tokens"}),
        (["plan", "run.toml"], "--top", {"--top", "--topology"}),
        (["runs"], "li", {"list"}),
    ],
)
def test_a_shell_completes_commands_and_the_options_without_one(
    typed: list[str], incomplete: str, completed: set[str]
) -> None:
    items = ShellComplete(phalanx_command, {}, "phalanx", "_PHALANX_COMPLETE").get_completions(
        typed, incomplete
    )
    assert {item.value for item in items if item.type == "plain"} == completed


def test_a_shell_completes_the_name_of_a_run_file_in_place_of_a_command() -> None:
    items = ShellComplete(phalanx_command, {}, "phalanx", "_PHALANX_COMPLETE").get_completions(
        ["plan"], "conf"
    )
    assert [item.type for item in items] == ["file"]


def test_the_help_without_a_command_names_the_present_spelling() -> None:
    printed = CliRunner().invoke(
        phalanx_command, ["plan", "run.toml", "--help"], terminal_width=1000, max_content_width=1000
    )
    assert "Now `phalanx plan budget BUDGET`" in printed.output
    assert click.unstyle(printed.output).startswith("Usage: phalanx plan [OPTIONS]")
