"""Sensitivity analysis: the step and the days of a plan, with one figure at a time lowered and raised.

An estimate is only as good as its inputs, and they are not equally good. A figure that hardly matters need not be known well;
one that decides is worth measuring. The layout stays as it was chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.hardware.cluster import with_value
from phalanx.hardware.profile import Profile
from phalanx_plan.search.alternatives import UPLINKS
from phalanx_plan.search.plan import Plan
from phalanx_plan.step_cost.estimate import estimate
from phalanx_plan.whole_run.estimate import LEVELS, estimate_run
from phalanx_plan.workload.stacks import Job, Stack

CHANGE = 0.2
"""Relative change of each figure, down and up."""


def step_changes(plan: Plan) -> dict[str, tuple[float, float]]:
    """Returns for each figure the step's change in per cent when it is a fifth lower and a fifth higher; the largest first."""
    found = {}
    uplinks_s = plan.chosen.time.get(UPLINKS, 0.0)
    for name, lower, higher in _jobs(plan.job):
        pair = [estimate(job, plan.chosen.layout).step_s + uplinks_s for job in (lower, higher)]
        found[name] = tuple(100 * (seconds / plan.chosen.step_s - 1) for seconds in pair)
    ordered = sorted(found.items(), key=lambda item: -max(map(abs, item[1])))
    return {name: (low, high) for name, (low, high) in ordered}


def _jobs(job: Job) -> Iterator[tuple[str, Job, Job]]:
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
        # Large products settle at the power limit, below the data sheet's peak, which then hardly matters. No higher limit was ever measured.
        yield "power limit", _with(job, "accelerator.power_w", watts * (1 - CHANGE)), job
    yield "peak FLOP/s", _with_flops(job, 1 - CHANGE), _with_flops(job, 1 + CHANGE)
    for name, scaled in (("scale tax", _with_tax), ("overlap of data axes", _with_data_overlap)):
        low, high = (replace(job, stack=scaled(job.stack, factor)) for factor in (1 - CHANGE, 1 + CHANGE))
        yield name, low, high


def _with_tax(stack: Stack, factor: float) -> Stack:
    return replace(stack, tax_per_doubling=stack.tax_per_doubling * factor)


def _with_data_overlap(stack: Stack, factor: float) -> Stack:
    return replace(stack, overlap=replace(stack.overlap, data=stack.overlap.data * factor))


def _with(job: Job, figure: str, value: float) -> Job:
    cluster = with_value(job.cluster, figure, value)
    return replace(job, cluster=cluster, profile=Profile(cluster.accelerator, job.profile.constants))


def _with_flops(job: Job, factor: float) -> Job:
    for name, fact in job.cluster.accelerator.flops.items():
        job = _with(job, f"accelerator.flops.{name}", fact.value * factor)
    return job


def days_changes(plan: Plan) -> dict[str, float]:
    """Days of the run when one thing about it is otherwise."""
    given = plan.assumptions
    changed = {f"failure rates: {level}": replace(given, failure_level=level) for level in LEVELS}
    # Where memory is saved to at given times, storage is all the same saved to at its own.
    from_storage_s = None if given.checkpoint_interval_s is None else given.durable_interval_s
    restart = replace(given, recovery="restart", checkpoint_interval_s=from_storage_s)
    changed |= {
        "recovery: restart from storage": restart,
        "recovery: shrink by a replica": replace(given, recovery="shrink"),
    }
    found = {name: estimate_run(plan.inputs, one).days for name, one in changed.items()}
    for name, ratio in (("P5", plan.band.p5), ("P95", plan.band.p95)):
        step_s = plan.chosen.step_s * ratio
        inputs = replace(plan.inputs, step_s=step_s)
        found[f"step time at its {name}, {ratio - 1:+.0%}"] = estimate_run(inputs, given).days
    return found
