"""Memory by kind against values worked out by hand: sharding, micro-batches in flight, activations and overheads."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.hardware.catalog import cluster
from phalanx.run.layout import Layout
from phalanx.run.spec import ModelSpec, PrecisionSpec, RunSpec, TrainSpec
from phalanx_plan.search.query import job_of
from phalanx_plan.step_cost.estimate import estimate, estimates, prepare
from phalanx_plan.step_cost.memory import lasting_bytes, passing_bytes, total
from plan.jobs import LAYOUTS, job, one, planned, small_gpt


def test_the_two_terms_that_the_search_compares_are_the_sum_of_all_kinds() -> None:
    mine = job()
    evaluation = prepare(mine, one(Layout(pipeline=4, shard=4, tensor=4), zero=1))
    for kind in range(len(evaluation.table)):
        place = evaluation.table[kind]
        parts = lasting_bytes(evaluation, place) + passing_bytes(evaluation, place)
        assert parts == pytest.approx(total(evaluation.memory(kind)))


def test_a_small_gpt_holds_what_is_worked_out_by_hand() -> None:
    seq, width, heads, depth, vocab = 128, 256, 8, 4, 512
    estimated = estimate(small_gpt(), planned(Layout(), zero=0))
    parameters = 2 * vocab * width + depth * (12 * width**2 + 2 * width) + width
    # Weights and gradients of Adam in mixed precision: 2 + 4 + 4 + 8 bytes.
    state = 18 * parameters
    # Korthikanti et al., arXiv 2205.05198, equation 1, for each layer; beside them the input and the output of the last norm, and
    # the mask of the embedding's dropout (section 4.3).
    kept = seq * width * (depth * (34 + 5 * heads * seq / width) + 2 + 2 + 1)
    # Backward needs the gradients of attention's scores, softmax, mask and values at once; the logits are smaller.
    moment = seq * width * (5 * heads * seq / width + 2)
    assert vocab * seq * 8 < moment
    assert estimated.memory_bytes == pytest.approx(1.04 * (state + kept + moment) + 0.6e9)


def test_an_allocator_counts_neither_contexts_nor_communicators_nor_fragmentation() -> None:
    estimated = estimate(job(), LAYOUTS["dense"])  # tensor, pipeline and data ranks: three communicators
    assert estimated.memory_bytes == pytest.approx(1.04 * estimated.allocated_bytes + 0.6e9 + 3 * 0.25e9)


@pytest.mark.parametrize(("model", "fits"), [("llama-1b", True), ("llama3-8b", False)])
def test_eighteen_bytes_a_parameter_fit_or_do_not_fit_on_eighty_gigabytes(model: str, fits: bool) -> None:
    estimated = estimate(job(model, "h100:1", batch=1), planned(Layout(), zero=0, recompute="full"))
    assert estimated.fits == fits


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_kind_of_memory_is_negative(name: str) -> None:
    assert all(size >= 0 for size in estimate(job(), LAYOUTS[name]).memory.values())


@pytest.mark.parametrize(
    ("stack", "zero", "per_parameter"),
    [
        ("megatron", 0, 2 + 4 + 4 + 8),
        ("megatron", 1, 2 + 4 + 12 / 64),
        ("fsdp", 3, (4 + 4 + 8) / 64),
        ("phalanx", 2, 2 + (4 + 4 + 8) / 64),
    ],
)
def test_a_parameter_costs_the_bytes_of_its_zero_stage(stack: str, zero: int, per_parameter: float) -> None:
    mine = job("llama3-8b", "h100:64", batch=128, stack=stack)
    mine = dataclasses.replace(mine, workload=dataclasses.replace(mine.workload, slots=128))
    by_kind = estimate(mine, planned(Layout(shard=64), zero=zero, recompute="full")).memory
    kinds = ("gradients", "master weights", "moments") + (() if stack == "fsdp" else ("compute copy",))
    state = sum(by_kind[kind] for kind in kinds)
    assert state == pytest.approx(per_parameter * mine.workload.counts.parameters, rel=1e-3)


def test_the_first_rank_of_1f1b_holds_as_many_micro_batches_as_there_are_ranks() -> None:
    mine = job("llama3-8b", "h100:64", batch=512)
    activations = {
        ranks: estimate(mine, planned(Layout(pipeline=ranks, shard=64 // ranks), zero=1)).memory[
            "activations"
        ]
        for ranks in (4, 8)
    }
    # Half as many layers, twice as many micro-batches.
    assert activations[4] == activations[8]


def test_logits_make_the_last_rank_the_worst_where_the_vocabulary_is_large() -> None:
    mine = job("llama-1b", "h100:64", seq_len=32_768)
    wide = dataclasses.replace(
        mine.workload, model=dataclasses.replace(mine.workload.model, vocab_size=512_000)
    )
    mine = dataclasses.replace(mine, workload=wide)
    estimated = estimate(mine, planned(Layout(pipeline=2, shard=32), zero=1, recompute="full"))
    assert estimated.worst_rank == 1
    # Beyond what the layers' backward needs afterwards.
    moment = sum(
        estimated.memory[kind] for kind in ("logits", "recomputed layer", "gradients of activations")
    )
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

    before = Layout(pipeline=pipeline, shard=8, context=context, tensor=tensor)
    divided = [
        dataclasses.replace(before, **{axis: 2 * getattr(before, axis)})
        for axis in ("tensor", "context", "shard")
    ]
    layouts = [planned(each, zero=1, recompute=recompute) for each in (before, *divided)]
    estimated = estimates(mine, layouts, exact=False)
    undivided, *parts = (each.memory_bytes - each.memory["communicators"] for each in estimated)
    assert max(parts) <= undivided


def test_offloaded_state_is_not_on_the_accelerator() -> None:
    mine = job()
    here = estimate(mine, planned(Layout(shard=64), zero=1)).memory
    away = estimate(
        mine, planned(Layout(shard=64), zero=1, offload_optimizer=True, offload_activations=True)
    ).memory
    assert away["moments"] == away["master weights"] == 0
    assert away["activations"] < here["activations"]
    assert away["gradients"] == here["gradients"]


def kept_in_fp32(kv_heads: int, context: int, **model: Any) -> float:
    """Bytes of activations on a GPU of a model of eight heads, two of whose sequences of 1,024 tokens are a micro-batch."""
    shape = ModelSpec(layers=3, dim=512, heads=8, kv_heads=kv_heads, ffn_dim=1024, vocab_size=512, **model)
    spec = RunSpec(
        model=shape,
        train=TrainSpec(batch_size=2, slots=1, seq_len=1024),
        precision=PrecisionSpec(compute="fp32"),
    )
    mine = job_of(spec, cluster(f"h100:{context}"))
    layout = planned(Layout(context=context), zero=2, micro_batch=2, precision="fp32")
    return estimate(mine, layout).memory["activations"]


def test_fp32_on_a_gpu_keeps_scores_and_a_key_and_value_for_each_query_head_where_key_heads_are_fewer() -> (
    None
):
    layers, tokens, width, fp32 = 3, 2 * 1024, 64, 4
    scores, key_columns = 8 * 1024, 2 * width
    beside = scores + (8 - 4) * 2 * width  # no fused kernel of PyTorch takes fewer key heads in fp32
    fewer = 4 * key_columns
    difference = kept_in_fp32(4, 1) - kept_in_fp32(8, 1)
    assert difference == pytest.approx(layers * tokens * (beside - fewer) * fp32)


@pytest.mark.parametrize("fused", [{"context": 2}, {"context": 1, "sinks": True}])
def test_fp32_keeps_no_scores_where_attention_calls_fused_kernels_itself(fused: dict[str, Any]) -> None:
    assert kept_in_fp32(4, **fused) < kept_in_fp32(8, **fused)


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
