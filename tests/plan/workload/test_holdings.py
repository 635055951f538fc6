"""The planner and ``phalanx.model.facts.holdings`` agree on what a rank holds, for every layout and every rank."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from phalanx.model.facts.holdings import RankPlace, holding, state_bytes
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.layout import SPLIT_BACKWARD, layout_of, layout_problems, stages_per_rank
from phalanx.run.spec import (
    MlaSpec,
    ModelSpec,
    MoeSpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
    RuntimeSpec,
    TrainSpec,
)
from phalanx_plan.step_cost import memory
from phalanx_plan.step_cost.estimate import prepare
from phalanx_plan.workload import stacks
from phalanx_plan.workload.holdings import places
from plan.jobs import job, one

_MODELS = st.builds(
    ModelSpec,
    layers=st.integers(3, 9),
    dim=st.sampled_from([64, 96]),
    heads=st.just(8),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    ffn_dim=st.sampled_from([128, 192]),
    ffn=st.sampled_from(["swiglu", "gelu"]),
    vocab_size=st.sampled_from([257, 512]),
    tie_embeddings=st.booleans(),
    attention_bias=st.booleans(),
    qk_norm=st.booleans(),
    mla=st.sampled_from([None, MlaSpec(query_rank=24), MlaSpec()]),
    moe=st.one_of(
        st.none(),
        st.builds(
            MoeSpec,
            experts=st.sampled_from([4, 8]),
            ffn_dim=st.just(64),
            shared=st.sampled_from([0, 1]),
            first_dense=st.sampled_from([0, 1]),
            every=st.sampled_from([1, 2]),
        ),
    ),
    mtp_depth=st.sampled_from([0, 0, 1]),
)
_PARALLEL = st.builds(
    ParallelSpec,
    sharding=st.sampled_from(["none", "zero2", "zero3"]),
    shard_ranks=st.sampled_from([0, 2]),
    tensor=st.sampled_from([1, 2, 4]),
    context=st.sampled_from([1, 2]),
    pipeline=st.sampled_from([1, 2, 3]),
    pipeline_schedule=st.sampled_from(["1f1b", "interleaved", "zbv"]),
    expert=st.sampled_from([1, 2, 4]),
    expert_tensor=st.sampled_from([1, 2]),
)
_OPTIMIZERS = st.one_of(
    st.builds(OptimizerSpec, state=st.sampled_from(["fp32", "bf16", "int8"])),
    st.builds(OptimizerSpec, name=st.sampled_from(["adafactor", "muon", "shampoo", "soap"])),
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(_MODELS, _PARALLEL, st.sampled_from([1, 2, 4, 6]), st.sampled_from(["bf16", "fp32"]), _OPTIMIZERS)
def test_state_of_every_kind_is_what_the_trainer_holds(
    model: ModelSpec, parallel: ParallelSpec, data_ranks: int, compute: str, optimizer: OptimizerSpec
) -> None:
    spec = RunSpec(
        model=resolve(model),
        parallel=parallel,
        train=TrainSpec(batch_size=288, seq_len=64, slots=12, micro_batch_size=4),
        precision=PrecisionSpec(compute=compute),  # type: ignore[arg-type]
        runtime=RuntimeSpec(device="cuda"),
        optimizer=optimizer,
    )
    ranks = parallel.pipeline * parallel.context * parallel.tensor * data_ranks
    assume(not layout_problems(spec, ranks))
    layout = layout_of(parallel, ranks)
    workload = stacks.workload_of(spec)
    mine = job(spec.model, batch=288, seq_len=64, stack=stacks.stack_of(spec))
    mine = type(mine)(workload, mine.stack, mine.cluster, mine.profile)
    per_rank = stages_per_rank(parallel) if parallel.pipeline > 1 else 1
    candidates = one(
        layout,
        schedule=parallel.pipeline_schedule if parallel.pipeline > 1 else "1f1b",
        stages_per_rank=per_rank,
        zero=3 if parallel.sharding == "zero3" else 2,
        micro_batch=4,
    )
    width = 2 if compute == "bf16" else 4
    evaluation = prepare(mine, candidates)
    for kind in range(len(evaluation.table)):
        place = evaluation.table[kind]
        # The last tensor rank may have a row of the vocabulary more.
        of_ranks = [
            state_bytes(spec, layout, holding(spec, layout, RankPlace(int(place.rank[0]), 0, tensor)), width)
            for tensor in {0, layout.tensor - 1}
        ]
        expected = {name: max(each[name] for each in of_ranks) for name in of_ranks[0]}
        expected["master weights"] = expected.pop("weights")
        planned_bytes = memory.state_bytes(evaluation, place)
        assert {name: size.item() for name, size in planned_bytes.items() if size.any()} == pytest.approx(
            expected
        )


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_every_rank_of_a_pipeline_is_like_one_of_its_places(schedule: str) -> None:
    mine = job("deepseek-v3", stack="phalanx")
    per_rank, folded = (1 if schedule == "1f1b" else 2), schedule in SPLIT_BACKWARD
    table = places(mine.workload, mine.stack, [(8, per_rank, folded)])
    dense, mixture = table.layers
    assert (dense, mixture) == (3, 58)
    assert table.rank.min() == 0
    assert table.embedding[table.rank == 0].all()
