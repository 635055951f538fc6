"""The layouts that ``run.layout`` accepts one by one are those that the planner's search enumerates in arrays."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from random import Random

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phalanx.hardware.catalog import cluster
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.layout import layout_problems
from phalanx.run.rules import check
from phalanx.run.spec import ModelSpec, MoeSpec, OptimizerSpec, RunSpec, RuntimeSpec, TrainSpec
from phalanx_plan.search.layout_text import parallel_of, run_of_layout, written_layout
from phalanx_plan.search.options import Options
from phalanx_plan.search.query import job_of
from phalanx_plan.search.space import exclusions, space
from phalanx_plan.workload.candidates import PlannedLayout, divisors
from phalanx_plan.workload.stacks import TrainingJob

MICRO_BATCHES, STAGES = (1, 2, 3), (2, 3)
SCHEDULES = (("1f1b", 1), *(("interleaved", stages) for stages in STAGES), ("zbv", 2), ("dualpipev", 2))
"""The search leaves out GPipe, which waits as long as 1F1B and holds more."""


@st.composite
def runs(draw: st.DrawFn) -> RunSpec:
    """Small runs that are possible on one rank, of all kinds of models."""
    heads = draw(st.sampled_from([2, 4, 6, 12]))
    mixture = draw(st.booleans())
    moe = MoeSpec(
        experts=draw(st.sampled_from([4, 6, 8])),
        ffn_dim=draw(st.sampled_from([32, 48, 64])),
        shared=draw(st.sampled_from([0, 1])),
    )
    model = ModelSpec(
        layers=draw(st.integers(1, 6)),
        dim=16 * heads,
        heads=heads,
        head_dim=draw(st.sampled_from([16, 64])),
        kv_heads=draw(st.sampled_from(list(divisors(heads)))),
        ffn_dim=draw(st.sampled_from([96, 128, 192])),
        vocab_size=512,
        tie_embeddings=draw(st.booleans()),
        mtp_depth=draw(st.sampled_from([0, 0, 0, 1])),
        moe=moe if mixture else None,
        # The search looks at no teams of experts beside lanes or tiles, which the trainer accepts for some runs.
        lanes=0 if mixture else draw(st.sampled_from([0, 0, 2, 4])),
        context_tiles=0 if mixture else draw(st.sampled_from([0, 0, 2, 4])),
    )
    batch = draw(st.sampled_from([8, 12, 24]))
    train = TrainSpec(
        batch_size=batch,
        slots=draw(st.sampled_from(list(divisors(batch)))),
        seq_len=draw(st.sampled_from([48, 64, 72])),
    )
    in_pieces = model.lanes or model.context_tiles
    runtime = RuntimeSpec(device="cuda", compile=not in_pieces and draw(st.booleans()))
    optimizer = OptimizerSpec(state=draw(st.sampled_from(["fp32", "int8"])))
    spec = RunSpec(model=resolve(model), train=train, runtime=runtime, optimizer=optimizer)
    assume(not in_pieces or not check(spec))
    assert not check(spec)
    return spec


def offered(job: TrainingJob, options: Options) -> Iterator[PlannedLayout]:
    """Every layout of the space that no choice on the free axes excludes."""
    candidates = space(job, options).candidates
    masks = exclusions(job, candidates, options).values()
    legal = ~reduce(np.logical_or, masks, np.zeros((1,), dtype=bool))
    for flat in np.flatnonzero(np.broadcast_to(legal, candidates.shape)).tolist():
        yield candidates.at(flat, job.modes)


def within_axes(spec: RunSpec, ranks: int) -> Iterator[PlannedLayout]:
    """Every combination of the values that the space's axes have, on at most so many ranks, all of them one copy."""
    contexts = [context for context in (1, 2, 4, 8) if context <= ranks]
    experts = list(divisors(spec.model.moe.experts)) if spec.model.moe else [1]
    for tensor, context, pipeline, data in itertools.product(
        range(1, ranks + 1), contexts, range(1, spec.model.layers + 1), divisors(spec.train.slots)
    ):
        if tensor * context * pipeline * data > ranks:
            continue
        schedules = SCHEDULES if pipeline > 1 else SCHEDULES[:1]
        for micro_batch, (schedule, stages), expert, expert_ranks in itertools.product(
            MICRO_BATCHES, schedules, experts, {1, tensor} if spec.model.moe else {1}
        ):
            yield PlannedLayout(
                tensor=tensor,
                context=context,
                pipeline=pipeline,
                stages_per_rank=stages,
                expert=expert,
                expert_tensor=expert_ranks,
                shard=data,
                micro_batch=micro_batch,
                schedule=schedule,  # type: ignore[arg-type]
            )


def is_legal(spec: RunSpec, layout: PlannedLayout) -> bool:
    """True if the trainer accepts the run in this layout."""
    train = replace(spec.train, micro_batch_size=layout.micro_batch)
    run = replace(spec, parallel=parallel_of(spec, layout), train=train)
    return not check(run) and not layout_problems(run, layout.ranks)


@settings(max_examples=25, deadline=None)
@given(runs(), st.integers(1, 8))
def test_what_the_trainer_accepts_within_the_axes_is_what_the_search_looks_at(
    spec: RunSpec, ranks: int
) -> None:
    job = job_of(spec, cluster("h100:8"))
    options = Options(
        gpus=(ranks,), least_use=1e-9, micro_batches=MICRO_BATCHES, stages_per_rank=STAGES, offload=False
    )
    looked_at = {
        replace(layout, zero=3, recompute="none", precision="bf16")
        for layout in offered(job, options)
        if layout.replicate == 1 or layout.shard == layout.data
    }
    accepted = {layout for layout in within_axes(spec, ranks) if is_legal(spec, layout)}
    assert looked_at == accepted


@settings(max_examples=25, deadline=None)
@given(runs(), st.integers(1, 32), st.randoms(use_true_random=False))
def test_a_layout_that_is_looked_at_can_be_trained_and_is_read_back_from_its_run_file(
    spec: RunSpec, ranks: int, random: Random
) -> None:
    job = job_of(spec, cluster("h100:32"))
    options = Options(
        gpus=(ranks,),
        least_use=1e-9,
        micro_batches=MICRO_BATCHES,
        stages_per_rank=STAGES,
        offload=spec.optimizer.state == "fp32",
    )
    layouts = list(offered(job, options))
    for layout in random.sample(layouts, min(len(layouts), 60)):
        run = run_of_layout(spec, job, layout)
        assert not check(run)
        assert written_layout(run, job, layout.ranks) == layout
