"""The answer of a budget, and a fitted law, as plain values for JSON; the keys are stable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

from phalanx.plan.scaling.answer import BudgetAnswer, Recommended
from phalanx.plan.scaling.fit import FittedLaw
from phalanx.plan.search.as_json import plan_json


def answer_json(answer: BudgetAnswer) -> dict[str, object]:
    """Plain values of the whole answer, the better kind of model first. Infinities are ``None``."""
    question = answer.question
    return {
        "budget": asdict(question.budget),
        "cluster": question.cluster.key if question.cluster else None,
        "unique_tokens": _finite(question.unique_tokens),
        "inference_tokens": question.inference_tokens,
        "left_out": answer.left_out,
        "found": [_recommended(one) for one in answer.found],
    }


def fit_json(law: FittedLaw, asked: Mapping[str, tuple[float, float]]) -> dict[str, object]:
    """Plain values of a law fitted to runs, and of what it predicts of the sizes and tokens in ``asked``."""
    return {
        "law": asdict(law.law),
        "p5_p95": {name: law.constants_band(name) for name in ("floor", "alpha", "beta")},
        "typical_error": law.typical_error,
        "runs": [
            {**asdict(run), "residual": residual}
            for run, residual in zip(law.runs, law.residuals, strict=True)
        ],
        "predicted": [
            {
                "what": what,
                "parameters": parameters,
                "tokens": tokens,
                "loss": law.loss(parameters, tokens),
                "loss_p5_p95": law.band(parameters, tokens),
                "beyond": law.beyond(parameters, tokens),
            }
            for what, (parameters, tokens) in asked.items()
        ],
    }


def _recommended(one: Recommended) -> dict[str, object]:
    return {
        "kind": one.shape.kind,
        "name": one.shape.name,
        "parameters": one.shape.parameters,
        "active_parameters": one.shape.active,
        "model": asdict(one.shape.model),
        "tokens": one.tokens,
        "loss": one.loss,
        "loss_p5_p95": one.loss_band,
        "parameters_p5_p95": one.size_band,
        "new_text_loss": one.new_text_loss,
        "joint_law_loss": one.joint_loss,
        "laws": [asdict(row) for row in one.laws],
        "smaller": [{name: _finite(value) for name, value in asdict(row).items()} for row in one.smaller],
        "half_the_budget": asdict(one.halved),
        "twice_the_budget": asdict(one.doubled),
        "planned": [{"active_parameters": size, "cost_per_token": cost} for size, cost in one.planned],
        "plan": plan_json(one.plan) if one.plan else None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
