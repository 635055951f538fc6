"""``phalanx plan budget`` and ``phalanx plan fit``: the best model size and tokens for a budget, and laws fitted to a user's small runs.

A law covers runs that differ in size and tokens alone: the same text, tokenizer, sequence length, held-out text and kind of
model. No field shows whether a run was trained well (learning rate, complete schedule); a badly trained run biases the law.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from phalanx.run.directory.paths import RunDirectory
    from phalanx.run.spec import RunSpec
    from phalanx_plan.scaling.answer import BudgetAnswer, Question
    from phalanx_plan.scaling.fit import SmallRun

_TO_CHOOSE = ("data.path", "data.corpus", "data.tokenizer", "optimizer.lr", "schedule.warmup_steps")
"""Fields that decide what is learned, which a budget does not determine."""


def refuse_model_fields(overrides: Sequence[str]) -> None:
    """Raise ``UsageError`` for fields that the answer decides."""
    for text in overrides:
        field = text.partition("=")[0].strip()
        if field.startswith("model.") or field in (
            "train.steps",
            "train.batch_size",
            "train.seq_len",
            "name",
        ):
            raise click.UsageError(
                f"--set {text}: of a budget the model, its steps and its batch are the answer; --batch and --seq-len set the latter, "
                "and a model of yours is planned by itself (phalanx plan layout --model NAME --tokens T)"
            )


def answer_budget(question: Question, *, out: Path | None, report: Path | None, as_json: bool) -> None:
    """Find the best model for a budget, print it, and write the output files of the better kind of model.

    Progress goes to standard error. Raises UsageError for output files without a cluster.
    """
    from phalanx_plan.cli.plan_tables import print_answer
    from phalanx_plan.scaling.answer import answer
    from phalanx_plan.scaling.words import answer_json

    recommended = answer(question, on_progress=lambda text: click.echo(f"{text} ...", err=True))
    if (out is not None or report is not None) and recommended.best.plan is None:
        raise click.UsageError("--out and --report need a run on a cluster: give --cluster NAME:COUNT")
    _write(recommended, out, report)
    if as_json:
        click.echo(json.dumps(answer_json(recommended), allow_nan=False))
    else:
        print_answer(recommended)


def _write(recommended: BudgetAnswer, out: Path | None, report: Path | None) -> None:
    """Write the report and the run file of the best model, and name the fields to fill in, if it has a plan."""
    best = recommended.best
    if best.plan is None:
        return
    if report is not None:
        from phalanx_plan.report.page import report_page
        from phalanx_plan.scaling.words import report_section

        page = report_page(best.plan, [("What to train", report_section(recommended))])
        report.write_text(page, encoding="utf-8")
        click.echo(f"wrote {report}", err=True)
    if out is not None:
        import tomli_w

        from phalanx.run.read import to_table
        from phalanx_plan.search.layout_text import run_of_layout

        winner = run_of_layout(best.spec, best.plan.job, best.plan.chosen.layout, best.tokens)
        unfilled = tuple(field for field in _TO_CHOOSE if field not in best.stated)
        out.write_text(tomli_w.dumps(to_table(replace(winner, unfilled=unfilled))), encoding="utf-8")
        click.echo(f"wrote {out}: fill in {', '.join(unfilled)} before it is trained", err=True)


def answer_fit(
    places: Sequence[Path], *, overrides: Sequence[str], tokens: str | None, budget: str | None, as_json: bool
) -> None:
    """Fit a law to the run directories among ``places``; predict the run file among them, or the best model for a FLOP
    budget. Prints the law and the predictions. Raises UsageError for more than one run file, and ``FitError``.
    """
    from phalanx_plan.cli.plan_tables import print_fit
    from phalanx_plan.scaling.fit import fit
    from phalanx_plan.scaling.words import fit_json

    files = [place for place in places if place.suffix == ".toml"]
    if len(files) > 1:
        raise click.UsageError(f"fit predicts one run file, not {len(files)}")
    if (tokens or overrides) and not files:
        raise click.UsageError("--tokens and --set change the run file that fit predicts: give one")
    law = fit(read_runs([place for place in places if place not in files]))
    targets: dict[str, tuple[float, float]] = {}
    if files:
        targets[str(files[0])] = _asked_run(files[0], overrides, tokens)
    if budget is not None:
        targets[f"the best for {budget}"] = law.law.optimum(_flops(budget))
    if as_json:
        click.echo(json.dumps(fit_json(law, targets), allow_nan=False))
    else:
        print_fit(law, targets)


def _asked_run(path: Path, overrides: Sequence[str], tokens: str | None) -> tuple[float, float]:
    """Return the parameters and tokens of the run file to predict, with its overrides."""
    from phalanx.model.facts.presets import PRESETS
    from phalanx.run.read import read_run
    from phalanx_plan.search.query import read_tokens

    spec = read_run(path, PRESETS, tuple(overrides))
    trained = read_tokens(tokens) if tokens else spec.train.steps * spec.train.batch_size * spec.train.seq_len
    return float(size_of(spec)), float(trained)


def _flops(text: str) -> float:
    """Return a budget in FLOP; raises UsageError for another unit."""
    from phalanx_plan.scaling.optimum import read_budget

    budget = read_budget(text)
    if budget.unit != "flop":
        raise click.UsageError(f"budget {text}: for a prediction, a budget must be in FLOP, as in 1e20FLOP")
    return budget.amount


# Finished runs as points of a scaling law.


def read_runs(places: Sequence[Path]) -> tuple[SmallRun, ...]:
    """Return the runs in these directories. Raises ``FitError`` for an unfinished run, a run of another kind, or no run."""
    from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
    from phalanx_plan.scaling.fit import FitError

    if len({place.resolve() for place in places}) < len(places):
        raise FitError("fit: a run directory is given twice")
    runs, kinds = [], []
    for place in places:
        directory = RunDirectory(place)
        try:
            spec = read_resolved(directory)
        except RunDirectoryError as error:
            raise FitError(f"fit: {error}") from error
        runs.append(_small_run(place, directory, spec))
        kinds.append(_kind(spec, str(directory.read_record().get("data_fingerprint", ""))))
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
    from phalanx.model.facts.shape import count
    from phalanx.run.kinds.whole_model import resolve

    return count(resolve(spec.model, spec.data.vocab_size), spec.train.seq_len).active_parameters


def _small_run(place: Path, directory: RunDirectory, spec: RunSpec) -> SmallRun:
    """Return the size, tokens and held-out loss of a finished run; raises ``FitError`` if it is not finished or has no
    such loss.
    """
    from phalanx_plan.scaling.fit import FitError, SmallRun

    result = directory.finished_result()
    if result is None:
        raise FitError(
            f"{place} is not finished: train it to its end (phalanx train {place}), or leave it out"
        )
    if result.held_out_loss is None:
        raise FitError(f"{place} has no held-out loss: hold out more text (data.held_out), or leave it out")
    return SmallRun(str(place), float(size_of(spec)), float(result.tokens), result.held_out_loss)


def _kind(spec: RunSpec, fingerprint: str) -> dict[str, object]:
    """The properties that runs of one law have in common."""
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
