"""Time by term: brute force and closed forms for small cases, and monotony in every rate of the hardware."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.hardware.cluster import Cluster, Fact
from phalanx.hardware.profile import profile_of
from phalanx.run.layout import Layout
from phalanx.run.spec import ModelSpec
from phalanx_plan.step_cost import hardware_times
from phalanx_plan.step_cost.estimate import estimate, prepare
from phalanx_plan.step_cost.memory import total
from phalanx_plan.step_cost.step_time import scale_tax
from phalanx_plan.workload.software import MEGATRON
from phalanx_plan.workload.stacks import KernelFacts, TrainingJob
from plan.jobs import LAYOUTS, job, one, planned, small_gpt


def faster(fact: Fact, factor: float) -> Fact:
    """``fact`` with its value multiplied."""
    return dataclasses.replace(fact, value=fact.value * factor)


def with_rates(
    mine: TrainingJob, *, memory: float = 1, domain: float = 1, fabric: float = 1, host: float = 1
) -> TrainingJob:
    """``mine`` with bandwidths multiplied."""
    old: Cluster = mine.cluster
    accelerator = dataclasses.replace(
        old.accelerator,
        memory_bytes_per_s=faster(old.accelerator.memory_bytes_per_s, memory),
        host_bytes_per_s=faster(old.accelerator.host_bytes_per_s, host),
    )
    cluster = dataclasses.replace(
        old,
        accelerator=accelerator,
        domain=dataclasses.replace(old.domain, bytes_per_s=faster(old.domain.bytes_per_s, domain)),
        fabric=dataclasses.replace(old.fabric, bytes_per_s=faster(old.fabric.bytes_per_s, fabric)),
    )
    return dataclasses.replace(mine, cluster=cluster, profile=profile_of(accelerator))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_closed_form_is_near_the_exact_schedule_and_no_term_is_negative(name: str) -> None:
    estimated = estimate(job(), LAYOUTS[name])
    assert all(seconds >= 0 for seconds in estimated.time.values())
    assert estimated.closed_form_s == pytest.approx(estimated.step_s, rel=0.05)


def test_products_of_a_small_gpt_are_three_for_each_of_its_matrices() -> None:
    mine, tokens, width, depth, vocab = small_gpt(), 128, 256, 4, 512
    matmul_s = partial(hardware_times.matmul_s, mine.profile, "bf16")

    def matrix_s(columns: int, inner: int) -> float:
        """Forward, gradient of the input, and gradient of the weights, which is added to a sum in fp32."""
        forward, inputs = matmul_s(tokens, columns, inner), matmul_s(tokens, inner, columns)
        return float(forward + inputs + matmul_s(columns, inner, tokens, result_bytes=8))

    attention = matrix_s(3 * width, width) + matrix_s(width, width)
    feed_forward = matrix_s(4 * width, width) + matrix_s(width, 4 * width)
    micro_batches = 2
    expected = micro_batches * (depth * (attention + feed_forward) + matrix_s(vocab, width))
    assert estimate(mine, planned(Layout(), zero=0)).time["matmul"] == pytest.approx(expected)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 32), (8, 16)])
def test_a_pipeline_of_equal_stages_idles_for_one_micro_batch_less_than_its_ranks(
    ranks: int, micro_batches: int
) -> None:
    # Narayanan et al., arXiv 2104.04473, section 2.2.1: (p - 1) / m. The vocabulary is so small that the ends weigh nothing.
    model = ModelSpec(layers=16, dim=2048, heads=16, kv_heads=16, ffn_dim=8192, vocab_size=64, ffn="gelu")
    unhosted = dataclasses.replace(MEGATRON, kernels=KernelFacts(accumulating_bytes=8, launch_s=0.0))
    mine = job(model, f"h100:{ranks}", batch=micro_batches, seq_len=2048, stack=unhosted)
    estimated = estimate(mine, planned(Layout(pipeline=ranks), zero=0))
    busy = sum(estimated.time[term] for term in ("matmul", "attention", "pointwise"))
    idle = (ranks - 1) / micro_batches
    assert estimated.time["bubble"] == pytest.approx(idle * busy, rel=0.05)
    communication_and_update = estimated.time["pipeline_comm"] + estimated.time["optimizer"]
    assert estimated.step_s == pytest.approx((1 + idle) * busy + communication_and_update, rel=0.02)


@settings(max_examples=30)
@given(
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from(["memory", "domain", "fabric", "host"]),
    st.sampled_from(["megatron", "phalanx", "deepspeed"]),
)
def test_twice_any_bandwidth_is_never_slower(layout: str, rate: str, stack: str) -> None:
    mine = job(stack=stack)
    offloaded = dataclasses.replace(LAYOUTS[layout], zero=2, offload_optimizer=True, offload_activations=True)
    assert estimate(with_rates(mine, **{rate: 2}), offloaded).step_s <= estimate(mine, offloaded).step_s


def test_model_flops_never_exceed_the_peak() -> None:
    for layout in LAYOUTS.values():
        assert 0 < estimate(job(), layout).mfu < 1


def test_twice_the_batch_takes_twice_the_computing() -> None:
    layout = LAYOUTS["dense"]
    once, twice = (estimate(job(batch=batch), layout).time for batch in (64, 128))
    for term in ("matmul", "attention", "pointwise", "tensor_comm"):
        assert twice[term] == pytest.approx(2 * once[term])
    assert twice["bubble"] == pytest.approx(once["bubble"])
    assert twice["optimizer"] == once["optimizer"]


def test_full_recomputation_repeats_the_forward_pass() -> None:
    layout = planned(Layout(shard=64), zero=1, recompute="full")
    time = estimate(job("llama3-70b", "b200:64"), layout).time
    # Forward is a third of forward and backward, but for the head, attention's backward and pointwise operations.
    assert time["recompute"] == pytest.approx((time["matmul"] + time["attention"]) / 3, rel=0.15)


def test_a_single_rank_waits_for_nobody() -> None:
    time = estimate(job("llama-1b", "h100:1", batch=4), planned(Layout(), zero=0)).time
    waits = ("bubble", "pipeline_comm", "tensor_comm", "context_comm", "expert_comm", "gradient_reduce")
    assert [time[term] for term in (*waits, "weight_gather", "scale_tax")] == [0] * 8


def test_the_scale_tax_grows_by_the_same_with_every_doubling() -> None:
    mine = job()
    tax = scale_tax(mine, np.array([1, 8, 16, 32, 4096]))
    assert tax == pytest.approx(mine.stack.tax_per_doubling * np.array([0, 0, 1, 2, 9]))


def test_a_stacks_scalar_scales_the_whole_step() -> None:
    slow = dataclasses.replace(MEGATRON, time_scalar=1.25)
    plain, scaled = (estimate(job(stack=stack), LAYOUTS["dense"]) for stack in ("megatron", slow))
    assert scaled.step_s == pytest.approx(1.25 * plain.step_s)
    assert scaled.time["stack_scalar"] == pytest.approx(0.25 * plain.step_s)


def test_arrays_of_layouts_take_what_single_layouts_take() -> None:
    mine = job("mixtral-8x7b", batch=128)
    wide = dataclasses.replace(
        one(Layout(shard=8, tensor=8, expert=8), zero=1),
        tensor=np.array([8, 4])[:, None],
        shard=np.array([8, 16])[:, None],
        recompute=np.array([0, 5])[None, :],
    )
    together = total(prepare(mine, wide).time())
    alone = [
        [estimate(mine, wide.at(2 * row + column, mine.modes)).closed_form_s for column in (0, 1)]
        for row in (0, 1)
    ]
    assert together == pytest.approx(np.array(alone))


def test_a_collective_that_computing_hides_slows_it_where_it_is_a_kernel_of_the_same_device() -> None:
    mine = job()
    engines = dataclasses.replace(mine.cluster.accelerator, vendor="Google")
    apart = dataclasses.replace(mine, cluster=dataclasses.replace(mine.cluster, accelerator=engines))
    layout = dataclasses.replace(LAYOUTS["flat"], zero=3)
    beside, free = estimate(mine, layout).time, estimate(apart, layout).time
    slowed = {term for term in beside if beside[term] > free[term]}
    assert slowed == {"weight_gather", "gradient_reduce", "scale_tax"}
