"""Flows of a step against the closed forms of the papers that describe each axis."""

from __future__ import annotations

import pytest

from phalanx.model.facts.shape import count
from phalanx.run.layout import Layout
from phalanx_plan.step_cost.traffic import Flow, flows
from phalanx_plan.workload.candidates import PlannedLayout
from phalanx_plan.workload.stacks import TrainingJob
from plan.jobs import job, planned


def sent(work: TrainingJob, layout: PlannedLayout, axis: str, **how: bool) -> float:
    """Bytes that a rank sends along an axis, to each of its neighbors in a chain."""
    return sum(flow.sent_bytes for flow in flows(work, layout, **how) if flow.axis == axis)


def test_sharded_weights_are_gathered_twice_a_micro_batch_and_gradients_reduced_once() -> None:
    work = job("llama3-8b", "h100:64", stack="fsdp")
    layout = planned(Layout(shard=64), zero=3)
    parameters = count(work.workload.model, work.workload.seq_len).parameters
    data = work.stack.data
    # ZeRO (arXiv 1910.02054, section 7): weights forward and backward, and gradients, each (n - 1)/n of the whole.
    expected = (2 * data.gather_bytes + data.reduce_bytes) * parameters * 63 / 64
    assert sent(work, layout, "shard") == pytest.approx(expected, rel=1e-6)
    assert {flow.axis for flow in flows(work, layout)} == {"shard"}


def test_tensor_ranks_exchange_the_hidden_states_around_each_pair_of_matrices() -> None:
    work = job("llama3-8b", "h100:8")
    model = work.workload.model
    layout = planned(Layout(tensor=8), zero=0)
    tokens = work.workload.batch * work.workload.seq_len
    # Korthikanti et al. (arXiv 2205.05198, section 4.2.2): forward two gathers and two scatters a layer, backward as many, and the
    # inputs of both pairs once more since they are not kept.
    rounds = 4 + 4 + (0 if work.stack.activations.gathered_inputs else 2)
    layers = rounds * model.layers * tokens * model.dim * 2 * 7 / 8
    ends = sent(work, layout, "tensor") - layers
    # The embedding's scatter and the head's gather, each with its mirror image.
    assert 0 < ends <= 6 * tokens * model.dim * 2


def test_stages_send_the_hidden_states_of_every_micro_batch_to_both_neighbors() -> None:
    work = job("llama3-8b", "h100:32", batch=64)
    layout = planned(Layout(pipeline=4, shard=2, context=2, tensor=2), zero=1)
    rows = work.workload.seq_len / 2 / 2
    expected = 32 * rows * work.workload.model.dim * 2
    (flow,) = (each for each in flows(work, layout) if each.axis == "pipeline")
    assert flow == Flow("pipeline", "chain", 4, 8, pytest.approx(expected))


def test_every_copy_of_a_token_goes_to_its_expert_and_back_and_so_do_gradients() -> None:
    work = job("mixtral-8x7b", "h100:8", batch=8)
    model = work.workload.model
    assert model.moe is not None
    layout = planned(Layout(shard=8, expert=8), zero=1)
    copies = work.workload.seq_len * model.moe.per_token * work.workload.imbalance
    expected = 4 * model.layers * copies * model.dim * 2 * 7 / 8
    assert sent(work, layout, "expert") == pytest.approx(expected)


def test_a_recomputed_block_sends_its_forward_exchanges_twice() -> None:
    work = job("llama3-8b", "h100:8")
    once = sent(work, planned(Layout(tensor=8), zero=0), "tensor")
    twice = sent(work, planned(Layout(tensor=8), zero=0, recompute="full"), "tensor")
    assert 1.3 < twice / once < 1.5


def test_replicas_add_up_shards_in_a_second_step_that_carries_less() -> None:
    work = job("llama3-8b", "h100:64", stack="fsdp")
    layout = planned(Layout(replicate=8, shard=8), zero=3)
    parameters = count(work.workload.model, work.workload.seq_len).parameters
    among = 2 * work.stack.data.reduce_bytes * parameters / 8 * 7 / 8
    assert sent(work, layout, "replicate") == pytest.approx(among, rel=1e-6)


@pytest.mark.parametrize(("spread", "pattern"), [(True, "all_to_all"), (False, "ring")])
def test_reproducible_sums_are_spread_over_all_owners(spread: bool, pattern: str) -> None:
    work = job("llama3-8b", "h100:64")
    all_flows = flows(work, planned(Layout(shard=64), zero=1), spread_sums=spread)
    assert pattern in {flow.pattern for flow in all_flows}
    volume = {axis: sum(each.sent_bytes for each in all_flows if each.axis == axis) for axis in ("shard",)}
    assert volume["shard"] == pytest.approx(sent(work, planned(Layout(shard=64), zero=1), "shard"))


def test_one_rank_sends_nothing() -> None:
    assert flows(job("llama3-8b", "h100:1"), planned(Layout(), zero=0)) == ()
