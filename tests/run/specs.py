"""Runs drawn at random, by the types and bounds with which their fields are declared."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin

from hypothesis import strategies as st

from phalanx.run.fields import ValueRange, field_types
from phalanx.run.spec import RunSpec


def run_specs() -> st.SearchStrategy[RunSpec]:
    """Runs whose every field is by itself valid; rules between fields may be broken. No preset or factory is named."""
    return _sections(RunSpec)


def _sections(section: type) -> st.SearchStrategy[Any]:
    declared = field_types(section)
    strategies = {
        item.name: st.just("")
        if item.name in ("preset", "factory", "factory_sha256")
        else values(declared[item.name].plain, declared[item.name].bound)
        for item in fields(section)
    }
    return st.builds(section, **strategies)


def values(kind: Any, bound: ValueRange | None) -> st.SearchStrategy[Any]:
    """Values that a field of this type and bound may have."""
    if isinstance(kind, types.UnionType):
        return st.none() | values(get_args(kind)[0], bound)
    if is_dataclass(kind) and isinstance(kind, type):
        return _sections(kind)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is tuple:
        return st.lists(values(get_args(kind)[0], None), max_size=3).map(tuple)
    return _scalars(kind, bound or ValueRange())


def _scalars(kind: Any, bound: ValueRange) -> st.SearchStrategy[Any]:
    low = bound.at_least if bound.at_least is not None else bound.above
    high = bound.at_most if bound.at_most is not None else bound.below
    if kind is bool:
        return st.booleans()
    if kind is int:
        # Not larger: rules between fields look for divisors of products of two.
        most = 2**20 if high is None else min(int(high), 2**20)
        return st.integers(None if low is None else int(low), most).filter(bound.holds)
    if kind is float:
        return st.floats(low, high, allow_nan=False, allow_infinity=False).filter(bound.holds)
    return st.text(st.characters(codec="utf-8"), max_size=10)


def replace_at(spec: RunSpec, path: str, value: object) -> RunSpec:
    """The run with one field replaced, for instance ``replace_at(spec, "model.vocab_size", 512)``."""
    section, name = path.split(".")
    return replace(spec, **{section: replace(getattr(spec, section), **{name: value})})
