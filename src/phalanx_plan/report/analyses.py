"""Analyses that the report of a plan draws: a step on a time line, rank by rank, and its sensitivity to the inputs.

A step consists of a flush of the pipeline (with GPipe one for each slot of a rank) and the work around it: gathering
weights, reducing gradients, the update, and the terms in which all ranks wait for each other. The report draws these spans, and they are
written in the Trace Event Format of Chrome, which ui.perfetto.dev opens (Google, "Trace Event
Format", 2016). On every rank the events follow each other without a gap and sum to the step.

The sensitivity shows which inputs matter: a figure that decides the answer is worth measuring, one that hardly changes it is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np

from phalanx.hardware.cluster import with_value
from phalanx.hardware.profile import Profile
from phalanx_plan.search.alternatives import UPLINKS
from phalanx_plan.search.plan import Plan
from phalanx_plan.step_cost.estimate import Estimate, Evaluation, estimate, prepare, stage_times
from phalanx_plan.step_cost.pipeline import flush_s, timeline
from phalanx_plan.step_cost.step_time import hop_s
from phalanx_plan.whole_run.estimate import LEVELS, estimate_run
from phalanx_plan.workload.candidates import candidates_of
from phalanx_plan.workload.stacks import Stack, TrainingJob

_MOST_ACTIONS = 60_000
"""Most actions of a flush that is drawn completely; of longer flushes only the beginning is drawn."""
_IN_FLUSH = frozenset(
    {
        "matmul",
        "attention",
        "pointwise",
        "tensor_comm",
        "context_comm",
        "expert_comm",
        "recompute",
        "bubble",
        "pipeline_comm",
    }
)
"""Terms of the step that the flushes contain."""
_BEFORE = ("weight_gather",)
_KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


@dataclass(frozen=True)
class TraceEvent:
    """An activity or a wait of a pipeline rank."""

    rank: int
    name: str
    """The activity, such as "forward", "idle" or "optimizer"."""
    begin_s: float
    end_s: float
    stage: int = -1
    micro_batch: int = -1


@dataclass(frozen=True)
class StepTimeline:
    """One step on every rank of one pipeline."""

    ranks: int
    flushes: int
    flush_s: float
    step_s: float
    events: tuple[TraceEvent, ...]
    """Events by rank and time; the first flush action by action, the others as one event each."""


def step_timeline(job: TrainingJob, chosen: Estimate) -> StepTimeline:
    """Return the spans of the step of an estimate, in seconds: the first pipeline flush action by action, the others as one span each."""
    evaluation = prepare(job, candidates_of([chosen.layout], job.modes))
    pipes = evaluation.pipes
    ranks, micro_batches = int(pipes.ranks[0]), int(pipes.micro_batches[0])
    batch = chosen.layout.data * chosen.layout.micro_batch * micro_batches
    flushes = job.workload.batch // batch
    inside = sum(seconds for name, seconds in chosen.time.items() if name in _IN_FLUSH) / flushes
    flush = list(_flush(evaluation, chosen, micro_batches, inside))
    events = [event for rank in range(ranks) for event in _rank(rank, chosen, flush, flushes, inside)]
    return StepTimeline(ranks, flushes, inside, chosen.step_s, tuple(events))


def _flush(
    evaluation: Evaluation, chosen: Estimate, micro_batches: int, inside: float
) -> Iterator[TraceEvent]:
    """Yield the actions of each rank in a flush of ``inside`` seconds.

    Of a flush with too many micro-batches to draw, the first ones are drawn and one event covers the remainder.
    """
    job, pipes = evaluation.job, evaluation.pipes
    ranks, per_rank = int(pipes.ranks[0]), int(pipes.per_rank[0])
    times = stage_times(evaluation, np.array([0]))
    hop = float(np.broadcast_to(hop_s(job, evaluation.candidates), (1,))[0]) if ranks > 1 else 0.0
    name = chosen.layout.schedule if ranks > 1 else "1f1b" if per_rank == 1 else "interleaved"
    # All micro-batches are drawn, or as many rounds of the pipeline as there is room for.
    room = max(4 * ranks, _MOST_ACTIONS // (3 * ranks * per_rank))
    drawn = micro_batches if micro_batches <= room else room - (room - micro_batches) % ranks
    last = inside
    if drawn < micro_batches:
        last = float(flush_s(name, ranks, per_rank, drawn, times, np.array([hop]))[0])
        yield from (
            TraceEvent(rank, f"{micro_batches - drawn} micro-batches more", last, inside)
            for rank in range(ranks)
        )
    for span in timeline(name, ranks, per_rank, drawn, times, hop):
        kind = _KINDS[span.action.kind]
        yield TraceEvent(
            span.rank, kind, span.begin_s, min(span.end_s, last), span.action.stage, span.action.micro_batch
        )


def _rank(
    rank: int, chosen: Estimate, flush: list[TraceEvent], flushes: int, inside: float
) -> Iterator[TraceEvent]:
    """Yield all events of a rank's step in order.

    First the terms before the flushes, then the first flush with idle gaps, one event for each other flush, and the
    other terms.
    """
    now = 0.0
    outside: Mapping[str, float] = {
        name: seconds for name, seconds in chosen.time.items() if name not in _IN_FLUSH and seconds > 0
    }
    for name in _BEFORE:
        if name in outside:
            yield TraceEvent(rank, name, now, now + outside[name])
            now += outside[name]
    yield from _filled(
        rank, sorted((e for e in flush if e.rank == rank), key=lambda e: e.begin_s), now, inside
    )
    for number in range(1, flushes):
        yield TraceEvent(
            rank, f"flush {number + 1}, like the first", now + number * inside, now + (number + 1) * inside
        )
    now += flushes * inside
    for name, seconds in outside.items():
        if name not in _BEFORE:
            yield TraceEvent(rank, name, now, now + seconds)
            now += seconds


def _filled(rank: int, events: list[TraceEvent], start: float, length: float) -> Iterator[TraceEvent]:
    """Yield ``events`` shifted by ``start``, with "idle" events in the gaps and after the last, up to ``length``
    seconds.

    Gaps below a billionth of ``length`` are closed instead.
    """
    least = 1e-9 * length
    now = 0.0
    for event in events:
        if event.begin_s - now > least:
            yield TraceEvent(rank, "idle", start + now, start + event.begin_s)
        begin = event.begin_s if event.begin_s - now > least else now
        yield TraceEvent(rank, event.name, start + begin, start + event.end_s, event.stage, event.micro_batch)
        now = event.end_s
    if length - now > least:
        yield TraceEvent(rank, "idle", start + now, start + length)


def perfetto(job: TrainingJob, chosen: Estimate) -> dict[str, object]:
    """Return the step as a Chrome trace: times in microseconds, one thread for each pipeline rank."""
    line = step_timeline(job, chosen)
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"pipeline rank {rank}"}}
        for rank in range(line.ranks)
    ]
    process = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "a simulated step"}}
    events = [
        {
            "ph": "X",
            "name": event.name,
            "pid": 0,
            "tid": event.rank,
            "ts": event.begin_s * 1e6,
            "dur": (event.end_s - event.begin_s) * 1e6,
            "args": {"stage": event.stage, "micro_batch": event.micro_batch} if event.stage >= 0 else {},
        }
        for event in line.events
    ]
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [process, *names, *events],
        "otherData": {"step_s": line.step_s, "layout": {k: str(v) for k, v in asdict(chosen.layout).items()}},
    }


# Sensitivity: the step and the days of a plan with one figure at a time lowered and raised, in the chosen layout.


CHANGE = 0.2
"""Relative change of each figure, down and up."""


def step_changes(plan: Plan) -> dict[str, tuple[float, float]]:
    """Return, for each figure, the step's change in per cent when it is lowered and when it is raised by the share
    ``CHANGE``.

    The layout stays, with its uplink time; the largest change is first.
    """
    changes = {}
    uplinks_s = plan.chosen.time.get(UPLINKS, 0.0)
    for name, lower, higher in _jobs(plan.job):
        pair = [estimate(job, plan.chosen.layout).step_s + uplinks_s for job in (lower, higher)]
        changes[name] = tuple(100 * (seconds / plan.chosen.step_s - 1) for seconds in pair)
    ordered = sorted(changes.items(), key=lambda item: -max(map(abs, item[1])))
    return {name: (low, high) for name, (low, high) in ordered}


def _jobs(job: TrainingJob) -> Iterator[tuple[str, TrainingJob, TrainingJob]]:
    """Yield (figure, job with it lowered, job with it raised) by ``CHANGE``; figures of 0 are skipped, the power
    limit is only lowered.
    """
    chip = job.cluster.accelerator
    figures = {
        "memory bandwidth": ("accelerator.memory_bytes_per_s", chip.memory_bytes_per_s.value),
        "link in the domain": ("domain.bytes_per_s", job.cluster.domain.bytes_per_s.value),
        "network": ("fabric.bytes_per_s", job.cluster.fabric.bytes_per_s.value),
        "link to the host": ("accelerator.host_bytes_per_s", chip.host_bytes_per_s.value),
    }
    for name, (figure, value) in figures.items():
        if value > 0:
            low, high = (_with(job, figure, value * factor) for factor in (1 - CHANGE, 1 + CHANGE))
            yield name, low, high
    if (watts := chip.power_w.value) > 0:
        # Large products run at the power limit, below the data sheet's peak, which then hardly matters. No higher limit was ever measured.
        yield "power limit", _with(job, "accelerator.power_w", watts * (1 - CHANGE)), job
    yield "peak FLOP/s", _with_flops(job, 1 - CHANGE), _with_flops(job, 1 + CHANGE)
    for name, scaled in (("scale tax", _with_tax), ("overlap of data axes", _with_data_overlap)):
        low, high = (replace(job, stack=scaled(job.stack, factor)) for factor in (1 - CHANGE, 1 + CHANGE))
        yield name, low, high


def _with_tax(stack: Stack, factor: float) -> Stack:
    return replace(stack, tax_per_doubling=stack.tax_per_doubling * factor)


def _with_data_overlap(stack: Stack, factor: float) -> Stack:
    return replace(stack, overlap=replace(stack.overlap, data=stack.overlap.data * factor))


def _with(job: TrainingJob, figure: str, value: float) -> TrainingJob:
    """Return the job with another value of one figure of the cluster."""
    cluster = with_value(job.cluster, figure, value)
    return replace(job, cluster=cluster, profile=Profile(cluster.accelerator, job.profile.constants))


def _with_flops(job: TrainingJob, factor: float) -> TrainingJob:
    """Return the job with all peak rates times ``factor``."""
    for name, fact in job.cluster.accelerator.flops.items():
        job = _with(job, f"accelerator.flops.{name}", fact.value * factor)
    return job


def days_changes(plan: Plan) -> dict[str, float]:
    """Return the days of the run under each changed assumption: failure levels, ways of recovery, step times at P5 and P95."""
    planned = plan.assumptions
    changed = {f"failure rates: {level}": replace(planned, failure_level=level) for level in LEVELS}
    # With fixed times for saves to memory, saves to storage keep their own interval.
    from_storage_s = None if planned.checkpoint_interval_s is None else planned.durable_interval_s
    restart = replace(planned, recovery="restart", checkpoint_interval_s=from_storage_s)
    changed |= {
        "recovery: restart from storage": restart,
        "recovery: shrink by a replica": replace(planned, recovery="shrink"),
    }
    days_by_change = {
        name: estimate_run(plan.inputs, assumptions).days for name, assumptions in changed.items()
    }
    for name, ratio in (("P5", plan.band.p5), ("P95", plan.band.p95)):
        step_s = plan.chosen.step_s * ratio
        inputs = replace(plan.inputs, step_s=step_s)
        days_by_change[f"step time at its {name}, {ratio - 1:+.0%}"] = estimate_run(inputs, planned).days
    return days_by_change
