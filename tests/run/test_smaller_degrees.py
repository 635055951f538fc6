"""The tensor and context degrees of a fleet that lost nodes: the runs that may set them, and those that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from phalanx.run.layout import replica_ranks
from phalanx.run.smaller_degrees import divided_over, problems_on, smaller_degree_problems
from phalanx.run.spec import FleetSpec, ModelSpec, MoeSpec, ParallelSpec, RunSpec, TrainSpec

MODEL = ModelSpec(layers=2, dim=64, heads=8, ffn_dim=64, vocab_size=128, lanes=4)
TRAIN = TrainSpec(seq_len=32, batch_size=16, slots=16, micro_batch_size=1)


def test_a_run_is_divided_as_its_file_states_where_the_ranks_suffice() -> None:
    spec = RunSpec(model=MODEL, train=TRAIN, parallel=ParallelSpec(tensor=4), fleet=FleetSpec(least_tensor=1))
    degrees = {ranks: divided_over(spec, ranks).parallel.tensor for ranks in (1, 2, 4, 8)}
    assert degrees == {1: 1, 2: 2, 4: 4, 8: 4}


def test_a_run_in_context_tiles_falls_to_smaller_context_degrees() -> None:
    model = replace(MODEL, lanes=0, context_tiles=4)
    parallel = ParallelSpec(context=4, context_mode="allgather")
    spec = RunSpec(model=model, train=TRAIN, parallel=parallel, fleet=FleetSpec(least_context=2))
    degrees = {ranks: divided_over(spec, ranks).parallel.context for ranks in (2, 4, 8)}
    assert degrees == {2: 2, 4: 4, 8: 4}
    (problem,) = smaller_degree_problems(replace(spec, model=MODEL))
    assert (problem.path, problem.also) == ("fleet.least_context", ("model.context_tiles",))


def test_a_fleet_that_may_fall_to_a_smaller_degree_may_begin_with_it() -> None:
    fleet = FleetSpec(nodes=1, least_tensor=1)
    spec = RunSpec(model=MODEL, train=TRAIN, parallel=ParallelSpec(tensor=2), fleet=fleet)
    assert not problems_on(spec, 1)
    assert problems_on(spec, 3), "one of three would never have work"
    assert problems_on(replace(spec, fleet=FleetSpec(nodes=1)), 1)
    assert problems_on(replace(spec, fleet=FleetSpec(least_tensor=1)), 1), (
        "plain ranks divide as the file says"
    )


def test_without_a_least_degree_nothing_is_ever_divided_otherwise() -> None:
    spec = RunSpec(model=MODEL, train=TRAIN, parallel=ParallelSpec(tensor=4), fleet=FleetSpec())
    assert {divided_over(spec, ranks) for ranks in range(1, 9)} == {spec}


def test_experts_dealt_to_the_ranks_of_a_slot_are_dealt_to_fewer_with_them() -> None:
    model = ModelSpec(layers=2, dim=64, heads=8, lanes=4, moe=MoeSpec(experts=4, per_token=2, ffn_dim=64))
    parallel, fleet = ParallelSpec(tensor=4, expert=4, pipeline=2), FleetSpec(least_tensor=2)
    spec = RunSpec(model=model, train=TRAIN, parallel=parallel, fleet=fleet)
    halved = divided_over(spec, 4).parallel
    assert (halved.tensor, halved.expert, replica_ranks(halved)) == (2, 2, 4)


@pytest.mark.parametrize(
    ("lanes", "tensor", "least", "words"),
    [
        (0, 2, 1, "the bits depend on the tensor degree"),
        (4, 2, 4, "2 tensor ranks are never halved to 4"),
        (8, 8, 3, "8 tensor ranks are never halved to 3"),
    ],
)
def test_a_least_degree_that_cannot_be_is_refused_with_a_remedy(
    lanes: int, tensor: int, least: int, words: str
) -> None:
    model = ModelSpec(layers=2, dim=64, heads=8, lanes=lanes)
    spec = RunSpec(
        model=model, parallel=ParallelSpec(tensor=tensor), fleet=FleetSpec(nodes=2, least_tensor=least)
    )
    (problem,) = smaller_degree_problems(spec)
    assert problem.path == "fleet.least_tensor"
    assert words in problem.finding
    assert problem.remedy


@pytest.mark.parametrize(("first", "on_two"), [("planned", (1, 2)), ("tensor", (1, 2)), ("context", (2, 1))])
def test_lanes_and_tiles_together_let_both_degrees_fall_one_before_the_other(
    first: Literal["planned", "tensor", "context"], on_two: tuple[int, int]
) -> None:
    model = replace(MODEL, context_tiles=4)
    parallel = ParallelSpec(tensor=2, context=2, context_mode="allgather")
    fleet = FleetSpec(nodes=4, least_tensor=1, least_context=1, halve_first=first)
    spec = RunSpec(model=model, train=TRAIN, parallel=parallel, fleet=fleet)
    parallels = {ranks: divided_over(spec, ranks).parallel for ranks in (1, 2, 4)}
    assert {ranks: (part.tensor, part.context) for ranks, part in parallels.items()} == {
        1: (1, 1),
        2: on_two,
        4: (2, 2),
    }
    assert list(smaller_degree_problems(spec)) == []


def test_a_degree_that_never_falls_cannot_fall_first() -> None:
    fleet = FleetSpec(nodes=4, least_tensor=1, halve_first="context")
    spec = RunSpec(model=MODEL, train=TRAIN, parallel=ParallelSpec(tensor=2), fleet=fleet)
    (problem,) = smaller_degree_problems(spec)
    assert (problem.path, problem.also) == ("fleet.halve_first", ("fleet.least_context",))
    assert "planned" in problem.remedy


@pytest.mark.parametrize(
    ("min_nodes", "workers", "refused"),
    [
        (1, 1, []),
        (3, 1, []),
        (4, 1, ["fleet.min_nodes"]),
        (2, 2, ["fleet.min_nodes"]),
        (1, 4, ["fleet.least_tensor"]),
    ],
)
def test_a_least_degree_that_a_fleet_never_takes_is_refused(
    min_nodes: int, workers: int, refused: list[str]
) -> None:
    fleet = FleetSpec(nodes=8, workers_per_node=workers, min_nodes=min_nodes, least_tensor=2)
    spec = RunSpec(model=MODEL, train=TRAIN, parallel=ParallelSpec(tensor=4), fleet=fleet)
    assert [problem.path for problem in smaller_degree_problems(spec)] == refused
