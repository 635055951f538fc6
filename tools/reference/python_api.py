"""``docs/reference/python-api.md``: the public names of ``phalanx``, with signatures, fields and docstrings."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator
from typing import Any

import phalanx
from phalanx.run.fields import field_docs
from tools.reference.markdown import docstring, table

_INTRODUCTION = """\
# The Python interface

The names of `import phalanx`. Each is imported when it is first used. [../train/python-api.md](../train/python-api.md) shows how to
train, inspect and extend a run with them.
"""
_RUN_FILE = "Its fields are those of the [run file](run-file.md).\n"
_QUOTED_ANNOTATION = re.compile(r"(: |-> )'([^']*)'")
_OF_THE_RUN_FILE = ("RunSpec", "ModelSpec")


def page() -> str:
    """Return the page: functions, classes and errors."""
    values = {name: getattr(phalanx, name) for name in phalanx.__all__ if not name.startswith("_")}
    functions = {name: value for name, value in values.items() if inspect.isfunction(value)}
    errors = {
        name: value
        for name, value in values.items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    classes = {name: value for name, value in values.items() if name not in functions.keys() | errors.keys()}
    return "\n".join(
        [
            _INTRODUCTION,
            "## Functions\n",
            *(_function(name, value) for name, value in functions.items()),
            "## Classes\n",
            *(part for name, value in classes.items() for part in _class(name, value)),
            "## Errors\n",
            *(f"### {name}\n\n{docstring(value)}" for name, value in errors.items()),
        ]
    )


def signature(function: Any) -> str:
    """Return the parameters and the result as written."""
    return plain(_QUOTED_ANNOTATION.sub(r"\1\2", str(inspect.signature(function))))


def plain(type_: Any) -> str:
    """Return a type as written in source, without the modules of its names: where a class is defined is not promised."""
    name = type_ if isinstance(type_, str) else getattr(type_, "__name__", str(type_))
    return re.sub(
        r"\b(phalanx|collections|pathlib|typing)(\.\w+)*\.(?=\w)",
        "",
        str(type_) if "|" in str(type_) else name,
    )


def default(item: dataclasses.Field[Any]) -> str:
    """Return the default of a field; nothing if it must be given."""
    if item.default is not dataclasses.MISSING:
        nested = dataclasses.is_dataclass(item.default) or isinstance(item.default, enum.Enum)
        return f" = {type(item.default).__name__}()" if nested else f" = {item.default!r}"
    return " = made on use" if item.default_factory is not dataclasses.MISSING else ""


def _function(name: str, value: Any) -> str:
    return f"### {name}\n\n```python\n{name}{signature(value)}\n```\n\n{docstring(value)}"


def _class(name: str, value: type) -> Iterator[str]:
    yield f"### {name}\n\n{docstring(value)}"
    if name in _OF_THE_RUN_FILE:
        yield _RUN_FILE
        return
    if dataclasses.is_dataclass(value):
        docs = field_docs(value)
        rows = [
            (
                f"`{item.name}`",
                f"`{plain(item.type)}{default(item)}`",
                docs.get(item.name, "").replace("``", "`"),
            )
            for item in dataclasses.fields(value)
        ]
        yield table(("field", "type", "meaning"), rows)
    members = [
        (attribute, member) for attribute, member in vars(value).items() if not attribute.startswith("_")
    ]
    described = [
        (
            f"`{attribute}{signature(member)}`" if inspect.isfunction(member) else f"`{attribute}`",
            docstring(member),
        )
        for attribute, member in members
        if inspect.isfunction(member) or isinstance(member, property)
    ]
    if described:
        yield table(("member", "meaning"), described)
