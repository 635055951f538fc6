"""Comparison of the present interfaces with their records in ``records/``.

A record is a flat JSON object: a name that users rely on, and what is promised of it, both as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "records"
COMMAND = "make contract"
REMEDY = (
    "Users rely on these names. Restore what was removed or changed. If the change is deliberate, record it with\n"
    f"`{COMMAND}`, commit the record, and add a line to CHANGELOG.md. Additions only need `{COMMAND}`."
)
NAMED_BY_DATA = frozenset(
    (
        *(
            "accelerators",
            "buckets_ns",
            "buckets_s",
            "counts",
            "documents",
            "excluded",
            "faults",
            "formats",
            "ledger",
        ),
        *("measures", "models", "numbers", "peers", "sources", "stages", "systems"),
    )
)
"""Keys of objects whose own keys are names of data: these are recorded as ``*``."""
MACHINE_FACTS = frozenset(("arithmetic", "code", "data", "numerics", "packages", "variables"))
"""Keys of objects whose contents depend on the machine, the checkout or installed software: only their type is recorded."""
MACHINE_LISTS = frozenset(("accelerators",))
"""Keys of arrays of which the same is true."""
_JSON_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_CONTAINERS = ("null", "array", "object")


def differences(recorded: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    """List what was removed, changed and added, one line each.

    A value may be absent on another machine: ``null`` agrees with any recorded type, and an empty array or object with recorded contents. The
    reverse is a difference, since nothing is promised of what was recorded as empty. A type agrees with a recorded union that contains it, and an
    integer with a recorded number.
    """
    lines = [
        f"removed: {name} ({recorded[name]})"
        for name in sorted(recorded.keys() - present.keys())
        if not (_absent_there(name, present) or _has_contents_too(name, recorded, present))
    ]
    lines += [
        f"changed: {name}: {recorded[name]} -> {present[name]}"
        for name in sorted(recorded.keys() & present.keys())
        if not _agree(recorded[name], present[name])
    ]
    lines += [
        f"added: {name} ({present[name]})"
        for name in sorted(present.keys() - recorded.keys())
        if not _is_empty_form(name, present, recorded)
    ]
    return lines


def read_record(name: str) -> dict[str, str]:
    """Return a record; an empty one if there is none."""
    path = RECORDS / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def write_record(name: str, facts: Mapping[str, str]) -> None:
    """Write a record, sorted, one line per name."""
    text = json.dumps(dict(sorted(facts.items())), indent=0, ensure_ascii=False)
    (RECORDS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def key_paths(value: Any, path: str = "") -> dict[str, str]:
    """Return the JSON type of every value below ``path``; items of an array share the path ``[]``.

    Containers with contents are left out, since the paths of their contents imply them.
    """
    types: dict[str, set[str]] = {}
    _collect(value, path, types)
    return {name: "|".join(sorted(_without_special_cases(kinds))) for name, kinds in types.items()}


def _without_special_cases(kinds: set[str]) -> set[str]:
    """Leave out ``null`` beside other types, and integers beside numbers."""
    return kinds - {"null"} - ({"integer"} if "number" in kinds else set()) or kinds


def _collect(value: Any, path: str, types: dict[str, set[str]]) -> None:
    last = path.rpartition(".")[2]
    if isinstance(value, dict) and value and last not in MACHINE_FACTS:
        by_data = last in NAMED_BY_DATA
        for key, part in value.items():
            _collect(part, f"{path}.{'*' if by_data else key}", types)
    elif isinstance(value, list) and value and last not in MACHINE_LISTS:
        for part in value:
            _collect(part, f"{path}[]", types)
    else:
        types.setdefault(path, set()).add(_type_name(value))


def _type_name(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    return names.get(type(value), "null")


def _absent_there(name: str, facts: Mapping[str, str]) -> bool:
    """Return True if ``facts`` has null or an empty container in place of ``name``, or of something that contains it."""
    ends = (place for place, sign in enumerate(name) if sign in ".[")
    return any(facts.get(name[:end]) in _CONTAINERS for end in ends)


def _is_empty_form(name: str, facts: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return True if ``name`` is null or empty in ``facts``, and has contents in ``other``."""
    return facts[name] in _CONTAINERS and any(path.startswith((f"{name}.", f"{name}[")) for path in other)


def _has_contents_too(name: str, recorded: Mapping[str, str], present: Mapping[str, str]) -> bool:
    """Return True if ``name`` was recorded both empty and with contents, and is never empty now."""
    return _is_empty_form(name, recorded, recorded) and _is_empty_form(name, recorded, present)


def _agree(recorded: str, present: str) -> bool:
    """Return True if two promises are equal, or the present JSON type is a case of the recorded one."""
    before, now = set(recorded.split("|")), set(present.split("|"))
    if not before | now <= _JSON_TYPES:
        return recorded == present
    if "number" in before:
        before |= {"integer"}
    return now <= before or now == {"null"}
