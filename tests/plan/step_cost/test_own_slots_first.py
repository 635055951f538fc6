"""ZeRO-1 of this project: a rank adds its own slots, whole, and exchanges them once a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.hardware import catalog
from phalanx.hardware.cluster import Fact
from phalanx.model.facts.holdings import exchanged, held_bytes
from phalanx.parallel.reduction.tree import SlotTree
from phalanx.run.layout import Layout, layout_problems
from phalanx.run.spec import ModelSpec, ParallelSpec, RunSpec, TrainSpec
from phalanx_plan.search.layout_text import estimate_written, run_of_layout, written_layout
from phalanx_plan.search.options import Options
from phalanx_plan.search.query import job_of
from phalanx_plan.search.search import search
from phalanx_plan.step_cost.estimate import Estimate, estimate
from phalanx_plan.step_cost.traffic import flows
from phalanx_plan.workload.stacks import PHALANX
from plan.jobs import job, planned

RANKS = 8


def predicted(zero: int, slots_per_rank: int, micro_batches: int = 1) -> Estimate:
    """The estimate of a dense model on eight ranks."""
    slots = RANKS * slots_per_rank
    mine = job("llama-1b", "h100:8", batch=slots * micro_batches, seq_len=1024, stack=PHALANX)
    mine = replace(mine, workload=replace(mine.workload, slots=slots))
    return estimate(mine, planned(Layout(shard=RANKS), zero=zero, micro_batch=1))


@pytest.mark.parametrize(
    ("slots_per_rank", "micro_batches", "bytes_per_element"),
    [(2, 1, 2), (4, 1, 2 + 4), (8, 1, 2 + 4 + 4), (2, 2, 4), (8, 2, 4 + 4 + 4), (3, 1, 2 + 2)],
)
def test_a_rank_holds_a_whole_sum_for_each_level_of_its_own_slots(
    slots_per_rank: int, micro_batches: int, bytes_per_element: int
) -> None:
    """The lowest is a slot's gradient, in bf16 if the slot is one micro-batch."""
    full, shares = (predicted(zero, slots_per_rank, micro_batches).memory for zero in (1, 2))
    elements = 2 * shares["compute copy"] / 4  # all weights, in bf16
    sums = full["gradients"] + full["open sums"]
    assert sums == pytest.approx(bytes_per_element * elements)
    assert full["master weights"] == shares["master weights"]
    assert full["moments"] == shares["moments"]


def kept_and_sent(slots: int, rank: int, leaf_bytes: int) -> tuple[int, int]:
    """Bytes of an element of the whole sums of a rank: the most before one of its slots, and their number at the end."""
    tree: SlotTree[None] = SlotTree(8 * RANKS * slots, lambda _left, _right: None)
    most = 0
    for slot in range(rank * slots, (rank + 1) * slots):
        most = max(most, sum(4 if level else leaf_bytes for level, _ in tree.nodes))
        tree.push(slot, None)
    return most, len(tree.nodes)


@given(st.integers(1, 300), st.sampled_from([2, 4]))
def test_slots_that_are_no_whole_subtree_are_held_and_exchanged_as_several_sums(
    slots: int, leaf_bytes: int
) -> None:
    kept, sent = zip(*(kept_and_sent(slots, rank, leaf_bytes) for rank in range(RANKS)), strict=True)
    assert held_bytes(slots, leaf_bytes) == max(kept)
    assert exchanged(slots) == max(sent)


def test_a_rank_with_three_slots_exchanges_two_sums() -> None:
    mine = job("llama-1b", "h100:8", batch=3 * RANKS, seq_len=1024, stack=PHALANX)
    mine = replace(mine, workload=replace(mine.workload, slots=3 * RANKS))
    sent = [
        sum(flow.sent_bytes for flow in flows(mine, planned(Layout(shard=RANKS), zero=zero, micro_batch=1)))
        for zero in (1, 2)
    ]
    gathered = 2 * mine.workload.counts.parameters * (RANKS - 1) / RANKS
    # Three gradients in bf16, and two sums in fp32: no byte is saved.
    assert (sent[1] - gathered) / (sent[0] - gathered) == pytest.approx(3 * 2 / (2 * 4))


def test_the_search_takes_it_where_it_fits_and_exchanges_slot_by_slot_where_it_does_not() -> None:
    mine = job("llama-1b", "h100:64", batch=512, seq_len=2048, stack=PHALANX)
    mine = replace(mine, workload=replace(mine.workload, slots=512))
    options = Options(offload=False, require=("pp<=1", "tp<=1", "cp<=1"))
    chosen = search(mine, options).best[0]
    assert chosen.layout.zero == 1
    accelerator = mine.cluster.accelerator
    less = replace(accelerator, memory_bytes=Fact(0.9 * chosen.memory_bytes, "test"))
    tighter = replace(mine, cluster=replace(mine.cluster, accelerator=less))
    instead = search(tighter, options).best[0]
    assert instead.layout.zero > 1
    assert instead.step_s > chosen.step_s


def test_gradients_cross_the_network_once_a_step() -> None:
    mine = job("llama-1b", "h100:64", batch=512, seq_len=2048, stack=PHALANX)
    mine = replace(mine, workload=replace(mine.workload, slots=512))
    once, each_slot = (
        sum(flow.sent_bytes for flow in flows(mine, planned(Layout(shard=64), zero=zero, micro_batch=1)))
        for zero in (1, 2)
    )
    gathered = 2 * mine.workload.counts.parameters * 63 / 64
    # Eight gradients in bf16, and one sum in fp32.
    assert (each_slot - gathered) / (once - gathered) == pytest.approx(8 * 2 / 4)


def test_a_planned_layout_is_a_run_that_the_trainer_takes() -> None:
    spec = RunSpec(
        model=ModelSpec(preset="llama-1b"),
        train=TrainSpec(batch_size=512, slots=512, seq_len=2048, micro_batch_size=1),
        parallel=ParallelSpec(sharding="zero1"),
    )
    mine = job_of(spec, catalog.cluster("h100:64"))
    layout = written_layout(spec, mine, 64)
    assert layout.zero == 1
    run = run_of_layout(spec, mine, layout)
    assert run.parallel.sharding == "zero1"
    assert layout_problems(run, 64) == []


def test_fast_sums_are_exchanged_once_a_step_by_zero2_too_and_have_the_same_plan() -> None:
    spec = RunSpec(
        model=ModelSpec(preset="llama-1b"),
        train=TrainSpec(batch_size=64, slots=64, seq_len=1024, micro_batch_size=1, reduction="fast"),
    )
    first, second = (
        estimate_written(
            replace(spec, parallel=ParallelSpec(sharding=sharding)), catalog.cluster("h100:8"), RANKS
        )
        for sharding in ("zero1", "zero2")
    )
    assert (first.step_s, first.memory) == (second.step_s, second.memory)
