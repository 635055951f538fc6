"""The identity of a run: a hash over every field that can reach the bits of the weights.

Fields marked ``FLEET`` in ``phalanx.run.spec`` are left out: how many ranks there are, how the model is
sharded over them and how often it is saved is the fleet's business. ``train.loss_chunk`` and
``runtime.threads`` are in, because they decide in which order numbers are added; so are the degrees of tensor, context and experts. Under
other degrees a run can go on all the same, when its directory is named: nothing is lost, but its bits are then those of this
history. A run in lanes has the same bits for every tensor degree, and its experts lie on the ranks that share a slot: there both
degrees are the fleet's; so is the context degree where the run cuts its sequences into context tiles. Fields marked ``LATER`` are left out at their defaults, so that a run file of an older version keeps its identity. A budget of
recomputation is in where there is one: by it the compiler chooses what it fuses, and what is fused is not rounded in between.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from phalanx.run.fields import field_types
from phalanx.run.read import to_table
from phalanx.run.rules import ARITHMETIC
from phalanx.run.spec import RunSpec

_FLEET_IN_LANES = ("parallel.tensor", "parallel.expert")
_FLEET_IN_TILES = ("parallel.context", "parallel.context_mode", "parallel.expert")


def run_owned(spec: RunSpec) -> dict[str, object]:
    """Every field that belongs to the run, by dotted path."""
    # The preset's name says nothing that the resolved fields do not, and without a factory its fields say nothing.
    silent = (
        {"model.preset"} if spec.model.factory else {"model.preset", "model.factory", "model.factory_sha256"}
    )
    owned = {path: value for path, value in _walk(spec, "") if path not in silent}
    # What is left to the data is settled before a run begins; without data it says what it always said.
    owned["train.document_mask"] = bool(spec.train.document_mask)
    if spec.model.lanes:
        owned = {path: value for path, value in owned.items() if path not in _FLEET_IN_LANES}
    if spec.model.context_tiles:
        owned = {path: value for path, value in owned.items() if path not in _FLEET_IN_TILES}
    if spec.memory.recompute == "budget":
        owned["memory.recompute_budget"] = spec.memory.recompute_budget
    return owned


def _walk(section: Any, prefix: str) -> Iterator[tuple[str, object]]:
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
    """True for a list of tables, as [[data.sources]]: each counts under its name, whatever their order in the file."""
    return isinstance(value, tuple) and bool(value) and all(is_dataclass(item) for item in value)


def identity(spec: RunSpec) -> str:
    """SHA-256 (hex) over the run's own fields, the same for every fleet that the run is computed on."""
    owned = run_owned(spec)
    # Native numerics say nothing, as in runs from before there was a choice; portable ones are those of a definition.
    if owned.pop("runtime.numerics", "") == "portable":
        owned["runtime.numerics"] = ARITHMETIC
    canonical = json.dumps(owned, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def layout_changes(spec: RunSpec, other: RunSpec) -> list[str]:
    """Return the ``differences`` that only change how and where ranks compute the parts of the model, so that the run can resume."""
    owners = {path: owner for run in (spec, other) for path, (_, owner) in all_fields(run)}
    return [line for line in differences(spec, other) if owners.get(line.split(":")[0]) == "layout"]


def differences(spec: RunSpec, other: RunSpec) -> list[str]:
    """One line for each of the run's own fields in which two runs differ."""
    left, right = run_owned(spec), run_owned(other)
    return [
        f"{path}: {left.get(path)!r} != {right.get(path)!r}"
        for path in sorted(left.keys() | right.keys())
        if left.get(path) != right.get(path)
    ]


@dataclass(frozen=True)
class FieldDifference:
    """A field of the run file that has different values in two runs."""

    path: str
    one: object
    other: object
    owner: str
    """The owner of the field: "run", "layout" or "fleet"."""


def field_differences(spec: RunSpec, other: RunSpec) -> list[FieldDifference]:
    """Every field in which two resolved run files differ, the fleet's too; those of the run first, then the layout's."""
    left, right = dict(all_fields(spec)), dict(all_fields(other))
    listed = []
    for path in left.keys() | right.keys():
        (a, owner), (b, _) = left.get(path) or (None, right[path][1]), right.get(path) or (None, "")
        if a != b:
            listed.append(FieldDifference(path, a, b, owner))
    order = ("run", "layout", "fleet")
    return sorted(listed, key=lambda difference: (order.index(difference.owner), difference.path))


def all_fields(section: Any, prefix: str = "") -> Iterator[tuple[str, tuple[object, str]]]:
    """The value and owner of each field, by dotted path."""
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


# The fencing token of a fleet's processes: which start of a run they belong to, and the run file that it resolved.
#
# Agents outlive a coordinator on another machine, so a run that is started again can find processes of its last start, with another
# attempt number and perhaps other settings of the fleet. A fencing token (M. Kleppmann, "How to do distributed locking", 2016) tells
# them apart: it rises with each start, it is journaled, and both sides of every control connection derive the keys of their messages from
# it (``phalanx.fleet.control.transport``). So a coordinator and agents of different starts cannot say a word to each other.
#
# ``phalanx.run.identity`` tells runs apart, and leaves out what belongs to the fleet. This leaves out nothing.


@dataclass(frozen=True)
class FencingToken:
    """One start of a run."""

    attempt: int
    """The number of the start; its first epoch writes events and checkpoints under it."""
    run_file_sha256: str
    """SHA-256 (hex) over every field of the resolved run file, those of the fleet included."""

    def __str__(self) -> str:
        return f"attempt {self.attempt} with run file {self.run_file_sha256[:12]}"


def fencing_token(spec: RunSpec, attempt: int) -> FencingToken:
    """The token of the start ``attempt`` of the resolved run ``spec``."""
    canonical = json.dumps(to_table(spec), sort_keys=True, separators=(",", ":"))
    return FencingToken(attempt, hashlib.sha256(canonical.encode()).hexdigest())
