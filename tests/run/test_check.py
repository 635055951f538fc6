"""Rules between fields: each is broken by itself, names its fields and offers a way out that works."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.model.presets import PRESETS
from phalanx.run.check import check, check_ranks
from phalanx.run.problems import Problem
from phalanx.run.spec import ModelSpec, ParallelSpec, RopeScalingSpec, RunSpec, TrainSpec


def only_problem(**sections: Any) -> Problem:
    (problem,) = check(replace(RunSpec(), **sections))
    return problem


def test_the_default_run_and_every_preset_are_possible() -> None:
    assert check(RunSpec()) == []
    for preset in PRESETS.values():
        assert check(RunSpec(model=preset)) == []


def test_heads_divide_the_width_unless_their_width_is_given() -> None:
    problem = only_problem(model=ModelSpec(dim=256, heads=5))
    assert problem.path == "model.heads"
    assert "2, 4, 8" in problem.remedy
    assert check(RunSpec(model=ModelSpec(dim=256, heads=5, head_dim=64))) == []


def test_a_head_is_rotated_in_pairs() -> None:
    assert only_problem(model=ModelSpec(head_dim=7)).path == "model.head_dim"
    assert only_problem(model=ModelSpec(dim=12, heads=4)).path == "model.head_dim"


def test_key_heads_divide_query_heads() -> None:
    problem = only_problem(model=ModelSpec(heads=4, kv_heads=3))
    assert problem.path == "model.kv_heads"
    assert problem.remedy == "1, 2, 4 divide 4"


@pytest.mark.parametrize("high", [1.0, 2.0])
def test_the_band_of_blended_frequencies_is_not_empty(high: float) -> None:
    scaling = RopeScalingSpec(low_freq_factor=2.0, high_freq_factor=high)
    assert only_problem(model=ModelSpec(rope_scaling=scaling)).path == "model.rope_scaling.high_freq_factor"


def test_slots_divide_the_batch() -> None:
    problem = only_problem(train=TrainSpec(batch_size=32, slots=7))
    assert problem.path == "train.slots"
    assert "8" in problem.remedy


def test_micro_batches_divide_a_slot() -> None:
    problem = only_problem(train=TrainSpec(batch_size=32, slots=4, micro_batch_size=3))
    assert problem.path == "train.micro_batch_size"
    assert "a slot of 8 sequences" in problem.found


def test_a_replicated_model_is_not_shared() -> None:
    problem = only_problem(parallel=ParallelSpec(sharding="none", shard_ranks=2))
    assert problem.path == "parallel.shard_ranks"
    assert "zero3" in problem.remedy


def test_groups_that_share_a_model_divide_the_ranks() -> None:
    problem = only_problem(parallel=ParallelSpec(ranks=6, shard_ranks=4))
    assert problem.path == "parallel.shard_ranks"
    assert "2, 3, 6" in problem.remedy


def test_no_rank_is_without_a_slot() -> None:
    problem = only_problem(parallel=ParallelSpec(ranks=9))
    assert problem.path == "parallel.ranks"
    assert "at most train.slots = 8" in problem.remedy
    assert list(check_ranks(RunSpec(), 8)) == []
    assert [problem.path for problem in check_ranks(RunSpec(), 9)] == ["parallel.ranks"]


@given(st.integers(1, 10**6), st.integers(1, 10**4))
def test_the_slots_that_are_offered_do_divide_the_batch(batch_size: int, slots: int) -> None:
    for problem in check(RunSpec(train=TrainSpec(batch_size=batch_size, slots=slots))):
        offered = [int(number) for number in re.findall(r"\d+", problem.remedy.split(" divide ")[0])]
        assert offered
        assert all(batch_size % number == 0 for number in offered)


def test_problems_name_fields_that_exist() -> None:
    broken = RunSpec(
        model=ModelSpec(dim=30, heads=4, kv_heads=3, rope_scaling=RopeScalingSpec(high_freq_factor=0.5)),
        train=TrainSpec(steps=1, slots=7),
        parallel=ParallelSpec(ranks=9, shard_ranks=2, sharding="none"),
    )
    problems = check(broken)
    assert len(problems) == 7
    for path in {path for problem in problems for path in (problem.path, *problem.also)}:
        section: Any = broken
        for name in path.split("."):
            assert name in {item.name for item in fields(section)}
            section = getattr(section, name)
