"""Reads a run file into a ``RunSpec`` and reports every mistake at once.

A user who has made three mistakes should see three, each with the path of the field, what was found, what
is allowed and the nearest valid name, not one per attempt. So nothing here raises at the first problem:
``Problem`` values are collected while the table is walked along the dataclasses' types, the rules that span
fields are applied to whatever could be read, and one ``RunFileError`` carries them all.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from phalanx.run.check import check
from phalanx.run.fields import Bound, FleetOwned, LayoutOwned
from phalanx.run.problems import Problem, RunFileError
from phalanx.run.spec import ModelSpec, RunSpec

Table = Mapping[str, object]
_INVALID = object()


@dataclass(frozen=True)
class FieldType:
    """A field's type with its annotations taken apart."""

    plain: Any
    bound: Bound | None
    fleet_owned: bool
    layout_owned: bool

    @property
    def owner(self) -> str:
        """Who may change the field: "fleet", "layout" or "run"."""
        return "fleet" if self.fleet_owned else "layout" if self.layout_owned else "run"


def field_types(section: type) -> dict[str, FieldType]:
    """Each field of a section with its plain type, its bound and its owner."""
    return {name: _take_apart(hint) for name, hint in get_type_hints(section, include_extras=True).items()}


def _take_apart(hint: Any) -> FieldType:
    if get_origin(hint) is not Annotated:
        return FieldType(hint, None, fleet_owned=False, layout_owned=False)
    plain, *notes = get_args(hint)
    bound = next((note for note in notes if isinstance(note, Bound)), None)
    return FieldType(
        plain,
        bound,
        fleet_owned=any(isinstance(note, FleetOwned) for note in notes),
        layout_owned=any(isinstance(note, LayoutOwned) for note in notes),
    )


def read_run(path: Path, presets: Mapping[str, ModelSpec], overrides: Sequence[str] = ()) -> RunSpec:
    """The run that a TOML file and ``section.field=value`` overrides describe.

    Raises ``RunFileError`` with every problem found.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFileError(
            path, [Problem("", f"there is no file {path}", "give the path of a run file")]
        ) from None
    except IsADirectoryError:
        raise RunFileError(
            path, [Problem("", f"{path} is a directory", "give the path of a run file")]
        ) from None
    except OSError as error:
        found = f"cannot be read: {error.strerror}"
        raise RunFileError(path, [Problem("", found, "give the path of a file that you may read")]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RunFileError(path, [Problem("", f"not valid TOML: {error}", "see https://toml.io")]) from None
    problems: list[Problem] = []
    for override in overrides:
        problems += _apply_override(table, override)
    spec, more = spec_from_table(table, presets)
    problems += more
    if problems or spec is None:
        raise RunFileError(path, problems)
    return spec


def spec_from_table(table: Table, presets: Mapping[str, ModelSpec]) -> tuple[RunSpec | None, list[Problem]]:
    """The run that a parsed table describes, and all that is wrong with it."""
    problems: list[Problem] = []
    table = {**table, "model": _expand_preset(table.get("model", {}), presets, problems)}
    spec = _section(RunSpec, table, "", problems)
    # Rules that span fields are applied even when single fields are wrong (their defaults stand in), and
    # then only those are reported that do not concern a field already named.
    named = {problem.path for problem in problems}
    problems += [problem for problem in check(spec) if not named & {problem.path, *problem.also}]
    return (None if problems else spec), problems


def _expand_preset(model: object, presets: Mapping[str, ModelSpec], problems: list[Problem]) -> object:
    if not isinstance(model, Mapping) or not model.get("preset"):
        return model
    name = model["preset"]
    if not isinstance(name, str) or name not in presets:
        problems.append(_unknown_value("model.preset", name, presets))
        return {key: value for key, value in model.items() if key != "preset"}
    return _merge(to_table(presets[name]), model)


def _merge(base: Table, over: Table) -> dict[str, object]:
    """``base`` with the fields of ``over``, table by table."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = (
            _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def _section(section: type, table: Table, path: str, problems: list[Problem]) -> Any:
    known = field_types(section)
    values: dict[str, object] = {}
    for key, raw in table.items():
        where = f"{path}.{key}" if path else key
        if key not in known:
            problems.append(_unknown_field(where, key, known))
            continue
        value = _value(known[key].plain, raw, where, problems)
        if value is _INVALID:
            continue
        bound = known[key].bound
        if bound is not None and isinstance(value, int | float) and not bound.holds(value):
            problems.append(Problem(where, f"{value!r} is out of range", f"must be {bound}"))
            continue
        values[key] = value
    return section(**values)


def _value(kind: Any, raw: object, where: str, problems: list[Problem]) -> object:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        kinds = [option for option in get_args(kind) if option is not type(None)]
        return None if raw is None else _value(kinds[0], raw, where, problems)
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(raw, Mapping):
            return _ill_typed(where, raw, f"a table [{where}]", problems)
        return _section(kind, raw, where, problems)
    if origin is Literal:
        allowed = get_args(kind)
        if raw in allowed and isinstance(raw, str):
            return raw
        problems.append(_unknown_value(where, raw, allowed))
        return _INVALID
    if origin is tuple:
        items = [raw] if isinstance(raw, str) else raw
        if not isinstance(items, list | tuple):
            return _ill_typed(where, raw, "a list", problems)
        read = [_value(get_args(kind)[0], item, f"{where}[{i}]", problems) for i, item in enumerate(items)]
        return _INVALID if _INVALID in read else tuple(read)
    return _scalar(kind, raw, where, problems)


def _scalar(kind: Any, raw: object, where: str, problems: list[Problem]) -> object:
    if kind is bool and isinstance(raw, bool):
        return raw
    if kind is int and isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if kind is float and isinstance(raw, int | float) and not isinstance(raw, bool):
        # A whole number can be too large to be a float at all.
        if abs(raw) <= sys.float_info.max:
            return float(raw)
        return _ill_typed(where, raw, "a finite number", problems)
    if kind is str and isinstance(raw, str):
        return raw
    names = {bool: "true or false", int: "a whole number", float: "a number", str: 'a string in "quotes"'}
    return _ill_typed(where, raw, names[kind], problems)


def _ill_typed(where: str, raw: object, allowed: str, problems: list[Problem]) -> object:
    problems.append(Problem(where, f"{raw!r} is not {allowed}", f"must be {allowed}"))
    return _INVALID


def _unknown_field(where: str, key: str, known: Iterable[str]) -> Problem:
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known here: {', '.join(sorted(known))}"
    return Problem(where, "there is no such field", hint)


def _unknown_value(where: str, raw: object, allowed: Iterable[str]) -> Problem:
    nearest = difflib.get_close_matches(str(raw), allowed, n=1, cutoff=0.5)
    suffix = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return Problem(where, f"{raw!r} is not known", f"one of {', '.join(map(repr, allowed))}{suffix}")


def _apply_override(table: dict[str, Any], override: str) -> list[Problem]:
    path, equals, text = override.partition("=")
    if not equals or not path.strip():
        return [Problem(override, "not of the form section.field=value", "for example optimizer.lr=3e-4")]
    *sections, last = path.strip().split(".")
    place = table
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            return [Problem(path, f"{section} is not a table", "give section.field=value")]
    place[last] = _parse_value(text.strip())
    return []


def _parse_value(text: str) -> object:
    """A value as TOML writes it; what TOML cannot read is a bare string, so that quotes may be left out."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def to_table(section: Any) -> dict[str, Any]:
    """A section as a plain table, ready for TOML: nothing that is ``None``, tuples as lists."""
    table: dict[str, Any] = {}
    for item in fields(section):
        value = getattr(section, item.name)
        if value is None:
            continue
        if is_dataclass(value):
            value = to_table(value)
        table[item.name] = list(value) if isinstance(value, tuple) else value
    return table


def replace_at(spec: RunSpec, path: str, value: object) -> RunSpec:
    """The run with one field replaced, for instance ``replace_at(spec, "model.vocab_size", 512)``."""
    section, name = path.split(".")
    return dataclasses.replace(
        spec, **{section: dataclasses.replace(getattr(spec, section), **{name: value})}
    )
