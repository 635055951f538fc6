"""Names, signatures and fields of ``phalanx.__all__``, and the errors' base classes."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import msgspec
from msgspec import structs

import phalanx
from contract.conftest import Contract
from phalanx.observe import events
from phalanx.run.fields import sections
from phalanx.run.spec import RunSpec
from tools.reference.python_api import default, plain, signature


def members(name: str, value: Any) -> dict[str, str]:
    """Return what is promised of a public name: its kind, signatures, fields and bases."""
    if inspect.isfunction(value):
        return {name: f"function{unquoted(value)}"}
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
            facts[f"{name}.{attribute}"] = f"method{unquoted(member)}"
    return facts


def unquoted(function: Any) -> str:
    """Return a signature without quotes, as the record has it."""
    return signature(function).replace("'", "")


def struct_default(item: structs.FieldInfo) -> str:
    """Return the default of a field, as ``default`` does."""
    if item.default is not msgspec.NODEFAULT:
        return f" = {item.default!r}"
    return "" if item.required else " = made on use"


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
        if not inspect.isclass(kind) or kind.__module__ != events.__name__:
            continue
        if dataclasses.is_dataclass(kind):
            facts |= {
                f"{name}.{item.name}": f"{plain(item.type)}{default(item)}"
                for item in dataclasses.fields(kind)
            }
        elif issubclass(kind, msgspec.Struct):
            facts |= {
                f"{name}.{item.encode_name}": f"{plain(item.type)}{struct_default(item)}"
                for item in structs.fields(kind)
            }
        facts |= {name: "event"} if any(fact.startswith(f"{name}.") for fact in facts) else {}
    contract("events", facts)
