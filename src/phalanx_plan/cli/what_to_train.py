"""``phalanx plan budget`` and ``phalanx plan fit``: the best model size and tokens for a budget, and laws fitted to a user's small runs.

A law covers runs that differ in size and tokens alone: the same text, tokenizer, sequence length, held-out text and kind of
model. No field shows whether a run was trained well (learning rate, complete schedule); a badly trained run biases the law.

The terminal and the report describe an answer in the same words: a sentence for each kind of model, the laws' range, and the
sensitivity of the answer. The keys of JSON, also of a fitted law, are stable.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from phalanx.cli.output import text_console
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import count as count_model
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.read import read_run
from phalanx.run.spec import RunSpec
from phalanx_plan.api import plan_json
from phalanx_plan.cli.plan_request import FitOptions, PlanOptions, write_run_file
from phalanx_plan.report.elements import DAYS, DOLLARS, ENERGY, counted, html_table, written
from phalanx_plan.report.page import report_page
from phalanx_plan.scaling.answer import BudgetAnswer, Question, Recommended, answer
from phalanx_plan.scaling.fit import FitError, FittedLaw, SmallRun, fit
from phalanx_plan.scaling.optimum import read_budget
from phalanx_plan.search.layout_text import run_of_layout
from phalanx_plan.search.query import read_tokens
from phalanx_plan.whole_run.estimate import json_value

_HARDLY = 0.01
"""Loss gain below which half of a budget is hardly worth spending: less than the laws' own standard error."""
_FAR = 3.0
"""Factor beyond its largest run from which a law is reported as extrapolated."""

LAW_COLUMNS = ("law", "parameters", "tokens", "per parameter", "loss", "of its largest run")
SMALLER_COLUMNS = ("size", "parameters", "tokens", "loss", "penalty", "serving", "cost of the same loss")


def sentence(answer: BudgetAnswer, recommendation: Recommended) -> str:
    """Describe the recommended model of one kind: size, tokens, loss with band; with a plan also time, dollars and energy."""
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
    """Yield a sentence that compares the two kinds of models, by their own laws and by the joint law, if there are two.

    If unique tokens are limited, also yields one for each kind: how often they are repeated and what loss that costs,
    or that they do not run out. Another one follows if half the budget hardly loses anything.
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
    """Yield one row for the optimum of each law, in the order of ``LAW_COLUMNS``; the loss is ``-`` if the law predicts none."""
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
    """Yield one row for each over-trained smaller model of the same budget, in the order of ``SMALLER_COLUMNS``."""
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
    """Yield sentences on what the answer depends on: the laws' spread, extrapolation, half and twice the budget, and the plan's step times.

    Without tokens to be served, the last one names the options that make the best model smaller.
    """
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
    """Return the answer as an HTML section of a report: the models, their tables, and what would change the answer."""
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
    """Format a number with three significant digits and T, B, M or k; below 1,000 without a letter."""
    return counted(number, digits=3)


# JSON.


def answer_json(answer: BudgetAnswer) -> dict[str, object]:
    """Return plain values of the complete answer, the better kind of model first. Infinities are ``None``."""
    question = answer.question
    return {
        "budget": asdict(question.budget),
        "cluster": question.cluster.key if question.cluster else None,
        "unique_tokens": json_value(question.unique_tokens),
        "inference_tokens": question.inference_tokens,
        "left_out": answer.left_out,
        "found": [
            {
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
                "smaller": [json_value(asdict(row)) for row in recommendation.smaller],
                "half_the_budget": asdict(recommendation.halved),
                "twice_the_budget": asdict(recommendation.doubled),
                "planned": [
                    {"active_parameters": size, "cost_per_token": cost}
                    for size, cost in recommendation.planned
                ],
                "plan": plan_json(recommendation.plan) if recommendation.plan else None,
            }
            for recommendation in answer.recommendations
        ],
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


# The commands.


def answer_budget(question: Question, *, out: Path | None, report: Path | None, as_json: bool) -> None:
    """Find the best model for a budget, print it as text or JSON, and write the output files of the better kind of
    model.

    Progress goes to standard error. Raises UsageError for output files without a cluster.
    """

    recommended = answer(question, on_progress=lambda text: click.echo(f"{text} ...", err=True))
    if (out is not None or report is not None) and recommended.best.plan is None:
        raise click.UsageError("--out and --report need a run on a cluster: give --cluster NAME:COUNT")
    _write(recommended, out, report)
    if as_json:
        click.echo(json.dumps(answer_json(recommended), allow_nan=False))
    else:
        print_answer(recommended)


def _write(recommended: BudgetAnswer, out: Path | None, report: Path | None) -> None:
    """Write the report and the run file of the best model, each if its path is given. Does nothing without a plan.

    The paths, and the fields to fill in before training, are printed on standard error.
    """
    best = recommended.best
    if best.plan is None:
        return
    if report is not None:
        page = report_page(best.plan, [("What to train", report_section(recommended))])
        report.write_text(page, encoding="utf-8")
        click.echo(f"wrote {report}", err=True)
    if out is not None:
        winner = run_of_layout(best.spec, best.plan.job, best.plan.chosen.layout, best.tokens)
        write_run_file(out, winner, best.stated)
        click.echo(f"wrote {out}", err=True)


def answer_fit(options: FitOptions | PlanOptions) -> None:
    """Fit a law to the run directories among ``options.files``, and print it with its predictions, as text or JSON.

    Predicts the run file among them, and the best model for ``options.budget`` (FLOP), if they are given. Raises
    ``FitError``, and UsageError for two run files, options without one, or a budget in another unit.
    """
    budget, overrides, tokens = options.budget, options.overrides, options.tokens
    files = [place for place in options.files if place.suffix == ".toml"]
    if len(files) > 1:
        raise click.UsageError(f"fit predicts one run file, not {len(files)}")
    if (tokens or overrides) and not files:
        raise click.UsageError("--tokens and --set change the run file that fit predicts: give one")
    law = fit(read_runs([place for place in options.files if place not in files]))
    targets: dict[str, tuple[float, float]] = {}
    if files:
        targets[str(files[0])] = _run_to_predict(files[0], overrides, tokens)
    if budget is not None:
        targets[f"the best for {budget}"] = law.law.optimum(_flops(budget))
    if options.as_json:
        click.echo(json.dumps(fit_json(law, targets), allow_nan=False))
    else:
        print_fit(law, targets)


def _run_to_predict(path: Path, overrides: Sequence[str], tokens: str | None) -> tuple[float, float]:
    """Return (parameters, tokens) of the run file to predict, with its overrides; ``tokens`` None means those of its steps."""

    spec = read_run(path, PRESETS, tuple(overrides))
    trained = read_tokens(tokens) if tokens else spec.train.steps * spec.train.batch_size * spec.train.seq_len
    return float(size_of(spec)), float(trained)


def _flops(text: str) -> float:
    """Return a budget in FLOP; raises UsageError for another unit."""

    budget = read_budget(text)
    if budget.unit != "flop":
        raise click.UsageError(f"budget {text}: for a prediction, a budget must be in FLOP, as in 1e20FLOP")
    return budget.amount


# Finished runs as points of a scaling law.


def read_runs(places: Sequence[Path]) -> tuple[SmallRun, ...]:
    """Return the runs in these directories, in order.

    Raises ``FitError`` for a repeated, unfinished or damaged run, one without held-out loss, or runs that differ in
    more than size and tokens.
    """

    if len({place.resolve() for place in places}) < len(places):
        raise FitError("fit: a run directory is given twice")
    runs, kinds = [], []
    for place in places:
        directory = RunDirectory(place)
        try:
            spec, record = read_resolved(directory), directory.read_record()
        except RunDirectoryError as error:
            raise FitError(f"fit: {error}") from error
        runs.append(_small_run(place, directory, spec))
        kinds.append(_kind(spec, str(record.get("data_fingerprint", ""))))
    for place, kind in zip(places, kinds, strict=True):
        for name, value in kind.items():
            if value != kinds[0][name]:
                raise FitError(
                    f"{place} and {places[0]} differ in {name} ({value} and {kinds[0][name]}): a law is of runs that differ in "
                    "size and tokens alone; leave one of them out"
                )
    return tuple(runs)


def size_of(spec: RunSpec) -> int:
    """Return the model size that laws use: active parameters of a token, embedding included."""

    return count_model(resolve(spec.model, spec.data.vocab_size), spec.train.seq_len).active_parameters


def _small_run(place: Path, directory: RunDirectory, spec: RunSpec) -> SmallRun:
    """Return the size, tokens and held-out loss of a finished run; raises ``FitError`` if it is not finished or has no
    such loss.
    """

    result = directory.finished_result()
    if result is None:
        raise FitError(
            f"{place} is not finished: train it to its end (phalanx train {place}), or leave it out"
        )
    if result.held_out_loss is None:
        raise FitError(f"{place} has no held-out loss: hold out more text (data.held_out), or leave it out")
    return SmallRun(str(place), float(size_of(spec)), float(result.tokens), result.held_out_loss)


def _kind(spec: RunSpec, fingerprint: str) -> dict[str, object]:
    """Return the properties that all runs of one law must share: data, vocabulary, length, evaluation, experts, schedule, optimizer."""
    moe = spec.model.moe
    return {
        "the data (its fingerprint)": fingerprint[:12],
        "model.vocab_size": spec.model.vocab_size,
        "train.seq_len": spec.train.seq_len,
        "evaluation": asdict(spec.evaluation) | {"every_steps": None},
        "model.moe (experts, per_token)": None if moe is None else (moe.experts, moe.per_token),
        "schedule.kind": spec.schedule.kind,
        "optimizer.name": spec.optimizer.name,
    }


# Terminal output.


def print_answer(answer: BudgetAnswer) -> None:
    """Print the recommended models as sentences and tables, what would change the answer, and the evidence and cautions."""
    console = text_console()
    for index, recommendation in enumerate(answer.recommendations):
        console.print(
            Text.assemble(("train" if index == 0 else "or", "bold"), f" {sentence(answer, recommendation)}")
        )
    for text in (*answer.left_out, *comparison(answer)):
        console.print(text)
    for recommendation in answer.recommendations:
        for title, columns, rows in tables(recommendation):
            table = Table(title=title, title_justify="left", box=None)
            for index, column in enumerate(columns):
                table.add_column(column, justify="right" if index else "left")
            for row in rows:
                table.add_row(*row)
            console.print(table)
    console.print("What would change the answer", style="bold")
    for text in changes(answer):
        console.print(f"  {text}")
    for recommendation in answer.recommendations:
        if recommendation.plan is not None:
            console.print(str(recommendation.plan.evidence), style="dim")
            for caveat in recommendation.plan.caveats:
                caution = (f"caution, {recommendation.shape.name}:", "bold yellow")
                console.print(Text.assemble(caution, f" {caveat.text}"))


def print_fit(law: FittedLaw, targets: Mapping[str, tuple[float, float]]) -> None:
    """Print each run beside its fitted loss, the formula with P5-P95 of its constants, and the predictions for ``targets``."""
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
    for title, (parameters, tokens) in targets.items():
        low, high = law.band(parameters, tokens)
        console.print(
            Text.assemble(
                (title, "bold"),
                f": {count(parameters)} parameters on {count(tokens)} tokens: predicted loss {law.loss(parameters, tokens):.3f} "
                f"(P5-P95 {low:.3f} to {high:.3f}), {law.beyond(parameters, tokens):.3g} times the compute of the largest run fitted",
            )
        )
