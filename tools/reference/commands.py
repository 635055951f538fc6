"""``docs/reference/commands.md``: every command with its usage, options and examples."""

from __future__ import annotations

from collections.abc import Iterator

import click

from phalanx.cli.main import TASKS, phalanx_command
from phalanx.command_help import options_by_heading, read_help
from tools.reference.markdown import prose, table

_INTRODUCTION = """\
# Commands

Every command of `phalanx`, from its own help: `--help` prints the same in a terminal. An option may be left out unless it is
required. Every command also has `--help`.
"""


def page() -> str:
    """Return the page, a section for each task."""
    context = click.Context(phalanx_command, info_name="phalanx")
    parts = [_INTRODUCTION]
    for task, names in TASKS.items():
        parts.append(f"## {task}\n")
        for name in names:
            command = phalanx_command.get_command(context, name)
            assert command is not None, name
            parts += _sections(command, click.Context(command, context, name))
    return "\n".join(parts)


def _sections(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the section of a command, and those of the commands of a group."""
    text = read_help(command)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"### {context.command_path}\n"
    yield prose(text.summary)
    yield "\n".join(["```sh", f"# {usage}", *text.examples, "```\n"])
    yield from (_paragraph(paragraph) for paragraph in text.details)
    groups = options_by_heading(command, context)
    for heading, options in groups.items():
        rows = [_row(option, context) for option in options if "--help" not in option.opts]
        if rows:
            yield f"{heading}:\n"
            yield table(("option", "value", "default", "meaning"), rows)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, name
            yield from _sections(inner, click.Context(inner, context, name))


def _paragraph(text: str) -> str:
    if text.startswith("\b\n"):
        return f"```sh\n{text.removeprefix(chr(8)).strip()}\n```\n"
    return prose(text)


def _row(option: click.Option, context: click.Context) -> tuple[str, str, str, str]:
    extra = option.get_help_extra(context)
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    choices = getattr(option.type, "choices", ())
    value = (
        " or ".join(f"`{choice}`" for choice in choices)
        or option.metavar
        or option.type.name.removesuffix(" range")
    )
    value = "flag" if option.is_flag else f"{value}, {extra['range']}" if "range" in extra else value
    value += ", may be repeated" if option.multiple else ""
    default = "required" if "required" in extra else f"`{extra['default']}`" if "default" in extra else ""
    return names, value, default, option.help or ""
