"""Fields of a run file: their declarations, reading tables with them, and reports of mistakes.

A section of the run file is a frozen dataclass. A field's type and its ``Annotated`` bound define the allowed values, and ``FLEET`` its owner. The
string under a field is its documentation, which is read from the source, so that the reference manual and ``phalanx spec`` match the code.

A field's owner determines whether it may change between two starts of a run. Fields of the *run* determine the bits of the weights. Fields of
the *fleet* (number of ranks, sharding, frequency of saves) do not. Fields of the *layout* (how each matrix, sequence or layer is divided)
are in between: they determine the order in which numbers are added.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import functools
import inspect
import itertools
import math
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class ValueRange:
    """A closed or half-open range of allowed numbers."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Return True if ``value`` is in the range; a NaN never is."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
            and value == value
        )

    def __str__(self) -> str:
        """Return the limits as words, such as "at least 1 and below 2"."""
        parts = [
            ("at least", self.at_least),
            ("above", self.above),
            ("at most", self.at_most),
            ("below", self.below),
        ]
        return " and ".join(f"{word} {limit:g}" for word, limit in parts if limit is not None)


class FieldMark(enum.Enum):
    """Mark of a field of a run file, among the notes of its annotation."""

    FLEET = "fleet"
    """It may change between two starts of a run without changing its bits."""
    LAYOUT = "layout"
    """It affects the bits, but may change when a run is continued on request.

    Checkpoints load on any layout, so nothing is lost. The weights then depend on this history of layouts.
    """
    LATER = "later"
    """It was added after 0.1.0. At its default it is not part of a run's identity, which therefore does not change."""


FLEET, LAYOUT, LATER = FieldMark
POSITIVE = ValueRange(at_least=1)
NOT_NEGATIVE = ValueRange(at_least=0)
FRACTION = ValueRange(at_least=0, at_most=1)


@functools.cache
def field_docs(section: type) -> dict[str, str]:
    """Return the documentation string under each field of a dataclass, or of one that it inherits from, by field name."""
    docs: dict[str, str] = {}
    for parent in reversed([base for base in section.__bases__ if is_dataclass(base)]):
        docs |= field_docs(parent)
    tree = ast.parse(textwrap.dedent(inspect.getsource(section)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    for statement, following in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


# Mistakes in a user's file as values: path, problem, remedy.


@dataclass(frozen=True)
class Problem:
    """One mistake."""

    path: str
    """Dotted path of the field, for example ``optimizer.lr``; empty for the file."""
    finding: str
    """Description of the mistake."""
    remedy: str
    """Allowed values, or a change that resolves the mistake."""
    also: tuple[str, ...] = ()
    """Other fields on which the rule depends."""

    def __str__(self) -> str:
        return f"{self.path or 'file'}: {self.finding} ({self.remedy})"


class RunFileError(ValueError):
    """A run file has mistakes; the message lists all of them."""

    def __init__(self, path: Path, problems: Sequence[Problem]) -> None:
        self.path = path
        self.problems = tuple(problems)
        super().__init__(listing(str(path), problems))


def listing(place: str, problems: Sequence[Problem]) -> str:
    """Return all ``problems`` of the file or table ``place``, one per line."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f"{place}: {count}\n" + "\n".join(f"  {problem}" for problem in problems)


def divisors_near(number: int, target: int) -> str:
    """Return the up to four divisors of ``number`` closest to ``target``, in increasing order, as text with commas."""
    # For numbers that are too large to search, only small divisors and their cofactors.
    small = [d for d in range(1, min(math.isqrt(number), 1 << 16) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    return ", ".join(map(str, sorted(sorted(divisors, key=lambda d: abs(d - target))[:4])))


# Read a table of TOML or JSON into a dataclass by its fields' types.
#
# All mistakes are reported at once, each with the field's path, the problem, the allowed values and the nearest valid name. So
# nothing here raises at the first mistake: ``Problem`` values are collected while the table is read. It is used for run files
# and descriptions of hardware.
#
# A field may be a bool, number, string, ``Literal``, tuple, mapping by name, another dataclass, or an optional one of these. A
# field that the class does not have is a mistake, as is a missing field without a default.


TomlTable: TypeAlias = Mapping[str, object]
JsonObject: TypeAlias = dict[str, Any]
"""A JSON object, or a table of TOML, as plain Python values. The reader of a field must check its type."""
_Section = TypeVar("_Section")
_INVALID = object()
_MOST_PROBLEMS = 100
"""Maximum number of reported mistakes, because each needs a search for the nearest name."""
_MOST_EXACT = 2.0**53
"""Largest number up to which floats represent all integers exactly."""
_SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: 'a string in "quotes"'}


@dataclass(frozen=True)
class FieldType:
    """A field's type, separated from its annotations."""

    plain: Any
    bound: ValueRange | None = None
    owner: Literal["fleet", "layout", "run"] = "run"
    """The owner of the field, which may change it between two starts."""
    later: bool = False
    """True if the field is not part of a run's identity at its default."""


def field_types(section: type) -> Mapping[str, FieldType]:
    """Return the type, bound and owner of each field of a section."""
    return _field_types(section)


@functools.cache
def _field_types(section: type) -> Mapping[str, FieldType]:
    return {name: _take_apart(hint) for name, hint in get_type_hints(section, include_extras=True).items()}


def sections(kind: type, name: str = "", *, optional: bool = False) -> Iterator[tuple[str, type, bool]]:
    """Yield a section and, depth first, all sections within it: dotted name, class, and True if it or one around it
    may be absent or is a list of tables.
    """
    yield name, kind, optional
    for field, declared in field_types(kind).items():
        options = get_args(declared.plain) or (declared.plain,)
        for option in options:
            if is_dataclass(option) and isinstance(option, type):
                absent = optional or type(None) in options or is_tables(declared)
                yield from sections(option, f"{name}.{field}".lstrip("."), optional=absent)


def is_tables(declared: FieldType) -> bool:
    """Return True for a list of tables: any number of [[section]]."""
    options = get_args(declared.plain)
    return get_origin(declared.plain) is tuple and is_dataclass(options[0])


def _take_apart(hint: Any) -> FieldType:
    """Return a field's plain type, and from the notes of ``Annotated`` its range (``None`` without one), whether the
    fleet or the layout owns it, and whether it was added later.
    """
    if get_origin(hint) is not Annotated:
        return FieldType(hint)
    plain, *notes = get_args(hint)
    bound = next((note for note in notes if isinstance(note, ValueRange)), None)
    owner: Literal["fleet", "layout", "run"] = (
        "fleet" if FLEET in notes else "layout" if LAYOUT in notes else "run"
    )
    return FieldType(plain, bound, owner, LATER in notes)


def read_section(
    section: type[_Section],
    table: TomlTable,
    problems: list[Problem],
    path: str = "",
    root: type | None = None,
) -> _Section | None:
    """Read a ``section`` from ``table``; mistakes are added to ``problems``.

    ``root`` is the section at the top of the file, whose other sections are searched for a field that stands in the
    wrong one. Without it, ``section`` is the top itself.

    A field that cannot be read takes its default, so that rules for several fields can still be applied to the others.
    After ``_MOST_PROBLEMS`` mistakes the reading ends with one more problem, which names the next field; the fields not
    yet read take their defaults. Returns ``None`` if a field without a default is missing, wrong or not yet read.
    """
    types = field_types(section)
    values: dict[str, object] = {}
    for key, raw in table.items():
        field_path = f"{path}.{key}" if path else key
        if len(problems) >= _MOST_PROBLEMS:
            problems.append(
                Problem(field_path, "is not looked at, after so many mistakes", "mend those before")
            )
            break
        if key not in types:
            problems.append(
                unknown_field(
                    field_path, key, types, _paths_of_field(root or section, _NAMES_ELSEWHERE.get(key, key))
                )
            )
            continue
        value = _value(types[key].plain, raw, field_path, problems, root or section)
        bound = types[key].bound
        if bound is not None and isinstance(value, int | float) and not bound.holds(value):
            problems.append(Problem(field_path, f"{value!r} is out of range", f"must be {bound}"))
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


_NAMES_ELSEWHERE = {
    "d_model": "dim",
    "hidden_size": "dim",
    "n_embd": "dim",
    "num_hidden_layers": "layers",
    "num_layers": "layers",
    "n_layers": "layers",
    "n_layer": "layers",
    "num_attention_heads": "heads",
    "n_heads": "heads",
    "n_head": "heads",
    "num_key_value_heads": "kv_heads",
    "n_kv_heads": "kv_heads",
    "intermediate_size": "ffn_dim",
    "d_ff": "ffn_dim",
    "tie_word_embeddings": "tie_embeddings",
    "rms_norm_eps": "norm_eps",
    "learning_rate": "lr",
    "max_steps": "steps",
    "block_size": "seq_len",
    "max_position_embeddings": "seq_len",
}
"""Names of Hugging Face, nanoGPT, torchtitan and others -> fields of the run file."""


def unknown_field(path: str, key: str, fields: Iterable[str], elsewhere: Sequence[str] = ()) -> Problem:
    """Return the mistake for a field ``key`` that does not exist. The remedy is a field of this name ``elsewhere`` in the file, or else the
    nearest of the ``fields`` of its section."""
    nearest = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
    if elsewhere:
        hint = f"did you mean {' or '.join(elsewhere)}?"
    else:
        hint = f"did you mean {nearest[0]}?" if nearest else f"known here: {', '.join(sorted(fields))}"
    return Problem(path, "there is no such field", hint)


def _paths_of_field(root: type, key: str) -> list[str]:
    """Return the dotted paths of all fields named ``key`` in ``root`` and its sections."""
    return [f"{name}.{key}".lstrip(".") for name, section, _ in sections(root) if key in field_types(section)]


def unknown_value(path: str, raw: object, allowed: Iterable[str]) -> Problem:
    """Return the mistake for a value ``raw`` that is not in ``allowed``, with all of them and the nearest one as remedy."""
    names = list(allowed)
    nearest = difflib.get_close_matches(str(raw), names, n=1, cutoff=0.5)
    suffix = f"; did you mean {nearest[0]!r}?" if nearest else ""
    remedy = f"one of {', '.join(map(repr, names))}{suffix}" if names else "nothing here offers one"
    return Problem(path, f"{raw!r} is not known", remedy)


def _is_utf8(text: str) -> bool:
    """Return False for text from a command line with bytes that are not UTF-8 (lone surrogates)."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _value(kind: Any, raw: object, path: str, problems: list[Problem], root: type) -> object:
    """Return ``raw`` as a value of the type ``kind``; or ``_INVALID``, with what is wrong added to ``problems``.

    A single string counts as a list of one where a list is due. For a union, ``None`` is returned as it is; anything
    else is read as the first type that is not None.
    """
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        kinds = [option for option in get_args(kind) if option is not type(None)]
        return None if raw is None else _value(kinds[0], raw, path, problems, root)
    if is_dataclass(kind) and isinstance(kind, type):
        return _nested(kind, raw, path, problems, root)
    if origin is Literal:
        allowed = get_args(kind)
        if raw in allowed and isinstance(raw, str):
            return raw
        problems.append(unknown_value(path, raw, allowed))
        return _INVALID
    if origin is tuple:
        items = [raw] if isinstance(raw, str) else raw
        if not isinstance(items, list | tuple):
            return _ill_typed(path, raw, "a list", problems)
        read = [
            _value(get_args(kind)[0], item, f"{path}[{i}]", problems, root) for i, item in enumerate(items)
        ]
        return _INVALID if _INVALID in read else tuple(read)
    if origin is Mapping:
        if not isinstance(raw, Mapping):
            return _ill_typed(path, raw, f"a table [{path}]", problems)
        by_name = {
            name: _value(get_args(kind)[1], item, f"{path}.{name}", problems, root)
            for name, item in raw.items()
        }
        return _INVALID if _INVALID in by_name.values() else by_name
    return _scalar(kind, raw, path, problems)


def _nested(kind: type, raw: object, path: str, problems: list[Problem], root: type) -> object:
    """Return ``raw`` as a section; a table is read as one, and an instance of ``kind`` returned unchanged. Return
    ``_INVALID`` if that fails, with what is wrong added to ``problems``.
    """
    if isinstance(raw, kind):
        return raw
    if not isinstance(raw, Mapping):
        return _ill_typed(path, raw, f"a table [{path}]", problems)
    section = read_section(kind, raw, problems, path, root)
    return _INVALID if section is None else section


def _scalar(kind: Any, raw: object, path: str, problems: list[Problem]) -> object:
    """Return ``raw`` as a ``kind``: integral floats as integers, integers as floats. Return ``_INVALID``, with a
    problem added, for another type, a number too large, or text that is not UTF-8.
    """
    if kind is bool and isinstance(raw, bool):
        return raw
    if kind is int and isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if kind is int and isinstance(raw, float) and raw.is_integer() and abs(raw) <= _MOST_EXACT:
        return int(raw)  # TOML reads 1e6 and 132.0 as floats
    if kind is float and isinstance(raw, int | float) and not isinstance(raw, bool):
        # An integer can be too large for a float.
        if abs(raw) <= sys.float_info.max:
            return float(raw)
        return _ill_typed(path, raw, "a finite number", problems)
    if kind is str and isinstance(raw, str) and not _is_utf8(raw):
        problems.append(
            Problem(path, f"{raw!a} is not UTF-8", "write another value; of a path, rename the file")
        )
        return _INVALID
    if kind is str and isinstance(raw, str):
        return raw
    return _ill_typed(path, raw, _SCALARS[kind], problems)


def _ill_typed(path: str, raw: object, allowed: str, problems: list[Problem]) -> object:
    problems.append(Problem(path, f"{raw!r} is not {allowed}", f"must be {allowed}"))
    return _INVALID
