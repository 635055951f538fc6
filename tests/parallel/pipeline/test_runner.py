"""A pipeline of any schedule gives the bits of one rank that runs micro-batch after micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel.pipelined import (
    BIASED,
    DENSE,
    MIXTURE,
    evaluated_in_a_pipeline,
    in_a_pipeline,
    in_one_piece,
    recomputed_in_a_pipeline,
    slots_in_a_pipeline,
    slots_in_one_piece,
    waiting_ns,
)
from parallel.sharded_pipelines import pipelined, undivided
from phalanx.parallel.pipeline_schedules import ScheduleName
from phalanx.run.spec import ModelSpec
from quick_cases import quick
from ranks import Ranks

SCHEDULES: list[tuple[ScheduleName, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("zbv", 2),
    ("dualpipev", 2),
]


def assert_same_bits(
    results: list[tuple[list[float], dict[str, Tensor]]], expected: tuple[list[float], dict[str, Tensor]]
) -> None:
    losses, gradients = expected
    assert [sum(column) for column in zip(*(r[0] for r in results), strict=True)] == losses
    merged = {name: gradient for _, rank_gradients in results for name, gradient in rank_gradients.items()}
    assert merged.keys() == gradients.keys()
    assert [name for name in merged if not torch.equal(merged[name], gradients[name])] == []


@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize(("name", "per_rank"), SCHEDULES)
def test_losses_and_gradients_have_the_bits_of_the_undivided_model(
    ranks: Ranks, name: ScheduleName, per_rank: int, pipeline: int
) -> None:
    results = ranks.run(pipeline, in_a_pipeline, name, per_rank, DENSE, 8)
    assert_same_bits(results, in_one_piece(DENSE, 8))


@pytest.mark.parametrize(("micro_batches", "slots"), [(12, 3), (3, 3)], ids=str)
@pytest.mark.parametrize(("name", "per_rank"), SCHEDULES)
def test_slots_that_follow_each_other_have_each_the_bits_of_the_undivided_model(
    ranks: Ranks, name: ScheduleName, per_rank: int, micro_batches: int, slots: int
) -> None:
    results = ranks.run(2, slots_in_a_pipeline, name, per_rank, BIASED, micro_batches, slots)
    for slot, expected in enumerate(slots_in_one_piece(BIASED, micro_batches, slots)):
        merged = {name: gradient for by_slot in results for name, gradient in by_slot[slot].items()}
        assert merged.keys() == expected.keys()
        assert [name for name in merged if not torch.equal(merged[name], expected[name])] == []


@pytest.mark.parametrize("spec", [BIASED, MIXTURE], ids=["biased", "mixture"])
@pytest.mark.parametrize(("name", "per_rank"), SCHEDULES[-2:])
def test_divided_backward_passes_have_the_bits_of_whole_ones_for_other_layers_too(
    ranks: Ranks, name: ScheduleName, per_rank: int, spec: ModelSpec
) -> None:
    assert_same_bits(ranks.run(2, in_a_pipeline, name, per_rank, spec, 5), in_one_piece(spec, 5))


@pytest.mark.parametrize(("name", "per_rank"), SCHEDULES[-2:])
def test_checkpointed_layers_change_no_bit(ranks: Ranks, name: ScheduleName, per_rank: int) -> None:
    results = ranks.run(2, recomputed_in_a_pipeline, name, per_rank, MIXTURE, 4)
    assert_same_bits(results, in_one_piece(MIXTURE, 4))


@pytest.mark.parametrize(("name", "per_rank"), SCHEDULES)
def test_evaluation_gives_the_undivided_models_losses(
    ranks: Ranks, name: ScheduleName, per_rank: int
) -> None:
    results = ranks.run(2, evaluated_in_a_pipeline, name, per_rank, DENSE, 3)
    assert_same_bits(results, (in_one_piece(DENSE, 3)[0], {}))


def test_waiting_for_the_neighbor_is_counted(ranks: Ranks) -> None:
    assert all(waited > 0 for waited in ranks.run(2, waiting_ns))


@pytest.mark.servers
@pytest.mark.parametrize(
    ("name", "per_rank", "narrow"),
    quick(
        ((*schedule, narrow) for schedule in SCHEDULES[1:] for narrow in (False, True)),
        of_the_suite=[("1f1b", 1, False), ("dualpipev", 2, True)],
    ),
)
def test_sharded_stages_reduce_once_and_give_the_sharded_models_bits(
    ranks: Ranks, name: ScheduleName, per_rank: int, narrow: bool
) -> None:
    expected = ranks.run(2, undivided, narrow)[0]
    for zero3 in (False, True):
        results = ranks.run(4, pipelined, name, per_rank, narrow, zero3)
        assert [calls for _, calls in results] == [{1}] * 4
        merged = {
            name: gradient for rank_gradients, _ in results for name, gradient in rank_gradients.items()
        }
        assert merged.keys() == expected.keys()
        assert [name for name in merged if not torch.equal(merged[name], expected[name])] == []
