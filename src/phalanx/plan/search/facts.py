"""Everything that a plan found, in one value: what tables, reports and JSON are made from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from phalanx.hardware.cluster import Cluster
from phalanx.plan.run_fields import notes_of
from phalanx.plan.search.advice import parallel_of, what_would_fit
from phalanx.plan.search.request import (
    OWN,
    Aim,
    RequestError,
    job_of,
    options_of,
    problems_of,
    read_layout,
    read_tokens,
    run_inputs,
)
from phalanx.plan.search.search import NothingFitsError, RunnerUp, SearchResult, search
from phalanx.plan.search.space import Options
from phalanx.plan.step_cost.estimate import Estimate, estimate
from phalanx.plan.whole_run.assumptions import RunAssumptions, RunInputs, assumed
from phalanx.plan.whole_run.estimate import RunEstimate, estimate_run
from phalanx.plan.workload.candidates import PRECISIONS, SCHEDULES, layout_at
from phalanx.plan.workload.stacks import Job
from phalanx.run.spec import RunSpec


@dataclass(frozen=True)
class Plan:
    """A layout that was chosen, or asked for, and what was found on the way."""

    name: str
    """Of the run."""
    job: Job
    aim: Aim
    chosen: Estimate
    """The best layout, or the one that was asked for."""
    found: SearchResult | None
    """``None`` if only one layout was looked at."""
    tokens: float
    inputs: RunInputs
    assumptions: RunAssumptions
    run: RunEstimate
    notes: tuple[str, ...] = ()
    """Of fields of the run file that are set and not modeled."""

    @property
    def best(self) -> tuple[Estimate, ...]:
        """The layouts to list, best first."""
        return self.found.best if self.found else (self.chosen,)


def make_plan(
    spec: RunSpec, cluster: Cluster, aim: Aim, *, from_file: bool = True, searching: bool = True
) -> Plan:
    """Searches, or estimates the layout that was asked for, or both; then the run as a whole.

    Without ``from_file`` the run is of a known model alone: slots, checkpoints and fleet are not as ``spec`` says but as the
    layout and the assumptions like them. Raises ``ValueError`` with what is in the way, and the remedy.
    """
    job = job_of(spec, cluster, stack=aim.stack, keep_slots=from_file)
    asked = None if aim.layout is None else _asked(spec, job, aim.layout)
    found = None
    if searching:
        options = options_of(spec, job, optimize=aim.optimize, require=aim.require, top=aim.top)
        found = _search(job, options)
    chosen = asked or (found.best[0] if found else None)
    if chosen is None:
        raise RequestError("neither a layout nor a search was asked for")
    tokens = read_tokens(aim.tokens) if aim.tokens else float(spec.train.steps * job.workload.tokens)
    inputs = run_inputs(job, chosen, tokens)
    assumptions = assumed(aim.assume, aim.step_error, spec if from_file else None, chosen.step_s)
    run = estimate_run(inputs, assumptions)
    notes = notes_of(spec, cluster) if from_file else ()
    return Plan(spec.name, job, aim, chosen, found, tokens, inputs, assumptions, run, notes)


def _asked(spec: RunSpec, job: Job, text: str) -> Estimate:
    numbers = read_layout(text, spec, job)
    if job.stack.name == OWN:
        layout = layout_at(numbers)
        slots = job.workload.slots or layout.data_ranks
        train = replace(spec.train, micro_batch_size=numbers["micro_batch"], slots=slots)
        changed = replace(spec, parallel=parallel_of(spec, numbers), train=train)
        problems = problems_of(changed, layout.ranks)
        if problems:
            raise RequestError(f"--layout {text} is not possible:\n{problems}")
    return estimate(job, numbers)


def _search(job: Job, options: Options) -> SearchResult:
    try:
        return search(job, options)
    except NothingFitsError as error:
        helps = what_would_fit(job, options)
        raise RequestError(f"{error}\n{helps}" if helps else str(error)) from error


def short(job: Job, numbers: Mapping[str, int]) -> str:
    """A layout in one line, in the words of ``--layout``; what is 1 or off is left out."""
    data = numbers["replicate"] * numbers["shard"]
    degrees = {
        "tp": numbers["tensor"],
        "cp": numbers["context"],
        "pp": numbers["pipeline"],
        "vpp": numbers["stages_per_rank"],
        "ep": numbers["expert"],
        "etp": numbers["expert_tensor"],
        "dp": data,
    }
    parts = [f"{name}={degree}" for name, degree in degrees.items() if degree > 1]
    if numbers["replicate"] > 1:
        parts.append(f"fsdp={numbers['shard']}")
    parts += [f"mbs={numbers['micro_batch']}", f"zero={numbers['zero']}"]
    if numbers["pipeline"] > 1:
        parts.append(f"schedule={SCHEDULES[numbers['schedule']]}")
    mode = job.modes[numbers["recompute"]].name
    parts += [f"recompute={mode}"] if mode != "none" else []
    parts += [f"{name}=1" for name in ("offload_activations", "offload_optimizer") if numbers[name]]
    if PRECISIONS[numbers["precision"]].name != "bf16":
        parts.append(f"precision={PRECISIONS[numbers['precision']].name}")
    return ",".join(parts)


def estimate_facts(plan: Plan, found: Estimate) -> dict[str, Any]:
    """Plain values of one layout's estimate; the keys are stable."""
    days = plan.tokens / found.tokens_per_s / 86_400
    return {
        "layout": short(plan.job, found.layout),
        "fields": dict(found.layout),
        "schedule": found.schedule,
        "recompute": found.recompute,
        "accelerators": found.ranks,
        "step_s": found.step_s,
        "time_s": dict(found.time),
        "closed_form_s": found.closed_form_s,
        "memory_bytes": found.memory_bytes,
        "memory_by_kind_bytes": dict(found.memory),
        "allocated_bytes": found.allocated_bytes,
        "capacity_bytes": found.capacity_bytes,
        "worst_pipeline_rank": found.worst_rank,
        "fits": found.fits,
        "tokens_per_s": found.tokens_per_s,
        "flops_per_s_per_accelerator": found.flops_per_s,
        "mfu": found.mfu,
        "failure_free_days": days,
        "failure_free_usd": found.price_per_hour * found.ranks * days * 24,
    }


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Plain values of the whole plan, for JSON; the keys are stable."""
    cluster, found = plan.job.cluster, plan.found
    facts: dict[str, Any] = {
        "run": plan.name,
        "cluster": cluster.key,
        "accelerator": cluster.accelerator.name,
        "announced_only": cluster.accelerator.announced_only,
        "overrides": dict(cluster.overrides),
        "stack": plan.job.stack.name,
        "profile": plan.job.profile.constants.name,
        "parameters": plan.job.workload.counts.parameters,
        "active_parameters": plan.job.workload.counts.active_parameters,
        "batch": plan.job.workload.batch,
        "seq_len": plan.job.workload.seq_len,
        "tokens": plan.tokens,
        "step_error": plan.aim.step_error,
        "chosen": estimate_facts(plan, plan.chosen),
        "best": [estimate_facts(plan, one) for one in plan.best],
        "whole_run": plan.run.to_dict(),
        "notes": plan.notes,
    }
    if found is not None:
        facts |= {
            "front": [{"layout": short(plan.job, point.layout), **asdict(point)} for point in found.front],
            "runners_up": [_runner_up(plan.job, one) for one in found.runners_up],
            "looked_at": found.looked_at,
            "valid": found.valid,
            "excluded": dict(found.excluded),
        }
    return facts


def _runner_up(job: Job, one: RunnerUp) -> dict[str, Any]:
    slower = one.slower if math.isfinite(one.slower) else None
    return {"family": one.family, "layout": short(job, one.layout), "reason": one.reason, "slower": slower}
