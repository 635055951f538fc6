"""The comparison itself: what counts as a difference, and what may vary between machines."""

from __future__ import annotations

import pytest

from contract.recorded import differences, key_paths


def test_a_removed_a_changed_and_an_added_name_are_differences() -> None:
    recorded = {"train --json": "flag", "train --ranks": "INTEGER"}
    present = {"train --ranks": "TEXT", "train --nodes": "INTEGER"}
    assert differences(recorded, present) == [
        "removed: train --json (flag)",
        "changed: train --ranks: INTEGER -> TEXT",
        "added: train --nodes (INTEGER)",
    ]


def test_equal_records_have_no_differences() -> None:
    assert differences({"a": "number"}, {"a": "number"}) == []


def test_a_value_may_be_null_or_empty_where_contents_are_recorded() -> None:
    full = {".a.b": "number", ".c[].d": "string", ".e": "number"}
    bare = {".a": "null", ".c": "array", ".e": "null"}
    assert differences(full, bare) == []


@pytest.mark.parametrize(
    ("recorded", "present"),
    [
        ({}, {"b": 1}),
        ([], [1]),
        ([], [{"b": 1}]),
        (None, {"b": 1}),
        (None, 1),
        (None, []),
        ({}, []),
        ({}, 1),
    ],
)
def test_a_value_that_was_recorded_as_null_or_empty_agrees_with_its_like_alone(
    recorded: object, present: object
) -> None:
    before, now = key_paths({"a": recorded}), key_paths({"a": present})
    assert differences(before, before) == []
    assert differences(before, now) != []


def test_an_item_that_was_recorded_empty_beside_one_with_contents_may_have_contents() -> None:
    recorded = key_paths([{"a": []}, {"a": [1]}])
    assert differences(recorded, key_paths([{"a": [2]}])) == []
    assert differences(recorded, key_paths([{"a": []}])) == []


def test_another_json_type_is_a_difference_but_one_of_a_union_is_not() -> None:
    assert differences({".a": "number"}, {".a": "string"}) == ["changed: .a: number -> string"]
    assert differences({".a": "number|string"}, {".a": "string"}) == []


@pytest.mark.parametrize(
    ("recorded", "present"),
    [(1, 1.5), (1, "1"), (1, True), (1.5, "1.5"), ("x", 1)],
)
def test_a_type_that_became_wider_is_a_difference(recorded: object, present: object) -> None:
    before = key_paths([{"a": recorded}])
    assert differences(before, key_paths([{"a": recorded}, {"a": present}])) != []


def test_an_integer_may_stand_where_a_number_is_recorded() -> None:
    assert differences(key_paths({"a": 1.5}), key_paths({"a": 1})) == []


def test_key_paths_join_the_types_of_an_arrays_items() -> None:
    assert key_paths({"a": [{"b": 1}, {"b": None, "c": "x"}], "d": True}) == {
        ".a[].b": "integer",
        ".a[].c": "string",
        ".d": "boolean",
    }


def test_keys_that_data_names_are_recorded_as_one() -> None:
    assert key_paths({"ledger": {"step.compute": 1.0, "eval": 2}}) == {".ledger.*": "number"}


def test_facts_of_a_machine_are_recorded_as_their_type_alone() -> None:
    assert key_paths({"packages": {"torch": "2.13.0"}}) == {".packages": "object"}
    assert key_paths({"accelerators": [{"name": "H100"}]}) == {".accelerators": "array"}
