"""Time by term: sums, monotony in every rate of the hardware, and closed forms of what single terms must be."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.hardware.cluster import Cluster, Fact
from phalanx.hardware.profiles import profile_of
from phalanx.plan.step_cost.estimate import estimate, prepare
from phalanx.plan.step_cost.memory import total
from phalanx.plan.step_cost.step_time import scale_tax
from phalanx.plan.workload.foreign_stacks import MEGATRON
from phalanx.plan.workload.stacks import Job
from phalanx.run.layout import Layout
from plan.jobs import LAYOUTS, job, one, planned


def faster(fact: Fact, factor: float) -> Fact:
    """The same fact with another value."""
    return dataclasses.replace(fact, value=fact.value * factor)


def with_rates(mine: Job, *, memory: float = 1, domain: float = 1, fabric: float = 1, host: float = 1) -> Job:
    """The same job with bandwidths multiplied."""
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
def test_the_terms_add_up_to_the_step_and_none_is_negative(name: str) -> None:
    found = estimate(job(), LAYOUTS[name])
    assert found.step_s == sum(found.time.values())
    assert all(seconds >= 0 for seconds in found.time.values())
    assert found.closed_form_s == pytest.approx(found.step_s, rel=0.05)


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
        found = estimate(job(), layout)
        assert 0 < found.mfu < 1
        assert found.mfu == pytest.approx(
            found.flops_per_token * found.tokens / found.step_s / found.ranks / found.peak_flops
        )


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
