"""Reads a table of TOML or JSON into a dataclass by its fields' types, and collects every mistake in it.

A user who has made three mistakes should see three, each with the path of the field, what was found, what is allowed
and the nearest valid name, not one per attempt. So nothing here raises at the first: ``Problem`` values are collected
while the table is walked along the types. Run files are read so, and the descriptions of hardware.

A field may be a truth value, number, string, ``Literal``, tuple, mapping by name, another dataclass, or one of these or
``None``. A field that the class does not have is a mistake, as is a missing field without a default.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from phalanx.run.fields import AddedLater, FleetOwned, LayoutOwned, ValueRange
from phalanx.run.problems import Problem

TomlTable: TypeAlias = Mapping[str, object]
JsonObject: TypeAlias = dict[str, Any]
"""A JSON object, or a table of TOML, as plain Python values; whoever reads a field knows its type."""
_Section = TypeVar("_Section")
_INVALID = object()
_MOST_PROBLEMS = 100
"""Mistakes after which no more are looked for; each costs a search for the nearest name, and nobody reads so many."""
_MOST_EXACT = 2.0**53
"""Up to this number, a float stands for one whole number."""
_SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: 'a string in "quotes"'}


@dataclass(frozen=True)
class FieldType:
    """A field's type with its annotations taken apart."""

    plain: Any
    bound: ValueRange | None
    fleet_owned: bool
    layout_owned: bool
    later: bool = False
    """True if the field says nothing of a run's identity while it is at its default."""

    @property
    def owner(self) -> str:
        """The owner of the field, who may change it between two starts: "fleet", "layout" or "run"."""
        return "fleet" if self.fleet_owned else "layout" if self.layout_owned else "run"


def field_types(section: type) -> Mapping[str, FieldType]:
    """Each field of a section with its plain type, its bound and its owner."""
    return _field_types(section)


@functools.cache
def _field_types(section: type) -> Mapping[str, FieldType]:
    return {name: _take_apart(hint) for name, hint in get_type_hints(section, include_extras=True).items()}


def sections(kind: type, name: str = "", *, optional: bool = False) -> Iterator[tuple[str, type, bool]]:
    """Yield a section and all sections within it: dotted name, class, and True if it may be absent."""
    yield name, kind, optional
    for field, declared in field_types(kind).items():
        options = get_args(declared.plain) or (declared.plain,)
        for option in options:
            if is_dataclass(option) and isinstance(option, type):
                absent = optional or type(None) in options or is_tables(declared)
                yield from sections(option, f"{name}.{field}".lstrip("."), optional=absent)


def is_tables(declared: FieldType) -> bool:
    """Return True for a list of tables: one [[section]] for each of any number."""
    options = get_args(declared.plain)
    return get_origin(declared.plain) is tuple and is_dataclass(options[0])


def _take_apart(hint: Any) -> FieldType:
    if get_origin(hint) is not Annotated:
        return FieldType(hint, None, fleet_owned=False, layout_owned=False)
    plain, *notes = get_args(hint)
    bound = next((note for note in notes if isinstance(note, ValueRange)), None)
    return FieldType(
        plain,
        bound,
        fleet_owned=any(isinstance(note, FleetOwned) for note in notes),
        layout_owned=any(isinstance(note, LayoutOwned) for note in notes),
        later=any(isinstance(note, AddedLater) for note in notes),
    )


def read_section(
    section: type[_Section], table: TomlTable, problems: list[Problem], path: str = ""
) -> _Section | None:
    """The ``section`` that ``table`` describes; what is wrong with it is added to ``problems``.

    A field that cannot be read takes its default, so that rules which span fields can still be applied to the others.
    Returns ``None`` if a field without a default is missing or wrong.
    """
    known = field_types(section)
    values: dict[str, object] = {}
    for key, raw in table.items():
        where = f"{path}.{key}" if path else key
        if len(problems) >= _MOST_PROBLEMS:
            problems.append(Problem(where, "is not looked at, after so many mistakes", "mend those before"))
            break
        if key not in known:
            problems.append(unknown_field(where, key, known))
            continue
        value = _value(known[key].plain, raw, where, problems)
        bound = known[key].bound
        if bound is not None and isinstance(value, int | float) and not bound.holds(value):
            problems.append(Problem(where, f"{value!r} is out of range", f"must be {bound}"))
        elif value is not _INVALID:
            values[key] = value
    needed = [name for name in _without_default(section) if name not in values]
    for name in needed:
        if name not in table:
            problems.append(Problem(f"{path}.{name}" if path else name, "is missing", "add it"))
    return None if needed else section(**values)


def _without_default(section: type) -> Iterator[str]:
    for item in dataclasses.fields(section):
        if item.default is item.default_factory is dataclasses.MISSING:
            yield item.name


def unknown_field(where: str, key: str, known: Iterable[str]) -> Problem:
    """The mistake that there is no field ``key``, with the nearest of the ``known`` ones."""
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known here: {', '.join(sorted(known))}"
    return Problem(where, "there is no such field", hint)


def unknown_value(where: str, raw: object, allowed: Iterable[str]) -> Problem:
    """The mistake that ``raw`` is none of the ``allowed`` names, with the nearest of them."""
    nearest = difflib.get_close_matches(str(raw), allowed, n=1, cutoff=0.5)
    suffix = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return Problem(where, f"{raw!r} is not known", f"one of {', '.join(map(repr, allowed))}{suffix}")


def _is_utf8(text: str) -> bool:
    """Return False for text with a byte of the command line that is no UTF-8 (a lone surrogate)."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _value(kind: Any, raw: object, where: str, problems: list[Problem]) -> object:
    """``raw`` as a value of the type ``kind``, or ``_INVALID``."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        kinds = [option for option in get_args(kind) if option is not type(None)]
        return None if raw is None else _value(kinds[0], raw, where, problems)
    if is_dataclass(kind) and isinstance(kind, type):
        return _nested(kind, raw, where, problems)
    if origin is Literal:
        allowed = get_args(kind)
        if raw in allowed and isinstance(raw, str):
            return raw
        problems.append(unknown_value(where, raw, allowed))
        return _INVALID
    if origin is tuple:
        items = [raw] if isinstance(raw, str) else raw
        if not isinstance(items, list | tuple):
            return _ill_typed(where, raw, "a list", problems)
        read = [_value(get_args(kind)[0], item, f"{where}[{i}]", problems) for i, item in enumerate(items)]
        return _INVALID if _INVALID in read else tuple(read)
    if origin is Mapping:
        if not isinstance(raw, Mapping):
            return _ill_typed(where, raw, f"a table [{where}]", problems)
        by_name = {
            name: _value(get_args(kind)[1], item, f"{where}.{name}", problems) for name, item in raw.items()
        }
        return _INVALID if _INVALID in by_name.values() else by_name
    return _scalar(kind, raw, where, problems)


def _nested(kind: type, raw: object, where: str, problems: list[Problem]) -> object:
    if isinstance(raw, kind):
        return raw
    if not isinstance(raw, Mapping):
        return _ill_typed(where, raw, f"a table [{where}]", problems)
    found = read_section(kind, raw, problems, where)
    return _INVALID if found is None else found


def _scalar(kind: Any, raw: object, where: str, problems: list[Problem]) -> object:
    if kind is bool and isinstance(raw, bool):
        return raw
    if kind is int and isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if kind is int and isinstance(raw, float) and raw.is_integer() and abs(raw) <= _MOST_EXACT:
        return int(raw)  # TOML reads 1e6 and 132.0 as floats
    if kind is float and isinstance(raw, int | float) and not isinstance(raw, bool):
        # A whole number can be too large to be a float at all.
        if abs(raw) <= sys.float_info.max:
            return float(raw)
        return _ill_typed(where, raw, "a finite number", problems)
    if kind is str and isinstance(raw, str) and not _is_utf8(raw):
        problems.append(
            Problem(where, f"{raw!a} is not UTF-8", "write another value; of a path, rename the file")
        )
        return _INVALID
    if kind is str and isinstance(raw, str):
        return raw
    return _ill_typed(where, raw, _SCALARS[kind], problems)


def _ill_typed(where: str, raw: object, allowed: str, problems: list[Problem]) -> object:
    problems.append(Problem(where, f"{raw!r} is not {allowed}", f"must be {allowed}"))
    return _INVALID
