"""Layers are divided over stages so that the dearest stage is as cheap as can be."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.model.facts.shape import balance, count, layer_costs, stage_layers
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec, MoeSpec, ParallelSpec, RunSpec, TrainSpec


def dearest(costs: list[float], sizes: tuple[int, ...]) -> float:
    boundaries = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
    return max(sum(costs[begin:end]) for begin, end in pairwise(boundaries))


@given(st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9), st.data())
def test_no_other_division_has_a_cheaper_dearest_stage(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    sizes = balance(costs, stages)
    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1
    inner = combinations(range(1, len(costs)), stages - 1)
    ways = (tuple(e - b for b, e in pairwise((0, *cuts, len(costs)))) for cuts in inner)
    assert dearest(costs, sizes) == min(dearest(costs, way) for way in ways)


def test_a_dear_last_layer_leaves_its_stage_fewer_layers() -> None:
    assert balance([1.0] * 7 + [3.0], 2) == (5, 3)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers cannot be divided into 3 stages"):
        balance([1.0, 1.0], 3)


def spec(split: tuple[int, ...] = ()) -> RunSpec:
    model = ModelSpec(layers=8, dim=64, vocab_size=4096)
    return RunSpec(model=model, parallel=ParallelSpec(pipeline=2, pipeline_split=split))


def test_the_run_files_split_is_taken() -> None:
    assert stage_layers(spec(split=(3, 5))) == [range(3), range(3, 8)]


def test_the_output_projection_weighs_on_the_last_stage() -> None:
    first, last = stage_layers(spec())
    assert len(first) > len(last)


def test_two_stages_a_rank_double_the_stages() -> None:
    model = ModelSpec(layers=8, dim=64, vocab_size=64)
    run = RunSpec(model=model, parallel=ParallelSpec(pipeline=2, pipeline_schedule="zbv"))
    assert [len(layers) for layers in stage_layers(run)] == [2, 2, 2, 2]


def test_without_a_pipeline_all_layers_are_one_stage() -> None:
    assert stage_layers(RunSpec(model=ModelSpec(layers=5))) == [range(5)]


def test_the_layers_cost_together_what_the_model_costs() -> None:
    moe = MoeSpec(experts=4, per_token=2, first_dense=1, every=2)
    model = resolve(ModelSpec(layers=6, dim=64, vocab_size=128, moe=moe))
    seq_len = TrainSpec().seq_len
    costs = layer_costs(model, seq_len)
    assert sum(costs) == count(model, seq_len).flops_per_token_causal
    assert costs[2] != costs[1]
