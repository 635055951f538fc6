"""Commands, arguments and options of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from contract.conftest import Contract
from phalanx.cli.main import phalanx_command
from phalanx.command_help import DefaultGroup


def commands(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Yield every command below ``command`` with the words that call it."""
    yield " ".join(words), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, (*words, name))


def described(param: click.Parameter) -> str:
    """Return the value, default and multiplicity of an option or argument."""
    kind = param.type
    is_flag = isinstance(param, click.Option) and param.is_flag
    range_ = f" {kind._describe_range()}" if isinstance(kind, click.types._NumberRangeBase) else ""
    names = getattr(kind, "choices", ())
    value = f"one of {', '.join(names)}" if names else f"{kind.name}{range_}"
    has_default = isinstance(param.default, str | int | float | Path) and param.default is not False
    facts = ["flag" if is_flag else value]
    facts += [f"default {param.default}"] if has_default else []
    facts += ["required"] if param.required else []
    facts += ["may be repeated"] if param.multiple or param.nargs == -1 else []
    facts += [f"{param.nargs} values"] if param.nargs > 1 else []
    return ", ".join(facts)


def test_commands_and_options_are_those_recorded(contract: Contract) -> None:
    facts = {}
    for words, command in commands(phalanx_command):
        facts[words or "phalanx"] = "group" if isinstance(command, click.Group) else "command"
        for param in command.unnamed.params if isinstance(command, DefaultGroup) else command.params:
            if getattr(param, "hidden", False):
                continue
            for name in (
                (*param.opts, *param.secondary_opts)
                if isinstance(param, click.Option)
                else [param.human_readable_name]
            ):
                facts[f"{words} {name}".strip()] = described(param)
    contract("commands", facts)
