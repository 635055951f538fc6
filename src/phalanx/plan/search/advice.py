"""Follow-ups to a plan: a run file for the winner, and the size of the fleet or of the memory that would fit."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from phalanx.hardware.overrides import with_value
from phalanx.plan.search.query import OWN, RequestError, problems_of, steps_for
from phalanx.plan.search.search import search
from phalanx.plan.search.space.options import Options
from phalanx.plan.step_cost.estimate import estimate
from phalanx.plan.workload.planned_layout import PlannedLayout
from phalanx.plan.workload.stacks import Job
from phalanx.run.spec import MemorySpec, ParallelSpec, PrecisionSpec, RunSpec

_MOST_DOUBLINGS = 7


def run_of_layout(spec: RunSpec, job: Job, layout: PlannedLayout, tokens: float | None = None) -> RunSpec:
    """The run of ``spec`` in ``layout``, ready to be trained.

    Raises ``RequestError`` where the trainer cannot do what the plan says.
    """
    if job.stack.name != OWN:
        raise RequestError(f"a run file is for this project's trainer: plan without --stack {job.stack.name}")
    found = replace(
        spec,
        parallel=parallel_of(spec, layout),
        memory=_memory(spec.memory, layout),
        train=replace(
            spec.train,
            micro_batch_size=layout.micro_batch,
            slots=job.workload.slots or layout.data,
            steps=steps_for(tokens, job.workload.tokens) if tokens else spec.train.steps,
        ),
        precision=_precision(spec, layout),
    )
    problems = problems_of(found, layout.ranks)
    if problems:
        raise RequestError(f"the trainer cannot run this layout:\n{problems}")
    return found


def parallel_of(spec: RunSpec, layout: PlannedLayout) -> ParallelSpec:
    """The ``[parallel]`` section that describes a layout."""
    many = layout.pipeline > 1
    sharding: Any = "zero3" if layout.zero == 3 else "zero2" if layout.shard > 1 else "none"
    return replace(
        spec.parallel,
        ranks=layout.ranks,
        sharding=sharding,
        # One rank of a copy may still share its state, over the context axis; 0 would mean all ranks.
        shard_ranks=0 if layout.replicate == 1 or sharding == "none" else layout.shard,
        tensor=layout.tensor,
        context=layout.context,
        pipeline=layout.pipeline,
        pipeline_schedule=layout.schedule if many else "1f1b",
        pipeline_stages=layout.stages_per_rank if many else 0,
        pipeline_split=(),
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
    )


def _memory(memory: MemorySpec, layout: PlannedLayout) -> MemorySpec:
    def place(name: str, before: str) -> Any:
        return ("host" if before == "none" else before) if getattr(layout, name) else "none"

    recompute: Any = layout.recompute
    return replace(
        memory,
        recompute=recompute,
        offload_activations=place("offload_activations", memory.offload_activations),
        offload_optimizer=place("offload_optimizer", memory.offload_optimizer),
    )


def _precision(spec: RunSpec, layout: PlannedLayout) -> PrecisionSpec:
    name = layout.precision
    if name == "fp8" and spec.precision.matmul == "compute":
        return replace(spec.precision, matmul="fp8-rowwise")
    return spec.precision


def least_change(job: Job, layout: PlannedLayout, *, offload: bool) -> str:
    """The change that would make a layout fit, on the same ranks and with the shortest step. ``offload``: its state may be moved to host memory."""
    options = [
        replace(
            layout,
            recompute=mode.name,
            micro_batch=micro_batch,
            offload_activations=activations,
            offload_optimizer=optimizer,
        )
        for mode in job.modes
        for micro_batch in sorted({1, layout.micro_batch})
        for activations in sorted({layout.offload_activations, offload})
        for optimizer in sorted({layout.offload_optimizer, offload})
    ]
    fitting = []
    for layout_option in options:
        with suppress(ValueError):  # the software, or the batch, does not allow it
            fitting.append(estimate(job, layout_option))
    fitting = [option for option in fitting if option.fits]
    if not fitting:
        return (
            "no recomputation, smaller micro-batch or offload makes this layout fit: divide the model further"
        )
    best = min(fitting, key=lambda option: option.step_s)
    words = [word for word in str(best.layout).split(",") if word not in str(layout).split(",")]
    return f"with {','.join(words)} this layout fits: {best.step_s:.4g} s a step"


def what_would_fit(job: Job, options: Options) -> str:
    """Returns how many accelerators or how much memory would do where nothing fits; empty if neither helps."""
    advice = []
    count = max(options.gpus or (job.cluster.accelerators,))
    for doubling in range(1, _MOST_DOUBLINGS + 1):
        if _fits(job, replace(options, gpus=(count << doubling,))):
            advice.append(f"{count << doubling:,} accelerators of the same kind would do")
            break
    have = job.cluster.accelerator.memory_bytes.value
    for factor in (1.25, 1.5, 2, 3, 4, 8):
        larger = with_value(job.cluster, "accelerator.memory_bytes", have * factor)
        if _fits(replace(job, cluster=larger), options):
            advice.append(
                f"so would {have * factor / 1e9:,.0f} GB of memory in each, {factor:g} times as much"
            )
            break
    return "; ".join(advice)


def _fits(job: Job, options: Options) -> bool:
    try:
        search(job, replace(options, finalists=1, top=1))
    except ValueError:
        return False
    return True
