"""The identity of a run: a hash over all fields that can affect the bits of the weights.

Fields marked ``FLEET`` in ``phalanx.run.spec`` are not included: the number of ranks, sharding and the frequency of saves belong to the fleet.
``train.loss_chunk`` and ``runtime.threads`` are included, because they determine the order in which numbers are added. So are the degrees of tensor,
context and experts. A run can continue with other degrees if its directory is named; nothing is lost, but its bits then depend on this history.

A run in lanes has the same bits for every tensor degree, and its experts are on the ranks that share a slot, so both degrees belong to the
fleet. So does the context degree in a run with context tiles. Fields marked ``LATER`` are omitted at their defaults, so that run files of older
versions keep their identity. A budget of recomputation is included if there is one: the compiler's fusions depend on it, and
fused results are not rounded in between.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import msgspec

from phalanx.run.fields import field_types
from phalanx.run.read import to_table
from phalanx.run.rules import ARITHMETIC
from phalanx.run.spec import RunSpec

_FLEET_IN_LANES = ("parallel.tensor", "parallel.expert")
_FLEET_IN_TILES = ("parallel.context", "parallel.context_mode", "parallel.expert")


def run_owned(spec: RunSpec) -> dict[str, object]:
    """Return all fields that belong to the run, by dotted path. Fields added later are left out at their default, so that
    identities stay.

    Degrees of axes whose bits are fixed by lanes or context tiles belong to the fleet.
    """
    # The preset's name is redundant to the resolved fields, and the factory's fields are unused without a factory.
    silent = (
        {"model.preset"} if spec.model.factory else {"model.preset", "model.factory", "model.factory_sha256"}
    )
    owned = {path: value for path, value in _walk(spec, "") if path not in silent}
    # A value left to the data is resolved before a run begins; without data it is false.
    owned["train.document_mask"] = bool(spec.train.document_mask)
    if spec.model.lanes:
        owned = {path: value for path, value in owned.items() if path not in _FLEET_IN_LANES}
    if spec.model.context_tiles:
        owned = {path: value for path, value in owned.items() if path not in _FLEET_IN_TILES}
    if spec.memory.recompute == "budget":
        owned["memory.recompute_budget"] = spec.memory.recompute_budget
    return owned


def _walk(section: Any, prefix: str) -> Iterator[tuple[str, object]]:
    """Yield the path and value of each field of the run below ``section``; those of the fleet, and later ones at their default, are
    left out."""
    owners = field_types(type(section))
    for item in fields(section):
        value = getattr(section, item.name)
        path = f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from _walk(value, f"{path}.")
        elif _is_tables(value):
            for table in value:
                yield from _walk(table, f"{path}.{table.name}.")
        elif not (owners[item.name].fleet_owned or (owners[item.name].later and value == item.default)):
            yield path, value


def _is_tables(value: object) -> bool:
    """Return True for a list of tables, such as [[data.sources]]: each is identified by its name, independent of their order."""
    return isinstance(value, tuple) and bool(value) and all(is_dataclass(item) for item in value)


def identity(spec: RunSpec) -> str:
    """Return the SHA-256 (hex) over the run's own fields, which is the same for every fleet."""
    owned = run_owned(spec)
    # Native numerics are omitted, as in versions without a choice. Portable numerics are included by their definition.
    if owned.pop("runtime.numerics", "") == "portable":
        owned["runtime.numerics"] = ARITHMETIC
    canonical = json.dumps(owned, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def layout_changes(first: RunSpec, second: RunSpec) -> list[str]:
    """Return the ``differences`` in layout fields, which only change how and where ranks compute, so the run can continue."""
    owners = {path: owner for spec in (first, second) for path, (_, owner) in all_fields(spec)}
    return [line for line in differences(first, second) if owners.get(line.split(":")[0]) == "layout"]


def differences(first: RunSpec, second: RunSpec) -> list[str]:
    """Return one line for each of the run's own fields in which two runs differ."""
    left, right = run_owned(first), run_owned(second)
    return [
        f"{path}: {left.get(path)!r} != {right.get(path)!r}"
        for path in sorted(left.keys() | right.keys())
        if left.get(path) != right.get(path)
    ]


class FieldDifference(msgspec.Struct, frozen=True):
    """A field of the run file with different values in two runs."""

    path: str
    first: object = msgspec.field(name="one")
    second: object = msgspec.field(name="other")
    owner: str
    """The owner of the field: "run", "layout" or "fleet"."""


def field_differences(first: RunSpec, second: RunSpec) -> list[FieldDifference]:
    """Return all fields in which two resolved run files differ: the run's first, then the layout's and the fleet's."""
    left, right = dict(all_fields(first)), dict(all_fields(second))
    differing = []
    for path in left.keys() | right.keys():
        (a, owner), (b, _) = left.get(path) or (None, right[path][1]), right.get(path) or (None, "")
        if a != b:
            differing.append(FieldDifference(path, a, b, owner))
    order = ("run", "layout", "fleet")
    return sorted(differing, key=lambda difference: (order.index(difference.owner), difference.path))


def all_fields(section: Any, prefix: str = "") -> Iterator[tuple[str, tuple[object, str]]]:
    """Yield the value and owner of each field, by dotted path."""
    owners = field_types(type(section))
    for item in fields(section):
        value = getattr(section, item.name)
        path = f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from all_fields(value, f"{path}.")
        elif _is_tables(value):
            for table in value:
                yield from all_fields(table, f"{path}.{table.name}.")
        else:
            yield path, (value, owners[item.name].owner)


# The fencing token of a fleet's processes: the start of a run to which they belong, and its resolved run file.
#
# Agents outlive a coordinator on another machine. So a restarted run can find processes of its previous start, with another attempt number and
# perhaps other fleet settings. A fencing token (M. Kleppmann, "How to do distributed locking", 2016) separates them. It increases with each start, it is
# journaled, and both sides of every control connection derive their message keys from it (``phalanx.fleet.control.transport``). So a coordinator and
# agents of different starts cannot communicate.
#
# ``phalanx.run.identity`` identifies runs without the fleet's fields. The token includes all fields.


@dataclass(frozen=True)
class FencingToken:
    """One start of a run."""

    attempt: int
    """Number of the start, under which its first epoch writes events and checkpoints."""
    run_file_sha256: str
    """SHA-256 (hex) over all fields of the resolved run file, including the fleet's."""

    def __str__(self) -> str:
        return f"attempt {self.attempt} with run file {self.run_file_sha256[:12]}"


def fencing_token(spec: RunSpec, attempt: int) -> FencingToken:
    """Return the token of start ``attempt`` of the resolved run ``spec``."""
    canonical = json.dumps(to_table(spec), sort_keys=True, separators=(",", ":"))
    return FencingToken(attempt, hashlib.sha256(canonical.encode()).hexdigest())
