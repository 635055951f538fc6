"""The comparison itself: what counts as a difference, and what may vary between machines."""

from __future__ import annotations

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


def test_a_value_that_is_null_or_empty_agrees_with_any_contents() -> None:
    full = {".a.b": "number", ".c[].d": "string", ".e": "number"}
    bare = {".a": "null", ".c": "array", ".e": "null"}
    assert differences(full, bare) == []
    assert differences(bare, full) == []


def test_another_json_type_is_a_difference_but_one_of_a_union_is_not() -> None:
    assert differences({".a": "number"}, {".a": "string"}) == ["changed: .a: number -> string"]
    assert differences({".a": "number|string"}, {".a": "string"}) == []


def test_key_paths_join_the_types_of_an_arrays_items() -> None:
    assert key_paths({"a": [{"b": 1}, {"b": None, "c": "x"}], "d": True}) == {
        ".a[].b": "number",
        ".a[].c": "string",
        ".d": "boolean",
    }


def test_keys_that_data_names_are_recorded_as_one() -> None:
    assert key_paths({"ledger": {"step.compute": 1.0, "eval": 2}}) == {".ledger.*": "number"}


def test_facts_of_a_machine_are_recorded_as_their_type_alone() -> None:
    assert key_paths({"packages": {"torch": "2.13.0"}}) == {".packages": "object"}
