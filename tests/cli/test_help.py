"""The help of every command: a sentence, its shortest example, options by group, further examples."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from contract.test_commands import commands
from phalanx.cli.main import phalanx_command
from phalanx.command_help import Command, CommandGroup, DefaultGroup, HelpText, read_help

EVERY = dict(commands(phalanx_command))
WORDS = [pytest.param(words, id=words or "phalanx") for words in EVERY]


def typed_words(example: str) -> list[str]:
    """Return the words behind ``phalanx`` in a line for the shell, up to a pipe or a comment."""
    words = shlex.split(example, comments=True)
    return words[words.index("phalanx") + 1 :]


def create_inputs(command: click.Command, context: click.Context, words: list[str]) -> None:
    """Create the files and folders that must exist for the words to be parsed."""
    values, _, _ = command.make_parser(context).parse_args(args=[*words])
    for param in command.params:
        is_read = isinstance(param.type, click.File) or getattr(param.type, "exists", False)
        if is_read and values.get(str(param.name)):
            Path(values[str(param.name)]).touch()


def parse(example: str) -> click.Context:
    """Parse an example as the command line does, and return the context of its command."""
    group: click.Command = phalanx_command
    context, words = click.Context(group, info_name="phalanx"), typed_words(example)
    while isinstance(group, click.Group):
        if isinstance(group, DefaultGroup) and not {*words[:1]} & group.commands.keys():
            group, context = group.unnamed, click.Context(group.unnamed, context.parent, context.info_name)
            break
        name, inner, words = group.resolve_command(context, words)
        assert inner is not None
        create_inputs(inner, context, words) if not isinstance(inner, click.Group) else None
        group, context = inner, click.Context(inner, context, name)
    return group.make_context(context.info_name, words, context.parent)


@pytest.mark.parametrize("words", WORDS)
def test_the_help_of_a_command_is_a_sentence_then_its_first_example_then_options_then_the_other_examples(
    words: str,
) -> None:
    command = EVERY[words]
    assert isinstance(command, Command | CommandGroup)
    text = read_help(command)
    lines = (
        CliRunner()
        .invoke(phalanx_command, [*words.split(), "--help"], terminal_width=1000, max_content_width=1000)
        .output.splitlines()
    )
    assert lines[2:5] == [f"  {text.summary}", "", f"    {text.examples[0]}"]
    examples = lines.index("Examples:") if len(text.examples) > 1 else len(lines)
    assert [line.strip() for line in lines[examples + 1 :]] == [*text.examples[1:]]
    assert any("--help" in line for line in lines[5:examples])


@pytest.mark.parametrize("words", WORDS)
def test_the_first_example_of_a_command_calls_it_with_the_fewest_words(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = read_help(EVERY[words]).examples
    counts = [len(example.partition(" #")[0].split()) for example in examples]
    assert counts[0] == min(counts)
    assert f"{parse(examples[0]).command_path} ".startswith(f"phalanx {words}".strip() + " ")


def test_a_docstring_is_taken_apart_at_its_first_sentence_and_its_first_block() -> None:
    @click.command("copy", cls=Command)
    def copy() -> None:
        """Copy a file, e.g. a large
        one. Nothing is lost.

        \b
          phalanx copy a b
          phalanx copy a b --fast   # without checks

        \b
          kept
            as it is

        Exit codes: 0 copied.
        """

    assert read_help(copy) == HelpText(
        "Copy a file, e.g. a large one.",
        ("phalanx copy a b", "phalanx copy a b --fast   # without checks"),
        ("Nothing is lost.", "\b\n  kept\n    as it is", "Exit codes: 0 copied."),
    )


@pytest.mark.parametrize(("typed", "meant"), [("plan layuot", "layout"), ("runs lst", "list")])
def test_a_mistyped_command_of_a_group_that_also_takes_files_is_named(typed: str, meant: str) -> None:
    ended = CliRunner().invoke(phalanx_command, typed.split())
    assert ended.exit_code == 2
    assert f"Did you mean '{meant}'?" in ended.output


def test_a_file_with_nearly_the_name_of_a_command_is_taken_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("layuot").write_text("[train]\nsteps = -1\n")
    ended = CliRunner().invoke(phalanx_command, ["plan", "layuot"])
    assert "train.steps" in ended.output
