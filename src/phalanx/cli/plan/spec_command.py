"""``phalanx spec``: the reference of the run file, read from the code that reads run files."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator

import click

from phalanx.run.fields import field_docs
from phalanx.run.section_reader import FieldType, field_types
from phalanx.run.spec import RunSpec


@click.command("spec")
@click.argument("section", required=False)
@click.option("--markdown", is_flag=True, help="Print Markdown tables (docs/run-file.md is made so).")
def command(section: str | None, markdown: bool) -> None:
    """Show every field of a run file, or those of one SECTION: type, default, meaning.

    \b
      phalanx spec optimizer
    """
    found = False
    for name, kind in sections(RunSpec):
        if section is not None and name != section:
            continue
        found = True
        click.echo(_markdown(name, kind) if markdown else _plain(name, kind))
    if not found:
        known = ", ".join(name or "(top)" for name, _ in sections(RunSpec))
        raise click.ClickException(f"there is no section {section!r}; there are: {known}")


def sections(kind: type, name: str = "") -> Iterator[tuple[str, type]]:
    """A section and all sections within it, with their dotted names."""
    yield name, kind
    for field, declared in field_types(kind).items():
        options = typing.get_args(declared.plain) or (declared.plain,)
        for option in options:
            if dataclasses.is_dataclass(option) and isinstance(option, type):
                yield from sections(option, f"{name}.{field}".lstrip("."))


def _rows(kind: type) -> Iterator[tuple[str, str, str, str, str]]:
    """Name, type, default, owner and meaning of each field that is no section itself."""
    docs = field_docs(kind)
    declared = field_types(kind)
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING:
            continue
        owner = declared[field.name].owner
        yield (
            field.name,
            _type_name(declared[field.name]),
            repr(field.default),
            owner,
            docs.get(field.name, ""),
        )


def _type_name(declared: FieldType) -> str:
    plain, options = declared.plain, typing.get_args(declared.plain)
    if typing.get_origin(plain) is typing.Literal:
        name = " or ".join(map(repr, options))
    elif type(None) in options:
        name = "table, or absent"
    else:
        name = getattr(plain, "__name__", str(plain))
    return f"{name}, {declared.bound}" if declared.bound else name


def _plain(name: str, kind: type) -> str:
    lines = [f"[{name}]" if name else "(top of the file)"]
    lines += [
        f"  {field} = {default}   # {kind_name}; {owner}\n      {meaning}"
        for field, kind_name, default, owner, meaning in _rows(kind)
    ]
    return "\n".join(lines) + "\n"


def _markdown(name: str, kind: type) -> str:
    lines = [f"## {f'[{name}]' if name else 'Top of the file'}", "", (kind.__doc__ or "").strip(), ""]
    lines += ["| field | type | default | owner | meaning |", "|---|---|---|---|---|"]
    lines += [
        f"| `{field}` | {kind_name.replace('|', 'or')} | `{default}` | {owner} | {meaning} |"
        for field, kind_name, default, owner, meaning in _rows(kind)
    ]
    return "\n".join(lines) + "\n"
