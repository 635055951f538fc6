"""Plans from Python and as JSON: the best layouts of a run on a cluster, before anything is started."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from phalanx.hardware.catalog import cluster as cluster_named
from phalanx.hardware.cluster import Cluster
from phalanx.run.spec import RunSpec
from phalanx_plan.evidence import LEVELS
from phalanx_plan.search.plan import Plan, make_plan
from phalanx_plan.search.query import Aim
from phalanx_plan.step_cost.estimate import Estimate


def plan_run(
    spec: RunSpec,
    cluster: Cluster | str,
    *,
    layout: str | None = None,
    require: Sequence[str] = (),
    optimize: str = "time",
) -> Mapping[str, Any]:
    """The best layouts of a run on a cluster, or an estimate of one: what ``phalanx plan --json`` prints.

    Args:
        spec: The run.
        cluster: ``"h100:16384"``, ``"gb200-nvl72 x 29"``, the path of a TOML file, or a ``Cluster``.
        layout: Estimate this one: ``"tp=8,pp=16,dp=128"``; ``"file"`` is the run's own.
        require: Only layouts where these conditions hold, such as ``"tp<=8"``.
        optimize: ``"time"``, ``"cost"`` or ``"gpus"``.

    Raises ``ValueError`` with what is in the way and the remedy, also for a model of your own.
    """
    where = cluster_named(cluster) if isinstance(cluster, str) else cluster
    aim = Aim(optimize=optimize, require=tuple(require), layout=layout)
    return plan_json(make_plan(spec, where, aim, searching=layout is None))


# Plain values of a plan.


def estimate_json(plan: Plan, found: Estimate) -> dict[str, object]:
    """Plain values of one layout's estimate; the keys are stable."""
    days = plan.tokens / found.tokens_per_s / 86_400
    return {
        "layout": str(found.layout),
        "fields": asdict(found.layout),
        "schedule": found.layout.schedule,
        "recompute": found.layout.recompute,
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
        "mfu_causal": found.mfu_causal,
        "failure_free_days": days,
        "failure_free_usd": found.price_per_hour * found.ranks * days * 24,
        **({} if plan.placements is None else {"placement": asdict(plan.placements[found.layout])}),
    }


def plan_json(plan: Plan) -> dict[str, object]:
    """Plain values of the whole plan, for JSON; the keys are stable.

    Where JSON has no number (the days of a run that would never end) there is ``None``.
    """
    cluster, found = plan.job.cluster, plan.found
    facts: dict[str, object] = {
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
        "step_error": plan.band.sigma,
        "step_s_p5": plan.chosen.step_s * plan.band.p5,
        "step_s_p50": plan.chosen.step_s * plan.band.p50,
        "step_s_p95": plan.chosen.step_s * plan.band.p95,
        "evidence": evidence_json(plan),
        "chosen": estimate_json(plan, plan.chosen),
        "best": [estimate_json(plan, one) for one in plan.best],
        "whole_run": plan.run.to_dict(),
        "notes": plan.notes,
        "caveats": [caveat.text for caveat in plan.caveats],
    }
    if found is not None:
        facts |= {
            "ideas": [
                {"title": one.title, "gives_up": one.gives_up, **estimate_json(plan, one.found)}
                for one in plan.ideas
            ],
            "front": [
                asdict(point) | {"layout": str(point.layout), "fields": asdict(point.layout)}
                for point in found.front
            ],
            "runners_up": [
                {"family": one.family, "layout": str(one.layout), "reason": one.reason, "slower": one.slower}
                for one in found.runners_up
            ],
            "looked_at": found.looked_at,
            "valid": found.valid,
            "excluded": dict(found.excluded),
        }
    return {name: _finite(value) for name, value in facts.items()}


def evidence_json(plan: Plan) -> dict[str, object]:
    """What the prediction rests on; the keys are stable."""
    known = plan.evidence
    return {
        "kind": known.kind,
        "says": str(known),
        "factor": known.factor,
        "runs": known.runs,
        "models": known.models,
        "software": known.software,
        "left_out_error": known.left_out_error,
        "quantiles": dict(zip(map(str, LEVELS), plan.band.ratios, strict=True)),
    }


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
