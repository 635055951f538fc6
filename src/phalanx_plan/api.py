"""Plans from Python and as JSON: the best layouts of a run on a cluster, before anything is started."""

from __future__ import annotations

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
from phalanx_plan.whole_run.estimate import json_value


def plan_run(
    spec: RunSpec,
    cluster: Cluster | str,
    *,
    layout: str | None = None,
    require: Sequence[str] = (),
    optimize: str = "time",
) -> Mapping[str, Any]:
    """Return the best layouts of a run on a cluster, or an estimate of one layout: the values that ``phalanx plan layout --json`` prints.

    Args:
        spec: The run.
        cluster: ``"h100:16384"``, ``"gb200-nvl72 x 29"``, the path of a TOML file, or a ``Cluster``.
        layout: Estimate this layout only: ``"tp=8,pp=16,dp=128"``. ``"file"`` is the layout of the run file.
        require: Conditions that every layout must meet, such as ``"tp<=8"``.
        optimize: ``"time"``, ``"cost"`` or ``"gpus"``.

    Raises ``ValueError``, with the cause and the remedy, if nothing fits or the model is of a kind that the planner does not know.
    """
    target = cluster_named(cluster) if isinstance(cluster, str) else cluster
    aim = Aim(optimize=optimize, require=tuple(require), layout=layout)
    return plan_json(make_plan(spec, target, aim, searching=layout is None))


# Plain values of a plan.


def estimate_json(plan: Plan, estimate: Estimate) -> dict[str, object]:
    """Return plain values of one layout's estimate, for JSON: seconds, bytes, rates, and days and dollars of the run without failures.

    The keys are stable and have units in their names. "placement" is there only if the plan has placements.
    """
    days, usd = plan.failure_free(estimate)
    return {
        "layout": str(estimate.layout),
        "fields": asdict(estimate.layout),
        "schedule": estimate.layout.schedule,
        "recompute": estimate.layout.recompute,
        "accelerators": estimate.ranks,
        "step_s": estimate.step_s,
        "time_s": dict(estimate.time),
        "closed_form_s": estimate.closed_form_s,
        "memory_bytes": estimate.memory_bytes,
        "memory_by_kind_bytes": dict(estimate.memory),
        "allocated_bytes": estimate.allocated_bytes,
        "capacity_bytes": estimate.capacity_bytes,
        "worst_pipeline_rank": estimate.worst_rank,
        "fits": estimate.fits,
        "tokens_per_s": estimate.tokens_per_s,
        "flops_per_s_per_accelerator": estimate.flops_per_s,
        "mfu": estimate.mfu,
        "mfu_causal": estimate.mfu_causal,
        "failure_free_days": days,
        "failure_free_usd": usd,
        **({} if plan.placements is None else {"placement": asdict(plan.placements[estimate.layout])}),
    }


def plan_json(plan: Plan) -> dict[str, object]:
    """Return plain values of the whole plan, for JSON; the keys are stable, and numbers that are not finite are ``None``.

    "ideas", "front", "runners_up", "looked_at", "valid" and "excluded" are there only if layouts were searched.
    """
    cluster, search_result = plan.job.cluster, plan.search_result
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
        "best": [estimate_json(plan, estimate) for estimate in plan.best],
        "whole_run": plan.run.to_dict(),
        "notes": plan.notes,
        "caveats": [caveat.text for caveat in plan.caveats],
    }
    if search_result is not None:
        facts |= {
            "ideas": [
                {"title": idea.title, "gives_up": idea.gives_up, **estimate_json(plan, idea.estimate)}
                for idea in plan.ideas
            ],
            "front": [
                asdict(point) | {"layout": str(point.layout), "fields": asdict(point.layout)}
                for point in search_result.front
            ],
            "runners_up": [
                {
                    "family": loser.family,
                    "layout": str(loser.layout),
                    "reason": loser.reason,
                    "slower": loser.slower,
                }
                for loser in search_result.runners_up
            ],
            "looked_at": search_result.looked_at,
            "valid": search_result.valid,
            "excluded": dict(search_result.excluded),
        }
    values: dict[str, object] = json_value(facts)
    return values


def evidence_json(plan: Plan) -> dict[str, object]:
    """Return the kind, error, bias factor and run counts of the evidence, and the band's ratios by quantile level.
    The keys are stable.
    """
    evidence = plan.evidence
    return {
        "kind": evidence.kind,
        "says": str(evidence),
        "factor": evidence.factor,
        "runs": evidence.runs,
        "models": evidence.models,
        "software": evidence.software,
        "left_out_error": evidence.left_out_error,
        "quantiles": dict(zip(map(str, LEVELS), plan.band.ratios, strict=True)),
    }
