"""Layouts in the words of users: ``--layout tp=8,pp=16,dp=128``, a run file for a layout, and the fleet or memory that would fit.

Fields that such a text leaves out come from the run file, and ``file`` alone is the run file's layout. The names of the
fields are in ``phalanx_plan.workload.candidates``.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from phalanx.hardware.cluster import Cluster, with_value
from phalanx.run.layout import layout_of, replica_ranks, stages_per_rank
from phalanx.run.spec import MemorySpec, ParallelSpec, PrecisionSpec, RunSpec
from phalanx_plan.search.options import Options
from phalanx_plan.search.query import OWN, PlanRequestError, job_of, precision_of, problems_of, steps_for
from phalanx_plan.search.search import search
from phalanx_plan.step_cost.estimate import Estimate, estimate
from phalanx_plan.workload.candidates import (
    LAYOUT_FIELDS,
    PRECISIONS,
    SCHEDULES,
    PlannedLayout,
    layout_field,
    parts_of,
)
from phalanx_plan.workload.stacks import TrainingJob


def written_layout(spec: RunSpec, job: TrainingJob, ranks: int) -> PlannedLayout:
    """Return the layout of the run file on ``ranks`` ranks, with the stack's nearest ZeRO stage. It need not be legal.

    A run file without a micro-batch size gets a micro-batch of a complete slot. Raises ``PlanRequestError`` if the
    cluster lacks the number format.
    """
    parallel, memory, train = spec.parallel, spec.memory, spec.train
    layout = layout_of(parallel, ranks)
    slots = job.workload.slots or layout.data_ranks
    return PlannedLayout(
        tensor=layout.tensor,
        context=layout.context,
        pipeline=layout.pipeline,
        stages_per_rank=stages_per_rank(parallel) if layout.pipeline > 1 else 1,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        replicate=layout.replicate,
        shard=layout.shard,
        zero=_zero(spec, job),
        micro_batch=train.micro_batch_size or max(1, train.batch_size // slots),
        schedule=parallel.pipeline_schedule if layout.pipeline > 1 else "1f1b",
        # The compiler's choice within a budget is not planned; a plan has a note (``phalanx_plan.run_fields``).
        recompute="none" if memory.recompute == "budget" else memory.recompute,
        precision=precision_of(spec, job.cluster),
        offload_activations=memory.offload_activations != "none",
        offload_optimizer=memory.offload_optimizer != "none",
    )


def estimate_written(spec: RunSpec, cluster: Cluster, ranks: int) -> Estimate:
    """Return the estimate of a run in the layout of its file, on ``ranks`` ranks."""
    job = job_of(spec, cluster)
    return estimate(job, written_layout(spec, job, ranks))


_ZERO = {"none": 2, "zero1": 1, "zero2": 2, "zero3": 3}
"""ZeRO stage of each ``parallel.sharding``. Without sharding one rank holds a copy, so that the stage does not matter."""


def _zero(spec: RunSpec, job: TrainingJob) -> int:
    """Return the ZeRO stage of the run's sharding, or the next one that the stack has: above it, else below."""
    stage, stages = _ZERO[spec.parallel.sharding], job.stack.zero_stages
    # Fast sums with ZeRO-1 are those with ZeRO-2: added on a rank, and exchanged once a step.
    return min((other for other in stages if other >= stage), default=max(stages))


def replaced_sharding(text: str, spec: RunSpec, job: TrainingJob) -> str:
    """Return a note if the layout of ``text`` has another ZeRO stage than the run file, since the stack lacks it; else ""."""
    stage, planned = _ZERO[spec.parallel.sharding], _zero(spec, job)
    is_explicit = text.strip() != "file" and "zero" in _fields(text, job)
    if is_explicit or spec.parallel.sharding == "none" or stage == planned:
        return ""
    return f"parallel.sharding: the stack {job.stack.name!r} has no ZeRO-{stage}; the layout is planned with ZeRO-{planned}"


def read_layout(text: str, spec: RunSpec, job: TrainingJob) -> PlannedLayout:
    """Parse a layout such as ``tp=8,pp=16,dp=128``; missing fields come from the run file.

    ``file`` alone is the layout of the run file. Without ``dp`` and ``gpus``, the data-parallel ranks fill the run's
    ranks or the cluster. Raises ``PlanRequestError`` for text that is no layout, and for ranks that do not divide or
    exceed the cluster.
    """
    settings = {} if text.strip() == "file" else _fields(text, job)
    parallel = spec.parallel
    degrees = {
        name: settings.pop(name, getattr(parallel, name))
        for name in ("tensor", "context", "pipeline", "expert", "expert_tensor")
    }
    parallel = replace(parallel, **degrees)
    inner = degrees["tensor"] * degrees["context"] * degrees["pipeline"]
    data = _data_ranks(text, settings, inner) or max(1, (parallel.ranks or job.cluster.accelerators) // inner)
    if parallel.shard_ranks and data % parallel.shard_ranks:
        parallel = replace(parallel, shard_ranks=0)
    layout = written_layout(replace(spec, parallel=parallel), job, inner * data)
    layout = replace(layout, **({"replicate": data // settings.get("shard", layout.shard)} | settings))
    if layout.data != data:
        raise PlanRequestError(f"--layout {text}: fsdp={layout.shard} does not divide dp={data}")
    replica = replica_ranks(parallel)
    if layout.ranks > job.cluster.accelerators:
        raise PlanRequestError(
            f"--layout {text}: {layout.ranks:,} ranks, but the cluster {job.cluster.key} has {job.cluster.accelerators:,} "
            "accelerators: name a larger one with --cluster NAME:ACCELERATORS, or take smaller degrees"
        )
    if layout.ranks % replica:
        raise PlanRequestError(
            f"--layout {text}: {layout.ranks} ranks are no multiple of the {replica} that hold one replica"
        )
    return layout


def _data_ranks(text: str, settings: dict[str, Any], inner: int) -> int:
    """Remove ``data`` and ``ranks`` from ``settings`` and return the data-parallel ranks that they set; 0 if neither
    is set.

    ``inner`` is tensor x context x pipeline. Raises ``PlanRequestError`` if ranks are no multiple of it, or both
    disagree.
    """
    data, ranks = int(settings.pop("data", 0)), int(settings.pop("ranks", 0))
    if ranks % inner:
        raise PlanRequestError(f"--layout {text}: gpus={ranks} is no multiple of tp x cp x pp = {inner}")
    if ranks and data and ranks != inner * data:
        raise PlanRequestError(
            f"--layout {text}: gpus={ranks}, but tp x cp x pp x dp = {inner * data}: leave one of them out"
        )
    return data or ranks // inner


def _fields(text: str, job: TrainingJob) -> dict[str, Any]:
    """Return the fields of a layout that ``text`` sets, by their full names.

    Raises ``PlanRequestError`` for an unknown, repeated or malformed one.
    """
    settings: dict[str, Any] = {}
    for part in text.split(","):
        word, sign, value = (piece.strip() for piece in part.partition("="))
        target = layout_field(word)
        if not sign or target is None:
            names = ", ".join(field.shown for field in LAYOUT_FIELDS if not field.not_in_layout)
            raise PlanRequestError(
                f"--layout: cannot read {part.strip()!r}: write FIELD=VALUE, FIELD one of {names}"
            )
        if target.not_in_layout:
            raise PlanRequestError(f"--layout: {part.strip()}: {target.not_in_layout}")
        if target.name in settings:
            raise PlanRequestError(
                f"--layout: {target.shown} is given twice, last as {part.strip()!r}: give it once"
            )
        settings[target.name] = _value(target.name, value, job)
    return settings


_SWITCHES = ("offload_activations", "offload_optimizer", "sequence_parallel")


def _value(name: str, value: str, job: TrainingJob) -> int | str | bool:
    """Parse the value of a layout's field: a word, 0 or 1 as a bool, a ZeRO stage, or a number of at least 1.

    Raises ``PlanRequestError`` with the possible values.
    """
    parts = parts_of(job.workload.model)
    words = {
        "schedule": SCHEDULES,
        "recompute": tuple(mode.name for mode in job.modes if not mode.parts or mode.parts & parts),
        "precision": tuple(precision.name for precision in PRECISIONS),
    }
    if name in words:
        if value not in words[name]:
            raise PlanRequestError(f"--layout: {name}={value}: take one of {', '.join(words[name])}")
        return value
    stages = job.stack.zero_stages
    is_number = value.isascii() and value.isdigit()
    if name == "zero" and not (is_number and int(value) in stages):
        raise PlanRequestError(
            f"--layout: zero={value}: the stack {job.stack.name!r} has {', '.join(map(str, stages))}"
        )
    if name in _SWITCHES and value not in ("0", "1"):
        raise PlanRequestError(f"--layout: {name}={value}: write 1 for yes or 0 for no")
    if not is_number or (int(value) < 1 and name not in ("zero", *_SWITCHES)):
        raise PlanRequestError(f"--layout: {name}={value!r} must be a whole number, at least 1")
    return bool(int(value)) if name in _SWITCHES else int(value)


# Follow-ups to a plan.


_MOST_DOUBLINGS = 7


def run_of_layout(
    spec: RunSpec, job: TrainingJob, layout: PlannedLayout, tokens: float | None = None
) -> RunSpec:
    """Return the run of ``spec`` in ``layout``, ready to be trained; ``tokens`` replaces its steps unless None.

    Raises ``PlanRequestError`` for a plan of other software, or if the trainer does not support the layout.
    """
    if job.stack.name != OWN:
        raise PlanRequestError(
            f"a run file is for this project's trainer: plan without --stack {job.stack.name}"
        )
    run = replace(
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
    problems = problems_of(run, layout.ranks)
    if problems:
        raise PlanRequestError(f"the trainer cannot run this layout:\n{problems}")
    return run


def parallel_of(spec: RunSpec, layout: PlannedLayout) -> ParallelSpec:
    """Return the ``[parallel]`` section that describes a layout, on all its ranks and with an even split of the
    pipeline.

    Sharding is none if nothing is sharded; ``shard_ranks`` is 0, which means all, without replicas.
    """
    many = layout.pipeline > 1
    sharding: Any = f"zero{layout.zero}" if layout.zero == 3 or layout.shard > 1 else "none"
    return replace(
        spec.parallel,
        ranks=layout.ranks,
        sharding=sharding,
        # One rank of a copy may still share its state over the context axis; 0 would mean all ranks.
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
    """Return the memory section for the layout; an offload that it has keeps its kind in the run file, else it is "host"."""

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
    """Return the precision section for the layout: ``matmul`` becomes "fp8-rowwise" for fp8 if it is "compute", else nothing changes."""
    name = layout.precision
    if name == "fp8" and spec.precision.matmul == "compute":
        return replace(spec.precision, matmul="fp8-rowwise")
    return spec.precision


def least_change(job: TrainingJob, layout: PlannedLayout, *, offload: bool) -> str:
    """Describe the change that makes a layout fit on the same ranks with the shortest step, or that none does.

    Tries recomputation, micro-batches of one and, if ``offload`` permits, host memory. Estimates each combination.
    """
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
        with suppress(ValueError):  # the software or the batch does not permit it
            fitting.append(estimate(job, layout_option))
    fitting = [option for option in fitting if option.fits]
    if not fitting:
        return (
            "no recomputation, smaller micro-batch or offload makes this layout fit: divide the model further"
        )
    best = min(fitting, key=lambda option: option.step_s)
    words = [word for word in str(best.layout).split(",") if word not in str(layout).split(",")]
    return f"with {','.join(words)} this layout fits: {best.step_s:.4g} s a step"


def what_would_fit(job: TrainingJob, options: Options) -> str:
    """Describe how many accelerators, or how much memory in each, would suffice if nothing fits; empty if neither
    helps.

    Doubles the accelerators up to ``_MOST_DOUBLINGS`` times, and multiplies the memory up to 8 times. Searches again
    for each.
    """
    changes = []
    count = max(options.gpus or (job.cluster.accelerators,))
    for doubling in range(1, _MOST_DOUBLINGS + 1):
        if _fits(job, replace(options, gpus=(count << doubling,))):
            changes.append(f"{count << doubling:,} accelerators of the same kind")
            break
    capacity_bytes = job.cluster.accelerator.memory_bytes.value
    for factor in (1.25, 1.5, 2, 3, 4, 8):
        larger = with_value(job.cluster, "accelerator.memory_bytes", capacity_bytes * factor)
        if _fits(replace(job, cluster=larger), options):
            changes.append(
                f"{capacity_bytes * factor / 1e9:,.0f} GB of memory in each accelerator ({factor:g} times as much)"
            )
            break
    return "; so would ".join((f"{changes[0]} would do", *changes[1:])) if changes else ""


def _fits(job: TrainingJob, options: Options) -> bool:
    """Return True if a search finds a layout that fits."""
    try:
        search(job, replace(options, finalists=1, top=1))
    except ValueError:
        return False
    return True
