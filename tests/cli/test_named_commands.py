"""Every command that a message, a document, an alert or the page names exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from phalanx.cli.main import phalanx_command

ROOT = Path(__file__).parents[2]
KINDS = (".py", ".js", ".yml", ".yaml", ".md", ".json")
NAMED = re.compile(r"(?<!b\")phalanx ([a-z][a-z-]+)(?: ([a-z][a-z-]+)(?![\w/.]))?")
"""The name of a file is of bytes; a word with a slash or a dot is a path, not a command."""
PROTOCOL = re.compile(r"\b_?PURPOSE = ")
IN_CODE = re.compile(r"[`'\"({:;|]\s*$|^\s*$|next=|\b(?:with|by|give|run|start|then|and|see) $")
"""Text before a command, as opposed to the name of the project in a sentence."""


def groups() -> dict[str, set[str]]:
    """Top-level commands with their own commands; empty for those that have none."""
    context = click.Context(phalanx_command)
    commands = {
        name: phalanx_command.get_command(context, name) for name in phalanx_command.list_commands(context)
    }
    return {
        name: set(command.commands) if isinstance(command, click.Group) else set()
        for name, command in commands.items()
    }


def texts() -> Iterator[tuple[Path, int, str]]:
    for folder in ("src", "deploy", "docs", "README.md", "bench"):
        place = ROOT / folder
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if path.suffix in KINDS and "vendor" not in path.parts:
                for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                    if not PROTOCOL.search(line):
                        yield path, number, line


def test_every_command_that_a_text_names_exists() -> None:
    known = groups()
    unknown = []
    for path, number, line in texts():
        for match in NAMED.finditer(line):
            name, of_group = match.groups()
            is_command = bool(IN_CODE.search(line[: match.start()]))
            if (name in known and known[name] and of_group and of_group not in known[name]) or (
                is_command and name not in known
            ):
                unknown.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert unknown == []
