"""Facts of a stack change the terms that they are about, by as much as they should, and no others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.run.layout import Layout
from phalanx_plan.step_cost import hardware_times
from phalanx_plan.step_cost.estimate import Estimate, estimate
from phalanx_plan.workload.candidates import PlannedLayout, Recompute
from phalanx_plan.workload.software import MEGATRON, MEGATRON_2022
from phalanx_plan.workload.stacks import AttentionPath, Overlap
from plan.jobs import LAYOUTS, job, planned, small_gpt

MIXTURE = planned(Layout(shard=64, expert=16), zero=1)
"""Experts on two nodes, so that tokens cross the network."""


def with_facts(layout: PlannedLayout, model: str = "llama3-8b", **facts: dict[str, Any]) -> Estimate:
    """An estimate for Megatron with some fields of its components changed."""
    components = {
        name: dataclasses.replace(getattr(MEGATRON, name), **fields) for name, fields in facts.items()
    }
    return estimate(job(model, stack=dataclasses.replace(MEGATRON, **components)), layout)


def test_an_exchange_hides_no_more_than_its_share_and_no_more_than_is_computed() -> None:
    bare = with_facts(MIXTURE, "qwen3-30b-a3b")
    computing = sum(bare.time[name] for name in ("matmul", "attention", "pointwise"))
    for share in (0.1, 0.5, 1.0):
        left = with_facts(MIXTURE, "qwen3-30b-a3b", overlap={"expert": share}).time["expert_comm"]
        hidden = bare.time["expert_comm"] - left
        assert hidden <= min(share * bare.time["expert_comm"], computing) * (1 + 1e-9)
        if share == 0.1:
            assert hidden == pytest.approx(share * bare.time["expert_comm"])


@pytest.mark.parametrize(
    ("layout", "batch", "alone"),
    [
        (MIXTURE, 64, 1),
        (MIXTURE, 256, 1),
        (planned(Layout(pipeline=4, shard=16, expert=16), zero=1), 64, 4),
        (planned(Layout(pipeline=4, shard=16, expert=16), zero=1), 256, 4),
    ],
)
def test_no_exchange_is_hidden_while_a_pipeline_fills_and_drains(
    layout: PlannedLayout, batch: int, alone: int
) -> None:
    """Hiding saves nothing with no more of the first rank's micro-batches than it holds at once."""
    bare, hiding = (
        estimate(
            job(
                "qwen3-30b-a3b",
                batch=batch,
                stack=dataclasses.replace(MEGATRON, overlap=Overlap(expert=share)),
            ),
            layout,
        ).time
        for share in (0.0, 0.5)
    )
    saved = bare["expert_comm"] - hiding["expert_comm"]
    micro_batches = batch // layout.data
    assert saved > 0
    assert hiding["unpaired_exchange"] == pytest.approx(saved * alone / micro_batches)
    assert "unpaired_exchange" not in bare


@pytest.mark.parametrize("slower", ["once per node", "every copy"])
def test_hybrid_dispatch_is_the_fastest_across_nodes(slower: str) -> None:
    hybrid = with_facts(MIXTURE, "qwen3-30b-a3b", experts={"dispatch": "hybrid"})
    assert (
        hybrid.time["expert_comm"]
        <= with_facts(MIXTURE, "qwen3-30b-a3b", experts={"dispatch": slower}).time["expert_comm"]
    )


def test_what_a_graph_replays_costs_the_host_nothing() -> None:
    waits = [
        with_facts(MIXTURE, "qwen3-30b-a3b", kernels={"graphed": graphed, "launch_s": 2e-4}).time["host"]
        for graphed in (
            frozenset(),
            frozenset({"router"}),
            frozenset({"router", "norm", "projection", "out"}),
        )
    ]
    assert waits[0] > waits[1] > waits[2]
    assert with_facts(MIXTURE, "qwen3-30b-a3b", kernels={"launch_s": 0.0}).time["host"] == 0


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("full", 15 + 4 + 12)])
def test_the_host_of_a_layer_of_2022_makes_as_many_calls_as_its_source(recompute: str, again: int) -> None:
    """Megatron-LM 55ba1f7b, megatron/model/transformer.py and megatron/mpu, by hand.

    Forward, 15 kernels: two norms, four products, the bias of queries, keys and values, attention's five (scores, softmax, dropout,
    product, copy), the activation, and two sums of bias, dropout and residual; and four calls for the state of random numbers.
    Backward, 42: of both norms three each and four sums; two of each product; of four biases a sum over rows and one over
    micro-batches; attention's ten; two of the activation; four of the sums. A checkpoint's states are twelve calls.
    """
    stack = dataclasses.replace(
        MEGATRON_2022, kernels=dataclasses.replace(MEGATRON_2022.kernels, launch_s=1.0), tax_per_doubling=0
    )
    few, many = (
        estimate(
            dataclasses.replace(
                small_gpt(), stack=stack, workload=dataclasses.replace(small_gpt().workload, model=model)
            ),
            planned(Layout(), zero=0, recompute=recompute),
        ).step_s
        for model in (dataclasses.replace(small_gpt().workload.model, layers=depth) for depth in (4, 8))
    )
    micro_batches = 2
    assert (many - few) / (4 * micro_batches) == pytest.approx(15 + 4 + 42 + again, rel=1e-3)


def test_the_last_of_n_contiguous_pieces_attends_almost_twice_the_mean() -> None:
    layout = LAYOUTS["interleaved"]
    even, uneven = (
        estimate(
            job(
                seq_len=65_536,
                stack=dataclasses.replace(MEGATRON, attention=AttentionPath(balanced=balanced)),
            ),
            layout,
        ).time["attention"]
        for balanced in (True, False)
    )
    assert uneven / even == pytest.approx(2 - 1 / layout.context, rel=0.01)


def test_blocking_sends_cost_a_hop_each_way_for_every_micro_batch() -> None:
    layout = LAYOUTS["dense"]
    hidden, blocking = (
        with_facts(layout, overlap={"blocking_sends": flag}).time["pipeline_comm"] for flag in (False, True)
    )
    passes = 64 // (layout.shard * layout.micro_batch)
    # Otherwise two ranks wait for one hop there and one back.
    assert blocking / hidden == pytest.approx(passes, rel=0.05)


def test_kept_outputs_are_a_boundary_of_each_micro_batch_in_flight() -> None:
    layout = LAYOUTS["dense"]
    without, kept = (
        with_facts(layout, activations={"stage_outputs": flag}).memory["activations"]
        for flag in (False, True)
    )
    boundary = 4096 * 4096 * 2 / layout.tensor
    assert kept - without == pytest.approx(layout.pipeline * boundary)


def test_operands_of_eight_bits_are_cast_and_gathered_in_eight_bits() -> None:
    wide, narrow = (
        estimate(job(), dataclasses.replace(LAYOUTS["dense"], precision=name)).time
        for name in ("bf16", "fp8")
    )
    assert narrow["matmul"] < wide["matmul"]
    assert narrow["tensor_comm"] < wide["tensor_comm"]


@settings(max_examples=30)
@given(rows=st.integers(128, 8192), columns=st.integers(256, 8192), inner=st.integers(128, 8192))
def test_adding_to_a_sum_is_never_faster_than_writing_it(rows: int, columns: int, inner: int) -> None:
    profile = job().profile
    written = hardware_times.matmul_s(profile, "bf16", rows, columns, inner)
    added = hardware_times.matmul_s(profile, "bf16", rows, columns, inner, result_bytes=8)
    assert added >= written


@given(groups=st.integers(1, 64), streams=st.integers(1, 8))
def test_experts_on_streams_start_one_after_the_other(groups: int, streams: int) -> None:
    profile = job().profile
    at_once = hardware_times.grouped_matmul_s(profile, "bf16", groups, 512, 1024, 1024)
    in_turn = hardware_times.grouped_matmul_s(profile, "bf16", groups, 512, 1024, 1024, streams=streams)
    launch = profile.constants.matmul["bf16"].launch_s
    assert in_turn - at_once == pytest.approx(launch * (max(groups / streams, 1) - 1), abs=1e-12)


def test_the_gradient_of_the_embedding_is_held_where_the_model_begins_and_ends() -> None:
    ends, middle = (
        with_facts(
            planned(Layout(pipeline=ranks, shard=64 // ranks), zero=1),
            states={"embedding_gradient_bytes": 2.0},
        )
        for ranks in (1, 8)
    )
    model = job("llama3-8b").workload.model
    size = 2.0 * model.vocab_size * model.dim
    assert ends.memory["gradient of the embedding"] == size
    assert middle.memory["gradient of the embedding"] in (0.0, size)


def test_further_communicators_are_counted_beside_those_of_the_axes() -> None:
    layout = LAYOUTS["interleaved"]
    few, many = (with_facts(layout, allocator={"further_communicators": count}) for count in (0, 3))
    more = many.memory["communicators"] - few.memory["communicators"]
    assert more == pytest.approx(3 * MEGATRON.allocator.communicator_bytes)


@pytest.mark.parametrize(
    ("component", "fact"),
    [
        ("experts", "weighs_biases"),
        ("experts", "clamps_apart"),
        ("experts", "pads_apart"),
        ("attention", "turns_apart"),
    ],
)
def test_what_is_done_apart_from_the_kernels_around_it_takes_time_as_memory_traffic_and_nothing_else(
    component: str, fact: str
) -> None:
    fused, apart = (
        with_facts(MIXTURE, "qwen3-30b-a3b", **{component: {fact: is_apart}}) for is_apart in (False, True)
    )
    changed = {name for name, seconds in apart.time.items() if seconds > fused.time[name] * (1 + 1e-9)}
    assert "pointwise" in changed
    assert changed <= {"pointwise", "host", "scale_tax", "bubble"}


def test_what_is_clamped_apart_is_kept_besides_what_was_clamped() -> None:
    model = job("qwen3-30b-a3b").workload.model
    assert model.moe is not None
    fused, apart = (kept(experts={"clamps_apart": is_apart}) for is_apart in (False, True))
    routed = (
        4096 * model.moe.per_token
    )  # a rank's own tokens, as experts have them when they are dealt evenly
    assert apart - fused >= model.layers * routed * 2 * model.moe.ffn_dim * 2
    assert kept(experts={"pads_apart": True, "weighs_biases": True}, attention={"turns_apart": True}) == fused


def test_experts_of_a_rank_that_add_their_biases_one_by_one_launch_kernels_for_each() -> None:
    few, many = (
        with_facts(
            planned(Layout(shard=64, expert=expert), zero=1),
            "qwen3-30b-a3b",
            experts={"weighs_biases": True},
            kernels={"launch_s": 1e-3},  # so slow that everything waits for the host
        ).time["host"]
        - with_facts(
            planned(Layout(shard=64, expert=expert), zero=1), "qwen3-30b-a3b", kernels={"launch_s": 1e-3}
        ).time["host"]
        for expert in (64, 8)
    )
    assert many > 6 * few


def test_a_cast_that_finds_its_scale_first_reads_once_more() -> None:
    layout = planned(Layout(shard=64), zero=1, precision="fp8")
    once, twice, thrice = (
        with_facts(layout, kernels={"cast_reads": reads}).time["matmul"] for reads in (1, 2, 3)
    )
    assert once < twice
    assert thrice - twice == pytest.approx(twice - once)


def test_casts_of_one_expert_after_the_other_begin_as_many_kernels() -> None:
    layout = dataclasses.replace(MIXTURE, precision="fp8")
    together, each, each_by_four = (
        with_facts(layout, "qwen3-30b-a3b", kernels={"cast_kernels": kernels_}).time["matmul"]
        for kernels_ in (0, 1, 4)
    )
    local = 128 / 16
    assert (each_by_four - together) / (each - together) == pytest.approx(
        (4 * local - 1) / (local - 1), rel=0.2
    )


def test_half_of_a_part_that_is_computed_again_by_half_is_kept() -> None:
    mine = job("llama3-8b")
    widths = {}
    for name, parts, halves in (("all", (), ()), ("half", (), ("widen",)), ("none", ("widen",), ())):
        mode = Recompute(name, frozenset(parts), frozenset(halves))
        layout = planned(Layout(shard=64), zero=1, recompute=name)
        again = dataclasses.replace(mine, modes=(*mine.modes, mode))
        widths[name] = estimate(again, layout).memory["activations"]
    assert widths["half"] == pytest.approx((widths["all"] + widths["none"]) / 2)
    assert widths["none"] < widths["half"]


def kept(model: str = "qwen3-30b-a3b", precision: str = "bf16", **facts: dict[str, Any]) -> float:
    layout = dataclasses.replace(MIXTURE, precision=precision)
    return with_facts(layout, model, **facts).memory["activations"]


def test_results_of_experts_are_kept_only_where_they_are_weighted_afterwards() -> None:
    after, inside = (kept(experts={"weighs_inside": inside}) for inside in (False, True))
    workload = job("qwen3-30b-a3b").workload
    model = workload.model
    assert model.moe is not None
    routed = workload.seq_len * model.moe.per_token * workload.imbalance
    assert after - inside == pytest.approx(model.layers * routed * model.dim * 2)


def test_a_narrow_format_keeps_less_than_a_wide_one_and_more_where_operands_stay_wide() -> None:
    wide, narrow, operands = (
        kept(),
        kept(precision="fp8"),
        kept(precision="fp8", activations={"wide_operands": True}),
    )
    assert narrow < wide
    assert operands == pytest.approx(wide)
    assert kept(precision="fp8", experts={"narrow_gates": True}) < narrow
    assert kept(experts={"narrow_gates": True}) == wide


def test_tokens_in_eight_bits_take_less_time_to_their_experts() -> None:
    layout = dataclasses.replace(MIXTURE, precision="fp8")
    times = [
        with_facts(layout, "qwen3-30b-a3b", experts={"dispatch": "hybrid", "narrow_dispatch": narrow}).time[
            "expert_comm"
        ]
        for narrow in (False, True)
    ]
    assert times[1] < times[0]


def test_windows_that_leave_half_of_the_scores_halve_the_work_of_attention() -> None:
    full = job("llama3-8b")
    half = dataclasses.replace(full, workload=dataclasses.replace(full.workload, attended=0.5))
    times = [estimate(each, LAYOUTS["flat"]).time["attention"] for each in (full, half)]
    launches = 2 * full.profile.constants.attention.launch_s * full.workload.model.layers
    assert times[0] / 2 <= times[1] <= times[0] / 2 + launches * full.workload.batch
