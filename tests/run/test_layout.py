"""Legal divisions of a fleet, and the problems of those that are not."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.run.fields import Problem, divisors_near
from phalanx.run.layout import (
    layout_of,
    layout_problems,
    micro_batches_per_slot,
    replica_ranks,
    stages_per_rank,
)
from phalanx.run.rules import check
from phalanx.run.spec import (
    MemorySpec,
    ModelSpec,
    MoeSpec,
    OptimizerSpec,
    ParallelSpec,
    RunSpec,
    RuntimeSpec,
    TrainSpec,
)

MODEL = ModelSpec(layers=8, dim=64, heads=8, kv_heads=4, ffn_dim=128)
MIXTURE = dataclasses.replace(MODEL, moe=MoeSpec(experts=8, ffn_dim=64))
MEMORY = MemorySpec()
TRAIN = TrainSpec(batch_size=32, slots=8, micro_batch_size=1, seq_len=64)


def run(
    model: ModelSpec = MODEL,
    *,
    train: TrainSpec = TRAIN,
    memory: MemorySpec = MEMORY,
    compiled: bool = False,
    **parallel: Any,
) -> RunSpec:
    return RunSpec(
        model=model,
        train=train,
        memory=memory,
        runtime=RuntimeSpec(compile=compiled),
        parallel=ParallelSpec(**parallel),
    )


def only_problem(spec: RunSpec, ranks: int = 0) -> Problem:
    (problem,) = layout_problems(spec, ranks)
    assert problem.remedy
    return problem


degrees = st.sampled_from([1, 2, 4])


@given(
    degrees,
    degrees,
    degrees,
    degrees,
    st.sampled_from([1, 2, 4, 8]),
    degrees,
    st.sampled_from(["none", "zero3"]),
)
def test_a_legal_layout_uses_every_rank_once_and_folds_its_experts(
    pipeline: int, context: int, tensor: int, data: int, expert: int, shard: int, sharding: str
) -> None:
    spec = run(
        MIXTURE,
        pipeline=pipeline,
        context=context,
        tensor=tensor,
        expert=expert,
        sharding=sharding,
        shard_ranks=shard if sharding == "zero3" else 0,
    )
    ranks = pipeline * context * tensor * data
    if layout_problems(spec, ranks):
        return
    layout = layout_of(spec.parallel, ranks)
    assert layout.ranks == math.prod(layout.degrees.values()) == ranks
    assert layout.expert_shard * layout.expert * layout.expert_tensor == layout.shard * layout.model_ranks
    assert layout.shard % layout.team == 0
    assert spec.train.slots % layout.team == 0
    assert ranks % replica_ranks(spec.parallel) == 0


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("parallel.tensor", run(dataclasses.replace(MODEL, ffn_dim=130), tensor=4)),
        ("parallel.tensor", run(dataclasses.replace(MODEL, heads=12, head_dim=8, kv_heads=6), tensor=4)),
        ("train.seq_len", run(train=dataclasses.replace(TRAIN, seq_len=60), context=4)),
        ("model.tie_embeddings", run(dataclasses.replace(MODEL, tie_embeddings=True), pipeline=2)),
        ("model.mtp_depth", run(dataclasses.replace(MODEL, mtp_depth=1), pipeline=2)),
        ("parallel.pipeline", run(pipeline=16)),
        ("parallel.pipeline", run(pipeline_split=(4, 4))),
        ("parallel.pipeline_split", run(pipeline=2, pipeline_split=(4, 5))),
        ("parallel.pipeline_split", run(pipeline=2, pipeline_split=(8, 0))),
        ("parallel.pipeline_stages", run(pipeline=2, pipeline_stages=2)),
        ("runtime.compile", run(pipeline=2, pipeline_schedule="dualpipev", compiled=True)),
        ("parallel.expert", run(expert=2)),
        ("parallel.expert", run(MIXTURE, expert=3)),
        ("parallel.expert", run(dataclasses.replace(MODEL, moe=MoeSpec(experts=12, ffn_dim=64)), expert=3, tensor=2)),
        ("parallel.expert_tensor", run(MIXTURE, expert_tensor=2)),
        ("train.slots", run(MIXTURE, train=dataclasses.replace(TRAIN, slots=2), expert=4)),
        ("parallel.async_tensor", run(tensor=2, async_tensor=True)),
        ("memory.recompute", run(memory=MemorySpec(recompute="selective"), compiled=True)),
        ("memory.recompute", run(memory=MemorySpec(recompute="budget"))),
        ("parallel.sharding", run(MIXTURE, sharding="zero1")),
        ("parallel.sharding", run(context=2, sharding="zero1")),
        ("parallel.sharding", run(train=dataclasses.replace(TRAIN, reduction="integer"), sharding="zero1")),
    ],
)  # fmt: skip
def test_what_no_fleet_could_do_is_refused_with_the_field_and_a_remedy(path: str, spec: RunSpec) -> None:
    assert only_problem(spec).path == path
    assert path in {problem.path for problem in check(spec)}


@pytest.mark.parametrize(
    ("path", "spec", "ranks"),
    [
        ("parallel.ranks", run(pipeline=2, tensor=2), 6),
        ("parallel.ranks", run(), 9),
        ("parallel.shard_ranks", run(shard_ranks=4), 6),
        ("parallel.expert", run(MIXTURE, expert=4, shard_ranks=2), 8),
        ("parallel.expert", run(MIXTURE, expert=4, sharding="none"), 4),
    ],
)
def test_what_this_number_of_ranks_cannot_do_is_refused_too(path: str, spec: RunSpec, ranks: int) -> None:
    assert layout_problems(spec, 0) == []
    assert only_problem(spec, ranks).path == path


def test_only_adamw_keeps_a_narrow_state() -> None:
    spec = RunSpec(optimizer=OptimizerSpec(name="muon", state="bf16"))
    assert only_problem(spec).path == "optimizer.state"


INT8 = OptimizerSpec(state="int8")


@pytest.mark.parametrize(
    ("model", "parallel", "remedy"),
    [
        (dataclasses.replace(MODEL, ffn_dim=96), {"tensor": 2}, "parallel.tensor = 1"),
        (dataclasses.replace(MODEL, dim=256, ffn_dim=384), {"tensor": 4}, "parallel.tensor = 2"),
        (MIXTURE, {"tensor": 4}, "parallel.tensor = 1"),
        (dataclasses.replace(MIXTURE, dim=512), {"tensor": 2, "expert_tensor": 2}, "parallel.expert_tensor = 1"),
    ],
)  # fmt: skip
def test_8_bit_state_is_refused_where_tensor_ranks_would_cut_through_a_block(
    model: ModelSpec, parallel: dict[str, Any], remedy: str
) -> None:
    spec = run(model, **parallel)
    problem = only_problem(dataclasses.replace(spec, optimizer=INT8))
    assert problem.path == "optimizer.state"
    assert problem.remedy.endswith(remedy)
    for state in ("fp32", "bf16"):
        assert not layout_problems(dataclasses.replace(spec, optimizer=OptimizerSpec(state=state)), 0)


def test_8_bit_state_goes_with_tensor_ranks_that_hold_whole_blocks() -> None:
    spec = run(dataclasses.replace(MODEL, dim=256, ffn_dim=256), tensor=2)
    assert not layout_problems(dataclasses.replace(spec, optimizer=INT8), 2)


def test_only_the_plain_state_of_adamw_lives_elsewhere() -> None:
    memory = MemorySpec(offload_optimizer="file")
    assert layout_problems(RunSpec(memory=memory), 0) == []
    spec = RunSpec(memory=memory, optimizer=OptimizerSpec(name="soap"))
    assert only_problem(spec).path == "memory.offload_optimizer"


def test_schedules_have_their_own_number_of_stages_unless_one_is_set() -> None:
    names = ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev")
    assert [stages_per_rank(ParallelSpec(pipeline_schedule=name)) for name in names] == [1, 1, 2, 2, 2]  # type: ignore[arg-type]
    assert stages_per_rank(ParallelSpec(pipeline_schedule="interleaved", pipeline_stages=3)) == 3


def test_a_slot_has_as_many_micro_batches_as_fit() -> None:
    assert micro_batches_per_slot(run()) == 4
    assert micro_batches_per_slot(run(train=dataclasses.replace(TRAIN, micro_batch_size=0))) == 1


@given(st.integers(1, 5000), st.integers(1, 100))
def test_the_divisors_that_are_offered_are_the_nearest(number: int, target: int) -> None:
    offered = [int(text) for text in divisors_near(number, target).split(", ")]
    every = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    assert offered == sorted(sorted(every, key=lambda divisor: abs(divisor - target))[:4])


def test_a_message_has_the_key_heads_that_a_run_leaves_out_as_they_are_resolved() -> None:
    odd = dataclasses.replace(MODEL, heads=5, head_dim=8, kv_heads=0)
    findings = [problem.finding for problem in layout_problems(run(odd, tensor=2), 0)]
    assert any("model.kv_heads = 5 cannot be shared by 2 tensor ranks" in text for text in findings)
