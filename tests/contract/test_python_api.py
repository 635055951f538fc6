"""Names, signatures and fields of ``phalanx.__all__``, and the errors' base classes."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from typing import Any

import phalanx
from contract.conftest import Contract
from phalanx.observe import events
from phalanx.run.fields import sections
from phalanx.run.spec import RunSpec


def members(name: str, value: Any) -> dict[str, str]:
    """Return what is promised of a public name: its kind, signatures, fields and bases."""
    if inspect.isfunction(value):
        return {name: f"function{signature(value)}"}
    if not inspect.isclass(value):
        return {name: type(value).__name__}
    bases = ", ".join(base.__name__ for base in value.__mro__[1:-1] if base.__module__ != "typing")
    facts = {name: f"class ({bases})" if bases else "class"}
    if dataclasses.is_dataclass(value):
        facts |= {
            f"{name}.{item.name}": f"field {plain(item.type)}{default(item)}"
            for item in dataclasses.fields(value)
        }
    for attribute, member in vars(value).items():
        if not attribute.startswith("_") and isinstance(member, property):
            facts[f"{name}.{attribute}"] = "property"
        elif not attribute.startswith("_") and inspect.isfunction(member):
            facts[f"{name}.{attribute}"] = f"method{signature(member)}"
    return facts


def signature(function: Any) -> str:
    """Return the parameters and the result as written."""
    return plain(str(inspect.signature(function)).replace("'", ""))


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


def test_public_names_signatures_and_fields_are_those_recorded(contract: Contract) -> None:
    facts: dict[str, str] = {}
    for name in phalanx.__all__:
        facts |= members(name, getattr(phalanx, name))
    contract("python_api", facts)


def test_the_fields_of_a_run_file_are_those_recorded(contract: Contract) -> None:
    facts: dict[str, str] = {}

    def walk(section: Any, prefix: str) -> None:
        for item in dataclasses.fields(section):
            facts[f"{prefix}{item.name}"] = f"{plain(item.type)}{default(item)}"

    for name, kind, _ in sections(RunSpec):
        walk(kind, f"{name}." if name else "")
    contract("run_file", facts)


def test_the_kinds_and_fields_of_events_are_those_recorded(contract: Contract) -> None:
    facts: dict[str, str] = {}
    for name, kind in vars(events).items():
        if inspect.isclass(kind) and dataclasses.is_dataclass(kind) and kind.__module__ == events.__name__:
            facts |= {name: "event"} | {
                f"{name}.{item.name}": f"{plain(item.type)}{default(item)}"
                for item in dataclasses.fields(kind)
            }
    contract("events", facts)
