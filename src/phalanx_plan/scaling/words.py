"""The answer of a budget as text and as JSON: a sentence for each kind of model, the laws' range, and the sensitivity of the answer.

The terminal and the report use the same words. The keys of JSON, also of a fitted law, are stable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from html import escape

from phalanx_plan.api import plan_json
from phalanx_plan.report.elements import DAYS, DOLLARS, ENERGY, html_table, written
from phalanx_plan.scaling.answer import BudgetAnswer, Recommended
from phalanx_plan.scaling.fit import FittedLaw

_HARDLY = 0.01
"""Loss gain below which half of a budget is hardly worth spending: less than the laws' own standard error."""
_FAR = 3.0
"""Factor beyond its largest run from which a law is reported as extrapolated."""

LAW_COLUMNS = ("law", "parameters", "tokens", "per parameter", "loss", "of its largest run")
SMALLER_COLUMNS = ("size", "parameters", "tokens", "loss", "penalty", "serving", "cost of the same loss")


def sentence(answer: BudgetAnswer, recommendation: Recommended) -> str:
    """Describe the recommended model of one kind."""
    shape = recommendation.shape
    size = f"{count(shape.parameters)} parameters"
    if shape.kind == "mixture":
        size = f"a mixture of {size}, {count(shape.active)} active,"
    else:
        size = f"a dense model of {size}"
    band = f" (P5-P95 {recommendation.loss_band[0]:.3f} to {recommendation.loss_band[1]:.3f})"
    served = answer.question.inference_tokens
    spent = f"{answer.question.budget}" + (f", {count(served)} tokens served included" if served else "")
    text = f"{size} on {count(recommendation.tokens)} tokens for {spent}: predicted loss {recommendation.loss:.3f}{band}"
    if recommendation.plan is None:
        return f"{text}; give --cluster for days, dollars and energy"
    run = recommendation.plan.run
    return (
        f"{text}; {written(run.days, DAYS)} on {recommendation.plan.job.cluster.key} "
        f"(P5-P95 {written(run.finish_days.p5, DAYS)} to {written(run.finish_days.p95, DAYS)}), "
        f"{written(run.cost.total_usd, DOLLARS)}, {written(run.energy.total_kwh, ENERGY)}, goodput {run.goodput:.1%}, "
        f"in {recommendation.plan.chosen.layout}"
    )


def comparison(answer: BudgetAnswer) -> Iterator[str]:
    """Compare the two kinds of models, by the laws that sized them and by the joint law.

    Also how far unique tokens suffice, if they are limited.
    """
    if len(answer.recommendations) > 1:
        first, second = answer.recommendations
        agrees = "agrees" if first.joint_loss < second.joint_loss else "disagrees"
        yield (
            f"The {first.shape.kind} model is predicted to be better by {second.loss - first.loss:.3f}; the joint law of both kinds "
            f"(Ludziejewski et al. 2025) {agrees}: {first.joint_loss:.3f} against {second.joint_loss:.3f}. Losses of different laws are of "
            "different text."
        )
    unique = answer.question.unique_tokens
    if math.isfinite(unique):
        for recommendation in answer.recommendations:
            if recommendation.tokens <= unique:
                yield f"{recommendation.shape.name}: the {count(unique)} unique tokens do not run out."
                continue
            yield (
                f"{recommendation.shape.name} reads the {count(unique)} unique tokens {recommendation.tokens / unique:.3g} times, which costs "
                f"{recommendation.loss - recommendation.new_text_loss:.3f} of loss against as much new text (Muennighoff et al. 2023)."
            )
            if recommendation.halved.loss - recommendation.loss < _HARDLY:
                yield (
                    f"{recommendation.shape.name}: the text is used up: half the budget reaches {recommendation.halved.loss:.3f} with {count(recommendation.halved.parameters)} "
                    f"parameters on {count(recommendation.halved.tokens)} tokens. Spend less, or spend it on new text."
                )


def law_rows(recommendation: Recommended) -> Iterator[tuple[str, ...]]:
    """Yield the optima of all laws, by ``LAW_COLUMNS``."""
    for row in recommendation.laws:
        yield (
            f"{row.law}: {row.source.citation.split(' (')[0]}",
            count(row.parameters),
            count(row.tokens),
            f"{row.tokens / row.parameters:.3g}",
            "-" if row.loss is None else f"{row.loss:.3f}",
            times(row.beyond) if row.beyond > 1 else "within",
        )


def smaller_rows(recommendation: Recommended) -> Iterator[tuple[str, ...]]:
    """Yield over-trained models for the same budget, by ``SMALLER_COLUMNS``."""
    for row in recommendation.smaller:
        yield (
            f"{row.smaller:g} x smaller",
            count(row.parameters),
            count(row.tokens),
            f"{row.loss:.3f}",
            f"+{row.penalty:.3f}",
            f"{-(1 - 1 / row.smaller):.0%}",
            f"{row.same_loss_cost:.3g} x" if math.isfinite(row.same_loss_cost) else "not at any cost",
        )


def tables(recommendation: Recommended) -> Iterator[tuple[str, tuple[str, ...], Iterator[tuple[str, ...]]]]:
    """Yield title, columns and rows of the tables of one kind of model."""
    yield f"{recommendation.shape.kind}: the optimum of each law", LAW_COLUMNS, law_rows(recommendation)
    title = f"{recommendation.shape.kind}: smaller models, cheaper to serve, for the same budget"
    yield title, SMALLER_COLUMNS, smaller_rows(recommendation)


def changes(answer: BudgetAnswer) -> Iterator[str]:
    """Yield sentences on the figures that the answer depends on."""
    for recommendation in answer.recommendations:
        name, sizes = (
            recommendation.shape.name,
            [row.parameters for row in recommendation.laws if row.loss is not None],
        )
        yield f"{name}: the laws' optimal sizes are {count(min(sizes))} to {count(max(sizes))} active parameters"
        if recommendation.size_band is not None:
            low, high = recommendation.size_band
            yield f"{name}: by the law's own standard errors, {count(low)} to {count(high)} (P5-P95)"
        main = recommendation.laws[0]
        if main.beyond > _FAR:
            yield (
                f"{name}: this is {times(main.beyond)} the compute that the law was fitted to; small runs of your own "
                "(phalanx plan fit) are better evidence"
            )
        for times_budget, other in (("half", recommendation.halved), ("twice", recommendation.doubled)):
            yield (
                f"{name}: {times_budget} the budget is for {count(other.parameters)} parameters on {count(other.tokens)} tokens, "
                f"loss {other.loss:.3f}"
            )
        if recommendation.plan is not None:
            run = recommendation.plan.run
            yield (
                f"{name}: steps {recommendation.plan.band.p5 - 1:+.0%} to {recommendation.plan.band.p95 - 1:+.0%} of the planned (P5-P95) make the same tokens "
                f"cost {written(run.usd.p5, DOLLARS)} to {written(run.usd.p95, DOLLARS)}"
            )
    if not answer.question.inference_tokens:
        yield "tokens to be served (--inference-tokens) make the best model smaller; text that runs out (--unique-tokens) too"


def report_section(answer: BudgetAnswer) -> str:
    """Return the answer as a section of a report. HTML."""
    paragraphs = [
        f"{'Train' if index == 0 else 'Or'} {sentence(answer, recommendation)}."
        for index, recommendation in enumerate(answer.recommendations)
    ]
    paragraphs += [*answer.left_out, *comparison(answer)]
    text = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)
    for recommendation in answer.recommendations:
        for title, columns, rows in tables(recommendation):
            text += f"<p>{escape(title)}</p>{html_table(columns, rows)}"
    listed = "".join(f"<li>{escape(change)}</li>" for change in changes(answer))
    return f"{text}<p>What would change the answer</p><ul>{listed}</ul>"


def times(factor: float) -> str:
    """Format a factor: ``1,200 times``."""
    return f"{factor:,.0f} times" if factor >= 10 else f"{factor:.2g} times"


def count(number: float) -> str:
    """Format a count with three digits and its letter."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}"


# JSON.


def answer_json(answer: BudgetAnswer) -> dict[str, object]:
    """Return plain values of the complete answer, the better kind of model first. Infinities are ``None``."""
    question = answer.question
    return {
        "budget": asdict(question.budget),
        "cluster": question.cluster.key if question.cluster else None,
        "unique_tokens": _finite(question.unique_tokens),
        "inference_tokens": question.inference_tokens,
        "left_out": answer.left_out,
        "found": [_recommended(recommendation) for recommendation in answer.recommendations],
    }


def fit_json(law: FittedLaw, targets: Mapping[str, tuple[float, float]]) -> dict[str, object]:
    """Return plain values of a law fitted to runs, and of its predictions for the sizes and tokens in ``targets``."""
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
                "what": title,
                "parameters": parameters,
                "tokens": tokens,
                "loss": law.loss(parameters, tokens),
                "loss_p5_p95": law.band(parameters, tokens),
                "beyond": law.beyond(parameters, tokens),
            }
            for title, (parameters, tokens) in targets.items()
        ],
    }


def _recommended(recommendation: Recommended) -> dict[str, object]:
    return {
        "kind": recommendation.shape.kind,
        "name": recommendation.shape.name,
        "parameters": recommendation.shape.parameters,
        "active_parameters": recommendation.shape.active,
        "model": asdict(recommendation.shape.model),
        "tokens": recommendation.tokens,
        "loss": recommendation.loss,
        "loss_p5_p95": recommendation.loss_band,
        "parameters_p5_p95": recommendation.size_band,
        "new_text_loss": recommendation.new_text_loss,
        "joint_law_loss": recommendation.joint_loss,
        "laws": [asdict(row) for row in recommendation.laws],
        "smaller": [
            {name: _finite(value) for name, value in asdict(row).items()} for row in recommendation.smaller
        ],
        "half_the_budget": asdict(recommendation.halved),
        "twice_the_budget": asdict(recommendation.doubled),
        "planned": [
            {"active_parameters": size, "cost_per_token": cost} for size, cost in recommendation.planned
        ],
        "plan": plan_json(recommendation.plan) if recommendation.plan else None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
