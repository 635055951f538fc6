"""The vocabulary of fields: bounds, and documentation that cannot drift from the code."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import fields, is_dataclass
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.run.fields import FRACTION, NOT_NEGATIVE, POSITIVE, ValueRange, field_docs, field_types
from phalanx.run.spec import ModelSpec, OptimizerSpec, RopeScalingSpec, RunSpec


def sections() -> list[type]:
    inner: list[type] = [kind.plain for kind in field_types(RunSpec).values() if is_dataclass(kind.plain)]
    return [RunSpec, RopeScalingSpec, *inner]


SECTIONS = pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)


@SECTIONS
def test_every_field_is_documented(section: type) -> None:
    docs = field_docs(section)
    # The sections of a run file are documented where they are defined.
    names = [item.name for item in fields(section) if not is_dataclass(field_types(section)[item.name].plain)]
    assert [name for name in names if not docs.get(name)] == []
    assert all(doc.endswith(".") for doc in docs.values())


@SECTIONS
def test_every_section_is_documented(section: type) -> None:
    assert section.__doc__
    assert not section.__doc__.startswith(section.__name__)


@SECTIONS
def test_every_default_lies_within_its_bound(section: type) -> None:
    default = section()
    for name, kind in field_types(section).items():
        if kind.bound is not None:
            assert kind.bound.holds(getattr(default, name)), name


@SECTIONS
def test_every_number_has_a_bound(section: type) -> None:
    unbounded = [
        name for name, kind in field_types(section).items() if kind.plain in (int, float) and not kind.bound
    ]
    assert unbounded == []


def test_documentation_is_one_line_for_any_layout_in_the_source() -> None:
    assert field_docs(ModelSpec)["layers"] == "Number of transformer blocks."
    assert all("\n" not in doc for doc in field_docs(OptimizerSpec).values())


def test_an_optional_section_is_distinguished_from_its_absence() -> None:
    assert get_args(field_types(ModelSpec)["rope_scaling"].plain) == (RopeScalingSpec, type(None))


limits = st.none() | st.floats(-10, 10)


@given(limits, limits, limits, limits, st.floats(-20, 20))
def test_a_bound_holds_for_what_satisfies_each_of_its_limits(
    at_least: float | None, above: float | None, at_most: float | None, below: float | None, value: float
) -> None:
    expected = (
        value >= (-math.inf if at_least is None else at_least)
        and value > (-math.inf if above is None else above)
        and value <= (math.inf if at_most is None else at_most)
        and value < (math.inf if below is None else below)
    )
    assert ValueRange(at_least, above, at_most, below).holds(value) == expected


@pytest.mark.parametrize("bound", [POSITIVE, NOT_NEGATIVE, FRACTION, ValueRange()])
def test_no_bound_holds_for_what_is_not_a_number(bound: ValueRange) -> None:
    assert not bound.holds(math.nan)


def test_a_bound_reads_as_a_sentence() -> None:
    assert str(ValueRange(at_least=0, below=1)) == "at least 0 and below 1"
    assert str(ValueRange(above=0.5)) == "above 0.5"


def test_reading_and_counting_do_without_torch() -> None:
    code = (
        "import sys, phalanx.run.read, phalanx.run.identity, phalanx.run.rules, phalanx.model.facts.presets, "
        "phalanx.model.facts.shape; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
