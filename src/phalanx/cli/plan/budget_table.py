"""The tables of ``phalanx plan --budget``: what to train in a sentence, what the laws disagree about, and what would change it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.plan.report.units import DAYS, DOLLARS, ENERGY, written
from phalanx.plan.scaling.answer import BudgetAnswer, Recommended
from phalanx.plan.scaling.fit import FittedLaw
from phalanx.plan.scaling.optimum import OverTrained

_FAR = 3.0
"""How far beyond its largest run a law is asked before that is said."""


def print_answer(answer: BudgetAnswer) -> None:
    """Everything that fits a terminal."""
    console = Console(highlight=False)
    for place, one in enumerate(answer.found):
        console.print(f"[bold]{'train' if place == 0 else 'or'}[/bold] {escape(sentence(answer, one))}")
    for text in (*answer.left_out, *comparison(answer)):
        console.print(escape(text))
    for one in answer.found:
        console.print(_laws_table(one))
        console.print(_smaller_table(one))
    console.print("[bold]What would change the answer[/bold]")
    for text in changes(answer):
        console.print(f"  {escape(text)}")
    for one in answer.found:
        if one.plan is not None:
            console.print(f"[dim]{escape(str(one.plan.evidence))}[/dim]")
            for caveat in one.plan.caveats:
                console.print(f"[bold yellow]caution, {one.shape.name}:[/bold yellow] {escape(caveat.text)}")


def sentence(answer: BudgetAnswer, one: Recommended) -> str:
    """The answer for one kind of model."""
    shape = one.shape
    size = f"{count(shape.parameters)} parameters"
    if shape.kind == "mixture":
        size = f"a mixture of {size}, {count(shape.active)} active,"
    else:
        size = f"a dense model of {size}"
    band = f" (P5-P95 {one.loss_band[0]:.3f} to {one.loss_band[1]:.3f})"
    text = f"{size} on {count(one.tokens)} tokens for {answer.question.budget}: predicted loss {one.loss:.3f}{band}"
    if one.plan is None:
        return f"{text}; give --cluster for days, dollars and energy"
    run = one.plan.run
    return (
        f"{text}; {written(run.days, DAYS)} on {one.plan.job.cluster.key} "
        f"(P5-P95 {written(run.finish_days.p5, DAYS)} to {written(run.finish_days.p95, DAYS)}), "
        f"{written(run.cost.total_usd, DOLLARS)}, {written(run.energy.total_kwh, ENERGY)}, goodput {run.goodput:.1%}, "
        f"in {one.plan.chosen.layout}"
    )


def comparison(answer: BudgetAnswer) -> Iterator[str]:
    """The two kinds of models beside each other, by the laws that sized them and by the joint law."""
    if len(answer.found) > 1:
        first, second = answer.found
        agrees = "agrees" if first.joint_loss < second.joint_loss else "disagrees"
        yield (
            f"The {first.shape.kind} model is predicted to be better by {second.loss - first.loss:.3f}; the joint law of both kinds "
            f"(Ludziejewski et al. 2025) {agrees}: {first.joint_loss:.3f} against {second.joint_loss:.3f}. Losses of different laws are of "
            "different text."
        )
    unique = answer.question.unique_tokens
    if math.isfinite(unique):
        for one in answer.found:
            if one.tokens <= unique:
                yield f"{one.shape.name}: the {count(unique)} unique tokens do not run out."
                continue
            yield (
                f"{one.shape.name} reads the {count(unique)} unique tokens {one.tokens / unique:.3g} times, which costs "
                f"{one.loss - one.new_text_loss:.3f} of loss against as much new text (Muennighoff et al. 2023)."
            )


def _laws_table(one: Recommended) -> Table:
    table = Table(title=f"{one.shape.kind}: what each law calls optimal", title_justify="left", box=None)
    for column in ("law", "parameters", "tokens", "per parameter", "loss", "of its largest run"):
        table.add_column(column, justify="left" if column == "law" else "right")
    for row in one.laws:
        table.add_row(
            f"{row.law}: {row.source.citation.split(' (')[0]}",
            count(row.parameters),
            count(row.tokens),
            f"{row.tokens / row.parameters:.3g}",
            "-" if row.loss is None else f"{row.loss:.3f}",
            times(row.beyond) if row.beyond > 1 else "within",
        )
    return table


def _smaller_table(one: Recommended) -> Table:
    title = f"{one.shape.kind}: smaller models, cheaper to serve, for the same training budget"
    table = Table(title=title, title_justify="left", box=None)
    for column in (
        "size",
        "parameters",
        "tokens",
        "loss",
        "penalty",
        "serving",
        "training for the same loss",
    ):
        table.add_column(column, justify="left" if column == "size" else "right")
    for row in one.smaller:
        table.add_row(
            f"{row.smaller:g} x smaller",
            count(row.parameters),
            count(row.tokens),
            f"{row.loss:.3f}",
            f"+{row.penalty:.3f}",
            f"{-(1 - 1 / row.smaller):.0%}",
            _same_loss(row),
        )
    return table


def _same_loss(row: OverTrained) -> str:
    return f"{row.same_loss_cost:.3g} x" if math.isfinite(row.same_loss_cost) else "not at any cost"


def changes(answer: BudgetAnswer) -> Iterator[str]:
    """What the answer hangs on, in sentences."""
    for one in answer.found:
        name, sizes = one.shape.name, [row.parameters for row in one.laws if row.loss is not None]
        yield f"{name}: the laws' optimal sizes are {count(min(sizes))} to {count(max(sizes))} active parameters"
        if one.size_band is not None:
            low, high = one.size_band
            yield f"{name}: by the law's own standard errors, {count(low)} to {count(high)} (P5-P95)"
        main = one.laws[0]
        if main.beyond > _FAR:
            yield (
                f"{name}: this is {times(main.beyond)} the compute that the law was fitted to; small runs of your own "
                "(phalanx plan --fit) say more"
            )
        twice = one.doubled
        yield (
            f"{name}: twice the budget is for {count(twice.parameters)} parameters on {count(twice.tokens)} tokens, "
            f"loss {twice.loss:.3f}"
        )
        if one.plan is not None:
            run = one.plan.run
            yield (
                f"{name}: steps {one.plan.band.p5 - 1:+.0%} to {one.plan.band.p95 - 1:+.0%} of the planned (P5-P95) make the same tokens "
                f"cost {written(run.usd.p5, DOLLARS)} to {written(run.usd.p95, DOLLARS)}"
            )
    if not answer.question.inference_tokens:
        yield "tokens to be served (--inference-tokens) make the best model smaller; text that runs out (--unique-tokens) too"


def print_fit(law: FittedLaw, asked: Mapping[str, tuple[float, float]]) -> None:
    """A law fitted to runs, run by run, and what it predicts."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None)
    for column in ("run", "parameters", "tokens", "loss", "fitted", "off"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for run, residual in zip(law.runs, law.residuals, strict=True):
        fitted = law.loss(run.parameters, run.tokens)
        sizes = count(run.parameters), count(run.tokens)
        table.add_row(run.name, *sizes, f"{run.loss:.4f}", f"{fitted:.4f}", f"{math.expm1(residual):+.2%}")
    console.print(table)
    (floors, alphas, betas), fitted_law = map(law.constants_band, ("floor", "alpha", "beta")), law.law
    console.print(
        f"loss = {fitted_law.floor:.3f} + {fitted_law.a:.4g} / N^{fitted_law.alpha:.3f} + {fitted_law.b:.4g} / D^{fitted_law.beta:.3f} "
        f"(P5-P95: floor {floors[0]:.2f} to {floors[1]:.2f}, exponents {alphas[0]:.2f} to {alphas[1]:.2f} and {betas[0]:.2f} to "
        f"{betas[1]:.2f}); typical error {law.typical_error:.2%}"
    )
    for what, (parameters, tokens) in asked.items():
        low, high = law.band(parameters, tokens)
        console.print(
            f"[bold]{escape(what)}[/bold]: {count(parameters)} parameters on {count(tokens)} tokens: predicted loss "
            f"{law.loss(parameters, tokens):.3f} (P5-P95 {low:.3f} to {high:.3f}), {law.beyond(parameters, tokens):.3g} times the compute of the "
            "largest run fitted"
        )


def times(factor: float) -> str:
    """A factor in words: ``1,200 times``."""
    return f"{factor:,.0f} times" if factor >= 10 else f"{factor:.2g} times"


def count(number: float) -> str:
    """A count with three digits and its letter."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}"
