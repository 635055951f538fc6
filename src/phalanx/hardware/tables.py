"""Reads a description of hardware from TOML, and reports all that is wrong with it in one ``HardwareError``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias, TypeVar

from phalanx.run.fields import Problem, listing, read_section

# The one error of this package.


class HardwareError(ValueError):
    """A name, file or value of hardware that cannot be used; the message names the field and the remedy."""


Values: TypeAlias = Mapping[str, object]
_Entry = TypeVar("_Entry")


def read_toml(path: Path) -> Values:
    """The tables of the file at ``path``; raises ``HardwareError`` if it is not there or is not TOML."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise HardwareError(f"cannot read {path}: {error.strerror}; name a TOML file that exists") from error
    except tomllib.TOMLDecodeError as error:
        raise HardwareError(f"{path} is not TOML: {error}") from error


def read_entry(kind: type[_Entry], values: Values, place: str) -> _Entry:
    """The ``kind`` that ``values`` describe; raises ``HardwareError`` with every mistake, under the name ``place``."""
    problems: list[Problem] = []
    found = read_section(kind, values, problems)
    if found is None or problems:
        raise HardwareError(listing(place, problems))
    return found


def table_of(values: Values, name: str, place: str) -> Values:
    """The table ``name`` in ``values``; raises ``HardwareError`` if it is missing or no table."""
    found = values.get(name)
    if not isinstance(found, Mapping):
        wrong = "is missing" if found is None else f"{found!r} is not a table"
        raise HardwareError(listing(place, [Problem(name, wrong, f"add a table [{name}]")]))
    return found
