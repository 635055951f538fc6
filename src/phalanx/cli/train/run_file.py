"""``phalanx new`` and ``phalanx spec``: a first run file with the meaning of every field beside it, and the reference of all fields."""

from __future__ import annotations

import dataclasses
import inspect
import json
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

import click
import tomli_w

from phalanx.cli.errors import explained
from phalanx.command_help import Command
from phalanx.model.facts.presets import PRESETS
from phalanx.run.fields import FieldType, RunFileError, field_docs, field_types, is_tables, sections
from phalanx.run.read import first_run_file, read_table, shipped_names
from phalanx.run.spec import RunSpec


@click.command("new", cls=Command)
@click.argument("name")
@click.option(
    "--from",
    "source",
    type=click.Choice(shipped_names()),
    default="quickstart",
    show_default=True,
    help="The run file to begin with.",
)
def new_command(name: str, source: str) -> None:
    """Write NAME.toml, a run file to begin with: a copy of one that comes with Phalanx, each field explained.

    \b
      phalanx new first
      phalanx new mixture --from quickstart-moe
      phalanx train first.toml
    """
    name = name.removesuffix(".toml")
    target = Path(f"{name}.toml")
    with explained(RunFileError):
        text = first_run_file(source, name)
        read_table({}, PRESETS, [f'name="{name}"'], target)  # A name that no run can have.
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise click.ClickException(f"{target} is there already; give another name, or remove it") from None
    except OSError as error:
        raise click.ClickException(f"{target} cannot be written: {error.strerror}") from None
    click.echo(f"{target}: written from {source}")
    click.echo(f"  all fields: phalanx spec; the resulting model: phalanx show {target}")
    click.echo(f"  to train it: phalanx train {target}")


@click.command("spec", cls=Command)
@click.argument("section", required=False)
@click.option(
    "--markdown", is_flag=True, help="Print Markdown tables (docs/reference/run-file.md is made so)."
)
def spec_command(section: str | None, markdown: bool) -> None:
    """Show every field of a run file, or those of one SECTION: type, default, meaning.

    The output is itself a run file.

    \b
      phalanx spec optimizer
      phalanx spec > all-defaults.toml
    """
    selected = [
        (name, kind, optional) for name, kind, optional in sections(RunSpec) if section in (None, name)
    ]
    for name, kind, optional in selected:
        # An optional table changes the run if it is present, so it is a comment unless it was requested by
        # name.
        text = _markdown(name, kind) if markdown else _as_toml(name, kind)
        if optional and section is None and not markdown:
            lines = text.split("\n")
            text = "\n".join(line if line.startswith("#") or not line else f"# {line}" for line in lines)
        click.echo(text)
    if not selected:
        names = ", ".join(name or "(top)" for name, _, _ in sections(RunSpec))
        raise click.ClickException(f"there is no section {section!r}; there are: {names}")


def _heading(name: str) -> str:
    """Return the section's line in a run file."""
    section, _, field = name.rpartition(".")
    within = next((kind for candidate, kind, _ in sections(RunSpec) if candidate == section), RunSpec)
    return f"[[{name}]]" if is_tables(field_types(within)[field]) else f"[{name}]"


def _rows(kind: type) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield (name, type, default, owner, meaning) of each field of a section that has a default.

    Optional fields have the default "absent".
    """
    docs = field_docs(kind)
    declared = field_types(kind)
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING:
            continue
        owner = declared[field.name].owner
        yield (
            field.name,
            _type_name(declared[field.name]),
            "absent"
            if field.default is None or is_tables(declared[field.name])
            else _toml_value(field.default),
            owner,
            docs.get(field.name, ""),
        )


def _type_name(declared: FieldType) -> str:
    """Return a field's type in words, with its range."""
    plain, options = declared.plain, typing.get_args(declared.plain)
    if typing.get_origin(plain) is typing.Literal:
        name = " or ".join(map(json.dumps, options))
    elif is_tables(declared):
        name = "list of tables, or absent"
    elif type(None) in options:
        name = f"{'table' if is_dataclass(options[0]) else options[0].__name__}, or absent"
    else:
        name = "list" if typing.get_origin(plain) is tuple else getattr(plain, "__name__", str(plain))
    return f"{name}, {declared.bound}" if declared.bound else name


def _toml_value(value: object) -> str:
    """Return a default as TOML writes it, a list on one line."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return tomli_w.dumps({"_": value}).strip().removeprefix("_ = ")


def _as_toml(name: str, kind: type) -> str:
    """Return a section as a piece of a run file: every field with its default, and type, owner and meaning as
    comments.

    Fields without a default value are comments.
    """
    lines = [_heading(name) if name else "# top of the file"]
    for field, kind_name, default, owner, meaning in _rows(kind):
        lines += textwrap.wrap(meaning, 110, initial_indent="# ", subsequent_indent="# ")
        if default == "absent":
            plain = typing.get_args(field_types(kind)[field].plain)[0]
            shown = _heading(f"{name}.{field}") if is_dataclass(plain) else f"{field} = ..."
            lines.append(f"# {shown}   # {kind_name}; {owner}")
        else:
            lines.append(f"{field} = {default}   # {kind_name}; {owner}")
    return "\n".join(lines) + "\n"


def _markdown(name: str, kind: type) -> str:
    """Return a section in Markdown: a heading, the docstring of its class, and a table of its fields."""
    lines = [f"## {_heading(name) if name else 'Top of the file'}", "", inspect.getdoc(kind) or "", ""]
    lines += ["| field | type | default | owner | meaning |", "|---|---|---|---|---|"]
    lines += [
        f"| `{field}` | {kind_name.replace('|', 'or')} | `{default}` | {owner} | {meaning} |"
        for field, kind_name, default, owner, meaning in _rows(kind)
    ]
    return "\n".join(lines) + "\n"
