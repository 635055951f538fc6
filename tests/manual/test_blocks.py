"""Blocks of the manual that are not executed, and all its run files, are right too: options, names of files, fields."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from manual.blocks import ROOT, Block, blocks, blocks_of, pages, phalanx_commands
from phalanx.cli.main import phalanx_command
from phalanx.data.portions.planning.recipe import read_recipe
from phalanx.model.facts.presets import PRESETS
from phalanx.run.read import read_run

BLOCKS = [block for page in pages() for block in blocks(page)]
SHIPPED = ("configs/", "deploy/", "docs/", "examples/", "src/", "tests/")
RECIPE = "[[source]]"
COMMAND_LINE = re.compile(r"^(?: {4})?(?:\$ )?(?:\.venv/bin/)?phalanx [a-z]+ [\w./-]+", re.MULTILINE)
UNFENCED: set[str] = set()
"""Pages with commands in indented blocks, which no test runs. To be emptied."""


def without_scripts(page: str) -> str:
    """Return the text of a page without its blocks of shell, Python and output."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for block in blocks(page):
        if block.language in ("sh", "python", "text"):
            text = text.replace(block.text, "")
    return text


def mistakes(arguments: Sequence[str], command: click.Command = phalanx_command) -> list[str]:
    """Return what the real command objects to in ``arguments``: names of commands and options, choices, missing arguments.

    Words in capitals are placeholders; files and values of other types are not looked at.
    """
    context = click.Context(command, info_name=command.name)
    if isinstance(command, click.Group) and arguments[:1] not in (["-h"], ["--help"], ["--version"]):
        names = command.list_commands(context)
        if arguments[:1] == [] or arguments[0] not in names:
            arguments = ["list", *arguments]  # the default of some groups
        inner = command.get_command(context, arguments[0]) if arguments[0] in names else None
        return [f"no command in {arguments[1:]}"] if inner is None else mistakes(arguments[1:], inner)
    try:
        values, rest, _ = command.make_parser(context).parse_args(list(arguments))
        problems = [f"surplus arguments {rest}"] if rest else []
        for parameter in command.params:
            value = values.get(parameter.name)
            if parameter.required and not (isinstance(value, str | tuple | list) and value):
                problems.append(f"no {parameter.name}")
            if isinstance(parameter.type, click.Choice) and isinstance(value, str) and not value.isupper():
                parameter.type_cast_value(context, value)
    except click.UsageError as error:
        problems = [error.format_message()]
    return problems


def absent(arguments: Sequence[str]) -> list[str]:
    """Return the files in folders of this repository that ``arguments`` name and that are not there."""
    named = [word for word in arguments if word.startswith(SHIPPED)]
    return [word for word in named if not any(ROOT.glob(word))]


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "sh"], ids=str)
def test_every_command_of_a_block_has_the_options_and_files_that_it_names(block: Block) -> None:
    problems = {
        " ".join(["phalanx", *arguments]): mistakes(arguments) + absent(arguments)
        for arguments in phalanx_commands(block.text)
    }
    assert {command: problem for command, problem in problems.items() if problem} == {}


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "toml" and not block.reason], ids=str
)
def test_every_run_file_and_recipe_of_the_manual_is_read(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "block.toml"
    file.write_text(block.text)
    assert read_recipe(file) if RECIPE in block.text else read_run(file, PRESETS)


def test_a_page_has_its_commands_in_blocks_that_are_tested() -> None:
    untested = {page for page in pages() if COMMAND_LINE.search(without_scripts(page))}
    assert untested <= UNFENCED


def test_every_command_of_a_script_is_found() -> None:
    script = (
        "cat > a.toml <<'END'\nphalanx in a document\nEND\n"
        "phalanx hash RUN_DIR   # phalanx in a comment\n"
        "A=1 .venv/bin/phalanx plan run.toml \\\n  --cluster h100:8 > plan.txt && cd x; phalanx runs | head\n"
        "sbatch --wrap 'phalanx data work out --task 1/2'\n"
        'phalanx train "$(phalanx new first)" &\n'
        "srun python -m phalanx status RUN_DIR\npip install phalanx\n"
    )
    assert [" ".join(command) for command in phalanx_commands(script)] == [
        "new first",
        "hash RUN_DIR",
        "plan run.toml --cluster h100:8",
        "runs",
        "data work out --task 1/2",
        "train SUBSTITUTED",
        "status RUN_DIR",
    ]


@pytest.mark.parametrize(
    "command",
    ["tran run.toml", "train run.toml --rank 2", "plan a.toml --optimize speed", "hash", "hash a b"],
)
def test_a_wrong_command_is_found(command: str) -> None:
    assert mistakes(command.split())


def test_the_reason_why_a_block_is_not_run_is_read() -> None:
    page = "Text\n<!-- not run: it needs a GPU -->\n```sh\nphalanx health\n```\n\n```toml\na = 1\n```\n"
    first, second = blocks_of("page.md", page)
    assert (first.reason, first.language, first.line) == ("it needs a GPU", "sh", 3)
    assert (second.reason, second.text) == ("", "a = 1\n")
