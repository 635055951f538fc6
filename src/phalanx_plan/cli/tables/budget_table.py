"""The terminal's form of ``phalanx plan --budget`` and ``--fit``."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from phalanx.cli.output import text_console
from phalanx_plan.scaling.answer import BudgetAnswer
from phalanx_plan.scaling.fit import FittedLaw
from phalanx_plan.scaling.words import changes, comparison, count, sentence, tables


def print_answer(answer: BudgetAnswer) -> None:
    """Everything that fits a terminal."""
    console = text_console()
    for place, one in enumerate(answer.found):
        console.print(Text.assemble(("train" if place == 0 else "or", "bold"), f" {sentence(answer, one)}"))
    for text in (*answer.left_out, *comparison(answer)):
        console.print(text)
    for one in answer.found:
        for title, columns, rows in tables(one):
            table = Table(title=title, title_justify="left", box=None)
            for place, column in enumerate(columns):
                table.add_column(column, justify="right" if place else "left")
            for row in rows:
                table.add_row(*row)
            console.print(table)
    console.print("What would change the answer", style="bold")
    for text in changes(answer):
        console.print(f"  {text}")
    for one in answer.found:
        if one.plan is not None:
            console.print(str(one.plan.evidence), style="dim")
            for caveat in one.plan.caveats:
                caution = (f"caution, {one.shape.name}:", "bold yellow")
                console.print(Text.assemble(caution, f" {caveat.text}"))


def print_fit(law: FittedLaw, asked: Mapping[str, tuple[float, float]]) -> None:
    """A law fitted to runs, run by run, and what it predicts."""
    console = text_console(soft_wrap=True)
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
            Text.assemble(
                (what, "bold"),
                f": {count(parameters)} parameters on {count(tokens)} tokens: predicted loss {law.loss(parameters, tokens):.3f} "
                f"(P5-P95 {low:.3f} to {high:.3f}), {law.beyond(parameters, tokens):.3g} times the compute of the largest run fitted",
            )
        )
