"""Which runs of a list are shown, and in which order: conditions such as ``loss<2``, on a row's columns and on fields of the run file.

A condition is NAME OPERATOR VALUE. A name with a dot is a field of the run file, any other one a column. ``=`` and ``!=`` compare numbers as
numbers and everything else as text, ``~`` asks whether the text contains the value. A run that lacks what is asked for does not fit.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from phalanx.run.directory.files import read_small
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.fields import field_types, sections
from phalanx.run.spec import RunSpec
from phalanx_watch.runs.row import RunRow

COLUMNS = tuple(field.name for field in fields(RunRow))
HEADINGS: Mapping[str, str] = {
    "path": "run",
    "bits_per_byte": "bits/byte",
    "tokens_per_s": "tokens/s",
    "updated": "last event",
    "weights_sha256": "weights",
    "held_out_loss": "held out",
}
"""Headings of columns in tables, where they are other than the names; both are accepted."""
_NAMES = {heading: name for name, heading in HEADINGS.items()}
_CONDITION = re.compile(r"\s*([A-Za-z_][\w./ ]*?)\s*(<=|>=|!=|<|>|=|~)\s*(.*?)\s*", re.DOTALL)
_KINDS: Mapping[str, Any] = get_type_hints(RunRow)
_NUMERIC: Mapping[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


class SelectionError(ValueError):
    """A condition or the name of a column cannot be read; the message says what there is."""


@dataclass(frozen=True)
class Condition:
    """A demand on a run."""

    name: str
    operator: str
    value: str

    def holds(self, row: RunRow) -> bool:
        """True if the run fits."""
        found = value_of(row, self.name)
        if found is None:
            return False
        if self.operator == "~":
            return self.value.lower() in _text(found).lower()
        if isinstance(found, int | float) and not isinstance(found, bool):
            try:
                return _NUMERIC[self.operator](float(found), float(self.value))
            except ValueError:
                return self.operator == "!="
        if self.operator not in ("=", "!="):
            return False
        equal = _text(found).lower() == self.value.lower()
        return equal if self.operator == "=" else not equal


def read_condition(text: str) -> Condition:
    """Reads a condition. Raises ``SelectionError``."""
    match = _CONDITION.fullmatch(text)
    if match is None or not match[3]:
        raise SelectionError(f"{text!r} is no condition: write NAME<VALUE, with one of < <= > >= = != ~")
    condition = Condition(checked_name(match[1]), match[2], match[3])
    _require_sense(condition)
    return condition


def _require_sense(condition: Condition) -> None:
    """Raise SelectionError for a condition that no run can fit, with whatever files."""
    name, operator, value = condition.name, condition.operator, condition.value
    kind = _KINDS.get(name)
    if operator.rstrip("=") in ("<", ">"):
        if not _is_number(value):
            raise SelectionError(
                f"{name}{operator}{value}: {operator} compares numbers, and {value!r} is none"
            )
        if kind is not None and not {int, float} & {kind, *get_args(kind)}:
            raise SelectionError(f"{name}{operator}{value}: {name} is no number: use = != or ~")
    elif name == "state" and operator == "=" and value.lower() not in get_args(kind):
        raise SelectionError(f"there is no state {value!r}; there are {', '.join(get_args(kind))}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def checked_name(name: str) -> str:
    """Return the name of a column that ``name`` or its heading names, or of a field of the run file. Raises ``SelectionError``."""
    if name in _NAMES:
        return _NAMES[name]
    names = _run_fields() if "." in name else COLUMNS
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, 1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    if "." in name:
        raise SelectionError(f"a run file has no field {name!r}{meant}; phalanx spec lists all fields")
    raise SelectionError(
        f"there is no column {name!r}{meant}; there are {', '.join(COLUMNS)}, and fields of the run file such as optimizer.lr"
    )


def _run_fields() -> list[str]:
    """Return the dotted path of every field of a run file that is in a section."""
    return [f"{name}.{field}" for name, kind, _ in sections(RunSpec) if name for field in field_types(kind)]


def value_of(row: RunRow, name: str) -> object:
    """The value of a column, or of a field of the run file, of a run; ``None`` if it has none."""
    return _field(Path(row.path), name) if "." in name else getattr(row, name)


def selected(rows: Iterable[RunRow], conditions: Sequence[Condition], tags: Sequence[str]) -> list[RunRow]:
    """The runs that fit all conditions and have all tags."""
    return [
        row
        for row in rows
        if set(tags) <= set(row.tags) and all(condition.holds(row) for condition in conditions)
    ]


def ordered(rows: Sequence[RunRow], name: str, *, falling: bool) -> list[RunRow]:
    """The runs by a column, or by a field of the run file; those without a value come last. Raises ``SelectionError``."""
    name = checked_name(name)
    having = [
        (value, row) for row in rows if (value := value_of(row, name)) not in (None, "") and value == value
    ]
    shown = {row.path for _, row in having}
    numbers = all(isinstance(value, int | float) for value, _ in having)

    def key(one: tuple[object, RunRow]) -> tuple[float, str]:
        value = one[0]
        return (float(value), "") if numbers and isinstance(value, int | float) else (0.0, _text(value))

    in_order = [row for _, row in sorted(having, key=key, reverse=falling)]
    return in_order + [row for row in rows if row.path not in shown]


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _field(path: Path, name: str) -> object:
    try:
        table: object = tomllib.loads(read_small(RunDirectory(path).run_file).decode())
    except (OSError, ValueError, RecursionError):
        return None
    for part in name.split("."):
        table = table.get(part) if isinstance(table, dict) else None
    return table
