"""The identity of a run: every field of the run, none of the fleet."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings

from phalanx.model.facts.presets import PRESETS
from phalanx.run.fields import FieldType, field_types
from phalanx.run.identity import differences, identity, run_owned
from phalanx.run.spec import MemorySpec, MlaSpec, MoeSpec, RopeScalingSpec, RunSpec
from run.specs import run_specs

# With every section that may be absent.
BASE = dataclasses.replace(
    RunSpec(),
    model=dataclasses.replace(
        RunSpec().model,
        factory="models:make",
        rope_scaling=RopeScalingSpec(),
        mla=MlaSpec(),
        moe=MoeSpec(),
        vocab_size=512,
    ),
)


def leaves(section: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldType, Any]]:
    """Every field of a run with its path, its type and its value."""
    declared = field_types(type(section))
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            yield from leaves(value, (*prefix, item.name))
        else:
            yield (*prefix, item.name), declared[item.name], value


def another(kind: Any, value: Any) -> Any:
    """A value of the same type that differs."""
    if get_origin(kind) is Literal:
        return next(option for option in get_args(kind) if option != value)
    if get_origin(kind) is tuple:
        return (*value, "another")
    if kind == bool | None:  # None, which leaves the choice to the data, counts as false
        return not value
    return {
        bool: lambda v: not v,
        int: lambda v: v + 1,
        float: lambda v: v * 1.5 + 0.1,
        str: lambda v: v + "x",
    }[kind](value)


def changed(section: Any, path: tuple[str, ...], value: Any) -> Any:
    head, *rest = path
    inner = changed(getattr(section, head), tuple(rest), value) if rest else value
    return dataclasses.replace(section, **{head: inner})


ALL = {".".join(path): (path, kind, value) for path, kind, value in leaves(BASE)}
LANES_LEAVE = {"parallel.tensor", "parallel.expert"}
"""Fields that belong to the run, unless it is computed in lanes."""
TILES_LEAVE = {"parallel.context", "parallel.context_mode", "parallel.expert"}
"""Fields that belong to the run, unless it cuts its sequences into context tiles."""
LEAVE = {"model.lanes": LANES_LEAVE, "model.context_tiles": TILES_LEAVE}
RUN_FIELDS = [name for name, entry in ALL.items() if entry[1].owner != "fleet" and name != "model.preset"]
FLEET_FIELDS = [name for name, entry in ALL.items() if entry[1].owner == "fleet"]


def with_another(name: str) -> RunSpec:
    path, kind, value = ALL[name]
    spec: RunSpec = changed(BASE, path, another(kind.plain, value))
    assert spec != BASE
    return spec


def test_nothing_escapes_the_two_lists() -> None:
    assert set(ALL) - set(RUN_FIELDS) - set(FLEET_FIELDS) == {"model.preset"}


@pytest.mark.parametrize("name", RUN_FIELDS)
def test_every_field_of_the_run_is_part_of_its_identity(name: str) -> None:
    other = with_another(name)
    assert identity(other) != identity(BASE)
    lost = LEAVE.get(name, set())
    assert {line.split(":")[0] for line in differences(BASE, other)} - lost == {name}


@pytest.mark.parametrize("name", sorted(LANES_LEAVE))
def test_how_ranks_divide_the_width_belongs_to_the_fleet_if_the_run_cuts_it_into_lanes(name: str) -> None:
    base, other = (changed(spec, ("model", "lanes"), 4) for spec in (BASE, with_another(name)))
    assert identity(base) == identity(other)
    assert differences(base, other) == []


@pytest.mark.parametrize("name", sorted(TILES_LEAVE))
def test_how_ranks_divide_the_sequence_belongs_to_the_fleet_if_the_run_cuts_it_into_tiles(name: str) -> None:
    base, other = (changed(spec, ("model", "context_tiles"), 4) for spec in (BASE, with_another(name)))
    assert identity(base) == identity(other)
    assert differences(base, other) == []


@pytest.mark.parametrize("name", FLEET_FIELDS)
def test_no_field_of_the_fleet_is_part_of_a_runs_identity(name: str) -> None:
    other = with_another(name)
    assert identity(other) == identity(BASE)
    assert differences(BASE, other) == []


@pytest.mark.parametrize(
    "name",
    ["parallel.ranks", "parallel.sharding", "parallel.shard_ranks", "checkpoint.every_steps", "data.path"],
)
def test_how_the_run_is_computed_and_kept_belongs_to_the_fleet(name: str) -> None:
    assert name in FLEET_FIELDS


@pytest.mark.parametrize(
    "name",
    [
        "train.slots",
        "train.micro_batch_size",
        "train.loss_chunk",
        "runtime.threads",
        "runtime.seed",
        "model.init_std",
    ],
)
def test_fields_that_reach_the_bits_belong_to_the_run(name: str) -> None:
    assert name in RUN_FIELDS


def test_the_name_of_a_preset_adds_nothing_to_its_fields() -> None:
    preset = PRESETS["llama3-8b"]
    named, unnamed = (
        dataclasses.replace(BASE, model=model) for model in (preset, dataclasses.replace(preset, preset=""))
    )
    assert identity(named) == identity(unnamed)


def test_a_difference_shows_both_values() -> None:
    assert differences(BASE, with_another("train.steps")) == ["train.steps: 100 != 101"]


def test_stretching_that_is_there_or_not_is_a_difference() -> None:
    without = dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, rope_scaling=None))
    assert identity(without) != identity(BASE)
    assert any(line.startswith("model.rope_scaling.factor") for line in differences(without, BASE))


@given(run_specs(), run_specs())
@settings(max_examples=12)  # a fifth of a second each
def test_identities_are_equal_exactly_when_nothing_differs(first: RunSpec, second: RunSpec) -> None:
    assert (identity(first) == identity(second)) == (differences(first, second) == [])
    assert (identity(first) == identity(second)) == (run_owned(first) == run_owned(second))
    assert identity(first) == identity(dataclasses.replace(first))


def test_an_identity_is_a_sha256_in_hex() -> None:
    assert len(identity(BASE)) == 64
    int(identity(BASE), 16)


def test_a_run_file_keeps_the_identity_that_it_had_in_0_1_0() -> None:
    assert identity(RunSpec()) == "3bf8f3bbd49f5af4d2ee788a17e64721860be9f3efb3ff1154d8d3db66d81bd0"


def test_without_a_factory_its_fields_leave_the_identity_alone() -> None:
    paths = run_owned(RunSpec()).keys()
    assert not {"model.factory", "model.factory_sha256"} & paths


def test_a_budget_by_which_the_compiler_fuses_belongs_to_the_run() -> None:
    half, most = (MemorySpec(recompute="budget", recompute_budget=share) for share in (0.5, 0.9))
    assert len({identity(RunSpec(memory=memory)) for memory in (MemorySpec(), half, most)}) == 3
    assert identity(RunSpec(memory=MemorySpec(recompute_budget=0.9))) == identity(RunSpec())
