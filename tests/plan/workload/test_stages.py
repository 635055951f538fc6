"""The division into stages for many pipelines at once is the one that the trainer makes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.model.facts.shape import balance
from phalanx.run.kinds.feed_forward import is_mixture
from phalanx_plan.workload.holdings import balanced, places, split
from plan.jobs import job


@given(st.lists(st.sampled_from([1.0, 2.5, 4.0, 7.0]), min_size=1, max_size=14), st.data())
def test_balanced_stages_are_those_of_the_trainer(costs: list[float], data: st.DataObject) -> None:
    counts = data.draw(st.sets(st.integers(1, len(costs)), min_size=1))
    stage_sizes = balanced(np.array(costs), counts)
    assert stage_sizes == {count: balance(costs, count) for count in counts}


@pytest.mark.parametrize(
    ("stages", "expected"),
    [(4, (31, 32, 32, 31)), (128, (0, *[1] * 126, 0)), (16, (7, *[8] * 14, 7)), (2, (63, 63))],
)
def test_an_even_split_counts_the_ends_as_layers_where_it_must(
    stages: int, expected: tuple[int, ...]
) -> None:
    megatron = job("llama3-405b", "h100:16384")
    assert split(megatron.workload, megatron.stack, stages) == expected


def test_more_stages_than_layers_are_refused_with_the_most_there_can_be() -> None:
    phalanx = job("llama3-8b", stack="phalanx")
    with pytest.raises(ValueError, match="at most 32"):
        split(phalanx.workload, phalanx.stack, 33)


@given(st.integers(1, 12), st.sampled_from([(1, False), (2, False), (2, True), (3, False)]))
def test_places_hold_the_whole_model_between_them(ranks: int, kind: tuple[int, bool]) -> None:
    mine = job("deepseek-v3", stack="phalanx")
    table = places(mine.workload, mine.stack, [(ranks, *kind)])
    assert table.embedding.max() == table.head.max() == 1
    assert table.rank[0, 0] == 0
    if ranks == 1:
        assert (table.dense[0, 0], table.mixture[0, 0]) == table.layers == (3, 58)


@pytest.mark.parametrize(("layers", "stages"), [(61, 16), (61, 8), (61, 4), (61, 2), (64, 16)])
def test_the_last_stage_has_what_equal_ones_leave(layers: int, stages: int) -> None:
    megatron = job("llama3-8b")
    model = dataclasses.replace(megatron.workload.model, layers=layers)
    sizes = split(
        dataclasses.replace(megatron.workload, model=model),
        dataclasses.replace(megatron.stack, split="last"),
        stages,
    )
    assert sum(sizes) == layers
    assert set(sizes[:-1]) == {-(-layers // stages)}
    assert 0 < sizes[-1] <= sizes[0]


@given(
    st.sampled_from(["deepseek-v3", "llama3-8b", "qwen3-30b-a3b"]),
    st.sampled_from(["phalanx", "megatron"]),
    st.integers(1, 12),
    st.sampled_from([(1, False), (2, False), (2, True)]),
)
def test_every_rank_has_no_more_than_a_place_that_comes_no_later(
    model: str, stack: str, ranks: int, kind: tuple[int, bool]
) -> None:
    mine, (per_rank, folded) = job(model, stack=stack), kind
    table = places(mine.workload, mine.stack, [(ranks, per_rank, folded)])
    place_counts = np.stack([table.dense[0], table.mixture[0], table.embedding[0], table.head[0]], axis=1)
    layers = [is_mixture(mine.workload.model, layer) for layer in range(mine.workload.model.layers)]
    sizes = split(mine.workload, mine.stack, ranks * per_rank)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    for rank in range(ranks):
        stages = [rank, 2 * ranks - 1 - rank if folded else ranks + rank][:per_rank]
        mixture = [layers[layer] for stage in stages for layer in range(bounds[stage], bounds[stage + 1])]
        rank_counts = [mixture.count(False), mixture.count(True), 0 in stages, len(sizes) - 1 in stages]
        earlier = place_counts[table.rank[0] <= rank]
        assert (earlier >= rank_counts).all(axis=1).any()
