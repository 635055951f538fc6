"""Memory by kind: what is divided by what, what is in flight, and that sums are sums."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.plan.step_cost.estimate import estimate, prepare
from phalanx.plan.step_cost.memory import memory_parts, total
from phalanx.run.layout import Layout
from plan.jobs import LAYOUTS, job, one, planned


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_kinds_add_up_to_what_the_search_compares(name: str) -> None:
    mine = job()
    evaluation = prepare(mine, one(Layout(pipeline=4, shard=4, tensor=4), zero=1))
    for kind in range(len(evaluation.table)):
        state, activations = memory_parts(
            mine,
            evaluation.candidates,
            evaluation.held,
            evaluation.costs,
            evaluation.pipes,
            evaluation.table[kind],
        )
        assert state + activations == pytest.approx(total(evaluation.memory(kind)))
    found = estimate(mine, LAYOUTS[name])
    assert found.memory_bytes == sum(found.memory.values())
    assert all(size >= 0 for size in found.memory.values())


@pytest.mark.parametrize(
    ("stack", "zero", "per_parameter"),
    [
        ("megatron", 0, 2 + 4 + 4 + 8),
        ("megatron", 1, 2 + 4 + 12 / 64),
        ("fsdp", 3, (4 + 4 + 8) / 64),
        ("phalanx", 2, 2 + (4 + 4 + 8) / 64),
    ],
)
def test_a_parameter_costs_what_its_zero_stage_says(stack: str, zero: int, per_parameter: float) -> None:
    mine = job("llama3-8b", "h100:64", stack=stack)
    found = estimate(mine, planned(Layout(shard=64), zero=zero, recompute="full")).memory
    kinds = ("gradients", "master weights", "moments") + (() if stack == "fsdp" else ("compute copy",))
    state = sum(found[kind] for kind in kinds)
    assert state == pytest.approx(per_parameter * mine.workload.counts.parameters, rel=1e-3)


def test_the_first_rank_of_1f1b_holds_as_many_micro_batches_as_there_are_ranks() -> None:
    mine = job("llama3-8b", "h100:64", batch=512)
    held = {
        ranks: estimate(mine, planned(Layout(pipeline=ranks, shard=64 // ranks), zero=1)).memory[
            "activations"
        ]
        for ranks in (4, 8)
    }
    # Half as many layers, twice as many micro-batches.
    assert held[4] == held[8]


def test_logits_make_the_last_rank_the_worst_where_the_vocabulary_is_large() -> None:
    mine = job("llama-1b", "h100:64", seq_len=32_768)
    wide = dataclasses.replace(
        mine.workload, model=dataclasses.replace(mine.workload.model, vocab_size=512_000)
    )
    mine = dataclasses.replace(mine, workload=wide)
    found = estimate(mine, planned(Layout(pipeline=2, shard=32), zero=1, recompute="full"))
    assert found.worst_rank == 1
    # Beyond what the layers' backward needs afterwards.
    moment = sum(found.memory[kind] for kind in ("logits", "recomputed layer", "gradients of activations"))
    assert moment == 32_768 * 512_000 * mine.stack.loss.logit_bytes


@settings(max_examples=20)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["none", "pointwise", "selective", "full"]),
)
def test_dividing_more_never_holds_more(tensor: int, context: int, pipeline: int, recompute: str) -> None:
    mine = job("mixtral-8x7b", "h100:256", batch=256)

    def bytes_of(layout: Layout) -> float:
        found = estimate(mine, planned(layout, zero=1, recompute=recompute))
        return found.memory_bytes - found.memory["communicators"]

    before = Layout(pipeline=pipeline, shard=8, context=context, tensor=tensor)
    for axis in ("tensor", "context", "shard"):
        after = dataclasses.replace(before, **{axis: 2 * getattr(before, axis)})
        assert bytes_of(after) <= bytes_of(before)


def test_offloaded_state_is_not_on_the_accelerator() -> None:
    mine = job()
    here = estimate(mine, planned(Layout(shard=64), zero=1)).memory
    away = estimate(
        mine, planned(Layout(shard=64), zero=1, offload_optimizer=True, offload_activations=True)
    ).memory
    assert away["moments"] == away["master weights"] == 0
    assert away["activations"] < here["activations"]
    assert away["gradients"] == here["gradients"]


def test_arrays_of_layouts_give_what_single_layouts_give() -> None:
    mine = job("mixtral-8x7b")
    space = one(Layout(shard=8, tensor=8), zero=1)
    wide = dataclasses.replace(
        space,
        tensor=np.array([8, 4])[:, None],
        shard=np.array([8, 16])[:, None],
        recompute=np.array([0, 5])[None, :],
    )
    together = prepare(mine, wide).most_memory()
    alone = [
        [estimate(mine, wide.at(2 * row + column, mine.modes)).memory_bytes for column in (0, 1)]
        for row in (0, 1)
    ]
    assert together == pytest.approx(np.array(alone))
