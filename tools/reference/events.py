"""``docs/reference/events.md``: every event of a run's event file, from the types in ``phalanx.observe.events``."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator

import msgspec
from msgspec.inspect import Field, type_info

from phalanx.observe.events import KINDS, IncidentKind
from phalanx.run.fields import field_docs
from tools.reference.markdown import docstring, table

_INTRODUCTION = """\
# Events

A run directory holds `events.jsonl`. Each line is one JSON object, and all attempts of the run append to it. The display, the page,
metrics, trackers and the goodput report are drawn from it.

Every line has `t` (Unix time in seconds), `attempt` (from 0; a fleet's attempts are its epochs) and `kind`, which is one of the
names below. Floats that are not finite are the strings "NaN", "Infinity" and "-Infinity". Readers keep kinds and fields that
they do not know. A line that a killed process left incomplete is skipped.

"""


def page() -> str:
    """Return the page, a section for each kind of event."""
    incidents = field_docs_of_members(IncidentKind)
    rows = [(f"`{kind.value}`", incidents[kind.name]) for kind in IncidentKind]
    return (
        _INTRODUCTION
        + "\n".join(_section(name, kind) for name, kind in KINDS.items())
        + f"\n## Kinds of incidents\n\n{docstring(IncidentKind)}\n{table(('incident', 'meaning'), rows)}"
    )


def field_docs_of_members(kind: type) -> dict[str, str]:
    """Return the documentation string under each member of an enumeration."""
    lines = [line.strip() for line in inspect.getsource(kind).splitlines()]
    pairs = itertools.pairwise(lines)
    return {
        line.split(" = ")[0]: text.strip('"')
        for line, text in pairs
        if " = " in line and text.startswith('"""')
    }


def _section(name: str, kind: type) -> str:
    docs = field_docs(kind)
    rows = [
        (f"`{item.encode_name}`", _type(item), _default(item), docs[item.name].replace("``", "`"))
        for item in _fields(kind)
    ]
    return f"## {name}\n\n{docstring(kind)}\n{table(('field', 'type', 'default', 'meaning'), rows)}"


def _fields(kind: type) -> Iterator[Field]:
    info = type_info(kind)
    assert isinstance(info, msgspec.inspect.DataclassType | msgspec.inspect.StructType)
    yield from info.fields


def _type(item: Field) -> str:
    return _name(item.type)


def _name(kind: msgspec.inspect.Type) -> str:
    match kind:
        case msgspec.inspect.UnionType(types=types):
            return " or ".join(map(_name, types))
        case msgspec.inspect.ListType(item_type=inner):
            return f"list of {_name(inner)}"
        case msgspec.inspect.DictType(value_type=inner):
            return f"object of {_name(inner)}"
        case msgspec.inspect.LiteralType(values=values):
            return " or ".join(f"`{value}`" for value in values)
        case msgspec.inspect.EnumType():
            return "incident"
        case _:
            names = {
                "StrType": "string",
                "IntType": "integer",
                "FloatType": "number",
                "BoolType": "boolean",
                "NoneType": "null",
                "AnyType": "any",
            }
            return names[type(kind).__name__]


def _default(item: Field) -> str:
    if item.default_factory is not msgspec.NODEFAULT:
        return f"`{item.default_factory()!r}`"
    if item.required:
        return ""
    return f"`{msgspec.json.encode(item.default).decode()}`"
