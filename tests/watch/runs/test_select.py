"""Conditions on runs, and their order."""

from __future__ import annotations

import re

import pytest

from phalanx_watch.runs.index import (
    COLUMNS,
    HEADINGS,
    RunIndex,
    RunRow,
    SelectionError,
    ordered,
    read_condition,
    read_conditions,
    selected,
)
from phalanx_watch.runs.row import RunLabels, write_labels
from watch.runs.some_runs import make_run


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[RunRow]:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "short", steps=3, of=6, ending="stopped")
    make_run(folder / "long", steps=6, lr=2e-3)
    make_run(folder / "empty", steps=0, of=6, ending="")
    write_labels(folder / "long", RunLabels(("good", "base"), "for the paper"))
    return RunIndex([folder], folder / "cache").rows()


@pytest.mark.parametrize(
    ("condition", "names"),
    [
        ("loss<3.5", ["long"]),
        ("loss >= 3.5", ["short"]),
        ("step=3", ["short"]),
        ("state!=finished", ["empty", "short"]),
        ("state = FINISHED", ["long"]),
        ("note~paper", ["long"]),
        ("name~o", ["long", "short"]),
        ("optimizer.lr=0.002", ["long"]),
        ("optimizer.lr<2e-3", ["empty", "short"]),
        ("model.moe.experts=8", []),
    ],
)
def test_a_condition_chooses_runs(rows: list[RunRow], condition: str, names: list[str]) -> None:
    assert sorted(row.name for row in selected(rows, [read_condition(condition)], [])) == names


def test_several_conditions_in_one_text_have_and_between_them() -> None:
    conditions = [read_condition(text) for text in ("loss<2", "optimizer.lr = 0.001", "note~cats and dogs")]
    assert read_conditions("loss<2 and optimizer.lr = 0.001 and note~cats and dogs") == conditions
    assert read_conditions("  ") == []


def test_all_tags_must_be_there(rows: list[RunRow]) -> None:
    assert [row.name for row in selected(rows, [], ["good", "base"])] == ["long"]
    assert selected(rows, [], ["good", "other"]) == []


def test_runs_are_ordered_by_a_column_and_those_without_a_value_come_last(rows: list[RunRow]) -> None:
    assert [row.name for row in ordered(rows, "loss", falling=False)] == ["long", "short", "empty"]
    assert [row.name for row in ordered(rows, "loss", falling=True)] == ["short", "long", "empty"]
    assert next(row.name for row in ordered(rows, "optimizer.lr", falling=True)) == "long"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss", "is no condition"),
        ("los<2", "did you mean loss"),
        ("<2", "no condition"),
        ("no.such.field=1", "no field 'no.such.field'; phalanx spec lists all"),
        ("optimizer.lrr<1", "did you mean optimizer.lr?"),
        ("loss<two", "compares numbers, and 'two' is none"),
        ("name<3", "name is no number: use = != or ~"),
        ("state=finishd", "there are running, finished"),
    ],
)
def test_a_condition_that_cannot_be_read_is_refused_with_the_nearest_choices(text: str, message: str) -> None:
    with pytest.raises(SelectionError, match=re.escape(message)):
        read_condition(text)


@pytest.mark.parametrize("name", HEADINGS)
def test_the_heading_of_a_column_is_a_name_of_it(name: str) -> None:
    assert name in COLUMNS
    assert read_condition(f"{HEADINGS[name]} ~ 3") == read_condition(f"{name}~3")
