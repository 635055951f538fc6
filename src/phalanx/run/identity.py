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
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec

from phalanx.run.directory.paths import (
    RunDirectory,
    RunDirectoryError,
    read_resolved,
    step_of,
)
from phalanx.run.fields import FieldType, Problem, field_types
from phalanx.run.read import to_table
from phalanx.run.rules import ARITHMETIC, stages_of
from phalanx.run.spec import RunSpec

FIRST_ARITHMETIC = "portable 1"
"""Definition of portable numerics in runs whose record names none."""
_FLEET_IN_LANES = ("parallel.tensor", "parallel.expert")
_FLEET_IN_TILES = ("parallel.context", "parallel.context_mode", "parallel.expert")


def run_owned(spec: RunSpec) -> dict[str, object]:
    """Return all fields that belong to the run, by dotted path. Fields added later are left out at their default, so
    that identities stay.

    Degrees of axes whose bits are fixed by lanes or context tiles belong to the fleet. Preset names and unused
    factory fields are left out.
    """
    # The preset's name is redundant to the resolved fields, and the factory's fields are unused without a factory.
    silent = (
        {"model.preset"} if spec.model.factory else {"model.preset", "model.factory", "model.factory_sha256"}
    )
    owned = {
        path: value
        for path, value, field, is_default in _walk(spec)
        # The fleet's fields are left out, and later ones at their default.
        if not (path in silent or field.owner == "fleet" or (field.later and is_default))
    }
    # A value left to the data is resolved before a run begins; without data it is false.
    owned["train.document_mask"] = bool(spec.train.document_mask)
    if spec.model.lanes:
        owned = {path: value for path, value in owned.items() if path not in _FLEET_IN_LANES}
    if spec.model.context_tiles:
        owned = {path: value for path, value in owned.items() if path not in _FLEET_IN_TILES}
    if spec.memory.recompute == "budget":
        owned["memory.recompute_budget"] = spec.memory.recompute_budget
    return owned


def all_fields(spec: RunSpec) -> Iterator[tuple[str, tuple[object, str]]]:
    """Yield the value and owner of each field, by dotted path."""
    return ((path, (value, field.owner)) for path, value, field, _ in _walk(spec))


def _walk(section: Any, prefix: str = "") -> Iterator[tuple[str, object, FieldType, bool]]:
    """Yield path, value and declaration of each field below ``section``, depth first, and whether it has the default.
    Entries of a list of tables have their name in the path.
    """
    declared = field_types(type(section))
    for item in fields(section):
        value = getattr(section, item.name)
        path = f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from _walk(value, f"{path}.")
        elif _is_tables(value):
            for table in value:
                yield from _walk(table, f"{path}.{table.name}.")
        else:
            yield path, value, declared[item.name], value == item.default


def _is_tables(value: object) -> bool:
    """Return True for a list of tables, such as [[data.sources]]: each is identified by its name, independent of their order."""
    return isinstance(value, tuple) and bool(value) and all(is_dataclass(item) for item in value)


def identity(spec: RunSpec, arithmetic: str = ARITHMETIC) -> str:
    """Return the SHA-256 (hex) over the run's own fields, which is the same for every fleet. ``arithmetic``, the
    definition of portable numerics, is included only for portable runs.
    """
    owned = run_owned(spec)
    # Native numerics are omitted, as in versions without a choice. Portable numerics are included by their definition.
    if owned.pop("runtime.numerics", "") == "portable":
        owned["runtime.numerics"] = arithmetic
    canonical = json.dumps(owned, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def layout_changes(first: RunSpec, second: RunSpec) -> list[str]:
    """Return the ``differences`` in layout fields, which only change how and where ranks compute, so the run can continue."""
    owners = {path: owner for spec in (first, second) for path, (_, owner) in all_fields(spec)}
    return [line for line in differences(first, second) if owners.get(line.split(":")[0]) == "layout"]


def differences(first: RunSpec, second: RunSpec) -> list[str]:
    """Return one line, sorted by path, for each of the run's own fields in which two runs differ."""
    left, right = run_owned(first), run_owned(second)
    return [f"{path}: {left.get(path)!r} != {right.get(path)!r}" for path in _differing(left, right)]


def _differing(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    return sorted(path for path in first.keys() | second.keys() if first.get(path) != second.get(path))


class FieldDifference(msgspec.Struct, frozen=True):
    """A field of the run file with different values in two runs."""

    path: str
    first: object = msgspec.field(name="one")
    second: object = msgspec.field(name="other")
    owner: str
    """The owner of the field: "run", "layout" or "fleet"."""

    def __str__(self) -> str:
        return f"{self.path}: {self.first!r} -> {self.second!r}"


def field_differences(first: RunSpec, second: RunSpec) -> list[FieldDifference]:
    """Return all fields in which two resolved run files differ, by path: the run's first, then the layout's and the
    fleet's. A field that one lacks is None there.
    """
    left, right = dict(all_fields(first)), dict(all_fields(second))
    differing = []
    for path in left.keys() | right.keys():
        (a, owner), (b, _) = left.get(path) or (None, right[path][1]), right.get(path) or (None, "")
        if a != b:
            differing.append(FieldDifference(path, a, b, owner))
    order = ("run", "layout", "fleet")
    return sorted(differing, key=lambda difference: (order.index(difference.owner), difference.path))


def identity_record(spec: RunSpec) -> dict[str, object]:
    """Return the entries of ``record.json`` by which ``changes_since`` finds out whether the run file is still that of the run."""
    return {"identity": identity(spec), "fields": run_owned(spec)}


def changes_since(record: Mapping[str, Any], spec: RunSpec) -> list[FieldDifference]:
    """Return the fields of the run and the layout in which ``spec`` differs from the last start that ``record`` is
    of, by path.

    Earlier versions recorded the identity alone; a difference from that is returned as one of the field "identity".
    Empty for a run without a recorded identity.
    """
    recorded = record.get("identity")
    now = identity(spec, str(record.get("arithmetic", FIRST_ARITHMETIC)))
    if recorded in (None, now):
        return []
    before, after = record.get("fields"), json.loads(json.dumps(run_owned(spec)))
    if not isinstance(before, dict):
        return [FieldDifference("identity", str(recorded)[:12], now[:12], "run")]
    owners = {path: owner for path, (_, owner) in all_fields(spec)}
    return [
        FieldDifference(path, before.get(path), after.get(path), owners.get(path, "run"))
        for path in _differing(before, after)
    ]


def run_changes(record: Mapping[str, Any], spec: RunSpec) -> list[FieldDifference]:
    """Return those of ``changes_since`` that make ``spec`` another run."""
    return [change for change in changes_since(record, spec) if change.owner == "run"]


def recorded_steps(record: Mapping[str, Any]) -> int | None:
    """Return ``train.steps`` of the last start that ``record`` is of, after which the run file may have been edited. None if it has none."""
    fields = record.get("fields")
    steps = fields.get("train.steps") if isinstance(fields, dict) else None
    return steps if type(steps) is int else None


def read_unchanged(directory: RunDirectory) -> RunSpec:
    """Return the resolved run of a run directory whose run file is as at its last start, so that its weights belong to
    it.

    Raises ``RunDirectoryError`` as ``read_resolved`` and ``RunDirectory.read_record`` do, and if fields of the run were
    changed after its last start.
    """
    spec = read_resolved(directory)
    changed = run_changes(directory.read_record(), spec)
    if changed:
        raise RunDirectoryError(
            f"{directory.run_file} was changed after the run was started; put back what it was:\n"
            + "\n".join(f"  {change}" for change in changed)
            + f"\nto train with other values from a step on, then: phalanx train {shlex.quote(str(directory.path))} --from STEP --set FIELD=VALUE"
        )
    return spec


# The fencing token of a fleet's processes: the start of a run to which they belong, and its resolved run file.
#
# Agents outlive a coordinator on another machine. So a restarted run can find processes of its previous start, with another
# attempt number and perhaps other fleet settings. A fencing token (M. Kleppmann, "How to do distributed locking", 2016)
# separates them. It increases with each start, it is journaled, and both sides of every control connection derive their message
# keys from it (``phalanx.fleet.control.transport``). So a coordinator and agents of different starts cannot communicate.
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


# The lineage of a run: the checkpoint from which it began, and the fields that may change from there.
#
# A *child run* continues from a complete checkpoint of its parent: weights, optimizer state, number of steps and position in
# the data (``checkpoint.init_with = "training"``). Fields that act in each step, such as the learning rate, the batch size or
# the number of steps, may change at that step. Fields on which the state depends may not: with other values, the state could
# not be read or would have another meaning.


_FIXED = {
    "model": "the checkpoint holds the weights of the parent's model",
    "train.seq_len": "the place in the data is counted in sequences of the parent's length",
    "runtime.seed": "it orders the samples, so that the place in the data would be one in another order",
    "optimizer.name": "the checkpoint holds the state of the parent's optimizer",
    "optimizer.state": "the checkpoint holds the optimizer's moments in the parent's format",
    "optimizer.block_size": "the checkpoint holds the optimizer's statistics in the parent's blocks",
}
"""Fields or sections in which a child run must equal its parent, with reasons. ``data.path`` may name a copy of the same data."""
_OF_OPTIMIZER = ("optimizer.name", "optimizer.state", "optimizer.block_size")
"""Fixed fields for runs that take over only weights and optimizer state. Shapes are compared tensor by tensor."""
_ANEW = 'start a run of its own from the weights: checkpoint.init_from, with init_with = "weights"'


@dataclass(frozen=True)
class Origin:
    """A checkpoint that a run began from."""

    run_dir: str
    """Directory of the parent, the run that saved it."""
    identity: str
    """The parent's identity; empty if unknown, as for an imported model."""
    step: int
    """The parent's step."""
    weights_sha256: str
    """Hash of the weights at that step."""
    init_with: str
    """The part of the parent's state that was taken over; the values are those of ``checkpoint.init_with``."""

    def __str__(self) -> str:
        name = f" (identity {self.identity[:12]})" if self.identity else ""
        scopes = {"weights": ", its weights alone", "optimizer": ", its weights and optimizer state"}
        return f"step {self.step} of {self.run_dir}{name}, weights {self.weights_sha256[:12]}{scopes.get(self.init_with, '')}"


def read_lineage(record: Mapping[str, object]) -> list[Origin]:
    """Return the origins in a run directory's ``record.json``, oldest first and the run's own last. Empty if there
    are none or they are damaged.
    """
    try:
        return msgspec.convert(record.get("lineage", []), list[Origin])
    except msgspec.ValidationError:
        return []


def lineage_table(lineage: list[Origin]) -> list[dict[str, object]]:
    """Return the origins for ``record.json``: the inverse of ``read_lineage``."""
    return [asdict(origin) for origin in lineage]


def reason_fixed(path: str) -> str | None:
    """Return the reason why a child run must equal its parent in the field ``path``; ``None`` if it may differ."""
    return next(
        (reason for fixed, reason in _FIXED.items() if path == fixed or path.startswith(f"{fixed}.")), None
    )


def taken_over_problems(parent: RunSpec, child: RunSpec) -> Iterator[Problem]:
    """Yield the fields of ``child`` that prevent it from taking over the state selected by ``checkpoint.init_with``
    from ``parent``. Only of the optimizer's unless the state is "training".

    Both runs are resolved.
    """
    old, new = run_owned(parent), run_owned(child)
    for path in _differing(old, new):
        reason = reason_fixed(path)
        if reason and (child.checkpoint.init_with == "training" or path in _OF_OPTIMIZER):
            problem = f"{new.get(path)!r} is not the parent's {old.get(path)!r}: {reason}"
            yield Problem(path, problem, f"leave it as it is, or {_ANEW}")
    if child.checkpoint.init_with == "training":
        yield from _past_of_data(parent, child, step_of(Path(child.checkpoint.init_from)) or 0)


def _past_of_data(parent: RunSpec, child: RunSpec, step: int) -> Iterator[Problem]:
    """Yield the fields with which the child's samples in the first ``step`` steps would differ from the parent's; none
    if neither has sources.

    Later stages may differ, and sources without a weight before may be added.
    """
    if not parent.data.sources and not child.data.sources:
        return
    if bool(parent.data.sources) != bool(child.data.sources):
        problem = "a dataset alone and a mixture have other orders, in which the place in the data would mean nothing"
        yield Problem("data.sources", problem, f"name the parent's data, or {_ANEW}")
        return
    if parent.train.batch_size != child.train.batch_size:
        problem = f"{child.train.batch_size} is not the parent's {parent.train.batch_size}, by which its samples were drawn from data.sources"
        yield Problem("train.batch_size", problem, f"leave it as it is, or {_ANEW}")
    if _drawn_by(parent, step) != _drawn_by(child, step):
        problem = f"other samples would have been drawn in the first {step:,} steps, which are the parent's"
        remedy = f"change the weights of stages that begin at step {step:,} or later alone, or {_ANEW}"
        yield Problem("data.sources", problem, remedy)


def shares_past(parent: RunSpec, child: RunSpec, step: int) -> bool:
    """Return True if both runs draw the same samples from their sources in the first ``step`` steps, or neither has sources."""
    return not any(_past_of_data(parent, child, step))


def _drawn_by(spec: RunSpec, step: int) -> object:
    """Return the stages that begin before ``step`` and, by source with a weight in them, its weights there and its used part."""
    stages = [start for start in stages_of(spec.data) if start < step or start == 0]
    used = {
        source.name: (source.weights[: len(stages)], source.use)
        for source in spec.data.sources
        if any(source.weights[: len(stages)])
    }
    return stages, used


def extending_command(run_dir: Path, step: int, values: Mapping[str, object]) -> str | None:
    """Return the command that continues from a run's checkpoint of ``step`` with new ``values`` by field.

    ``None`` if a field is fixed or cannot be given on the command line.
    """
    if (
        any(reason_fixed(path) or path.startswith("checkpoint.init_") for path in values)
        or None in values.values()
        or any(path.startswith("data.sources.") and path.endswith(".name") for path in values)
    ):
        return None
    changes = [
        word
        for path, value in values.items()
        for word in ("--set", f"{path}={json.dumps(value, ensure_ascii=False)}")
    ]
    return shlex.join(["phalanx", "train", str(run_dir), "--from", str(step), *changes])
