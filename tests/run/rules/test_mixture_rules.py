"""The rules of sources and stages in a run file, and how they are read, written and overridden."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from phalanx.run.fields import RunFileError
from phalanx.run.identity import differences, identity
from phalanx.run.read import read_run, read_table, to_table
from phalanx.run.rules import mixture_problems
from phalanx.run.spec import DataSpec, RunSpec, SourceSpec

FILE = """
[data]
stages = [0, 90]
[[data.sources]]
name = "web"
path = "sets/web"
weights = [0.82, 0.3]
use = [0.0, 0.95]
[[data.sources]]
name = "code"
path = "sets/code"
weights = [0.18, 0.7]
epochs = 3
"""
WEB = SourceSpec("web", "sets/web", (0.82, 0.3), (0.0, 0.95))
CODE = SourceSpec("code", "sets/code", (0.18, 0.7), epochs=3.0)
MIXED = DataSpec(stages=(0, 90), sources=(WEB, CODE))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def test_sources_are_read_from_an_array_of_tables(file: Path) -> None:
    assert read_run(file, {}).data == MIXED


def test_a_run_that_is_written_out_is_read_as_the_same(file: Path) -> None:
    spec = read_run(file, {})
    written = tomllib.loads(tomli_w.dumps(to_table(spec)))
    assert read_table(written, {}, [], file) == spec


def test_a_source_is_overridden_by_its_name(file: Path) -> None:
    spec = read_run(file, {}, ["data.sources.code.weights=[1, 2]", "data.sources.web.path=elsewhere"])
    assert spec.data.sources == (replace(WEB, path="elsewhere"), replace(CODE, weights=(1.0, 2.0)))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.sources.cod.epochs=1", "did you mean 'code'"),
        ("data.sources.code=1", "data.sources.NAME.field=value"),
        ("data.sources.code.epoch=1", "did you mean epochs"),
        ("data.path=sets/all", "leave out one of the two"),
        ("data.stages=[0, 5, 9]", "weights of 'web' has 2 entries, and there are 3 stages"),
    ],
)
def test_an_override_that_does_not_fit_is_refused(file: Path, override: str, says: str) -> None:
    with pytest.raises(RunFileError, match=says.replace("[", r"\[")):
        read_run(file, {}, [override])


def test_sources_that_fit_are_not_refused() -> None:
    assert not list(mixture_problems(MIXED))
    assert not list(mixture_problems(DataSpec(path="alone", corpus=("x",))))


@pytest.mark.parametrize(
    ("data", "path", "says"),
    [
        (DataSpec(stages=(0, 5)), "data.stages", "no sources"),
        (replace(MIXED, path="both"), "data.path", "one or the other"),
        (replace(MIXED, corpus=("text",)), "data.corpus", "not for data.sources"),
        (replace(MIXED, stages=(1, 90)), "data.stages", "no stages"),
        (replace(MIXED, stages=(0, 0)), "data.stages", "no stages"),
        (replace(MIXED, sources=(WEB, replace(CODE, name="web"))), "data.sources[1].name", "two sources"),
        (replace(MIXED, sources=(WEB, replace(CODE, name="a.b"))), "data.sources[1].name", "no name"),
        (replace(MIXED, sources=(WEB, replace(CODE, path=""))), "data.sources[1].path", "missing"),
        (replace(MIXED, stages=()), "data.sources[0].weights", "has 2 entries, and there is 1 stage"),
        (
            replace(MIXED, sources=(replace(WEB, weights=(-1.0, 1.0)),)),
            "data.sources[0].weights",
            "no weights",
        ),
        (replace(MIXED, sources=(replace(WEB, weights=(1.0, 0.0)),)), "data.sources", "after step 90 are 0"),
        (replace(MIXED, sources=(replace(WEB, use=(0.5, 0.5)), CODE)), "data.sources[0].use", "no part"),
        (replace(MIXED, sources=(replace(WEB, use=(0.5,)), CODE)), "data.sources[0].use", "no part"),
    ],
)
def test_what_cannot_be_is_refused_by_field(data: DataSpec, path: str, says: str) -> None:
    problems = list(mixture_problems(data))
    assert problems[0].path == path
    assert says in problems[0].finding


@pytest.mark.parametrize(
    "other",
    [
        replace(MIXED, stages=(0, 91)),
        replace(MIXED, sources=(WEB, replace(CODE, weights=(0.2, 0.7)))),
        replace(MIXED, sources=(WEB, replace(CODE, use=(0.0, 0.5)))),
        replace(MIXED, sources=(WEB, replace(CODE, name="programs"))),
        replace(MIXED, sources=(WEB,)),
        DataSpec(),
    ],
)
def test_fields_that_change_the_drawn_samples_belong_to_the_run(other: DataSpec) -> None:
    mixed, changed = RunSpec(data=MIXED), RunSpec(data=other)
    assert identity(mixed) != identity(changed)
    assert all(line.startswith("data.s") for line in differences(mixed, changed))


@pytest.mark.parametrize(
    "other",
    [
        replace(MIXED, sources=(CODE, WEB)),
        replace(MIXED, sources=(WEB, replace(CODE, path="copy"))),
        replace(MIXED, sources=(WEB, replace(CODE, epochs=0.0))),
    ],
)
def test_paths_order_and_limits_of_sources_belong_to_the_fleet(other: DataSpec) -> None:
    assert identity(RunSpec(data=MIXED)) == identity(RunSpec(data=other))
    assert differences(RunSpec(data=MIXED), RunSpec(data=other)) == []
