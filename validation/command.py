"""``python -m validation``: predictions of the planner beside measurements of published runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from phalanx_plan.evidence import TABLE as LEARNED
from validation.bands import learn, left_out, with_coverage
from validation.compare import Outcome, Validation, errors, unseen_outcome_of, validate
from validation.document import document
from validation.judged import RESIDUALS, judged_rows, read_judged, write_judged
from validation.runs import PublishedRun, PublishedRunError, read_published


@click.command()
@click.argument("table", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the accuracy document (Markdown).",
)
@click.option(
    "--learn",
    "learning",
    is_flag=True,
    help="Write the factors and bands that phalanx plan uses, from the published table.",
)
def command(table: Path | None, as_json: bool, report: Path | None, learning: bool) -> None:
    """Compare the planner's predictions with published runs, row by row.

    TABLE is a CSV file, by default validation/data/published_runs.csv. Its columns are the fields of
    validation.runs.PublishedRun, which documents each. Columns that a row does not state may be left blank; a row that
    states too little is listed with the reason.

    \b
      python -m validation
      python -m validation my-runs.csv --json
      python -m validation --report docs/evidence/planner-accuracy.md
      python -m validation --learn
    """
    if learning and table is not None:
        raise click.UsageError(
            "--learn learns from validation/data/published_runs.csv: leave TABLE out, or add its rows there"
        )
    try:
        rows = read_published() if table is None else read_published(table)
    except PublishedRunError as error:
        raise click.UsageError(str(error)) from error
    validation = _validated(rows, quiet=as_json)
    if learning:
        _learn(validation)
    if as_json:
        click.echo(json.dumps(validation_facts(validation)))
    else:
        _print(validation)
    if report is not None:
        judged = read_judged() if table is None else ()
        report.write_text(document(validation, judged, date.today().isoformat()), encoding="utf-8")
        click.echo(f"wrote {report}", err=True)


def _learn(validation: Validation) -> None:
    """Write the residuals of every row, and the table of factors and bands that comes with the package."""
    unseen = [unseen_outcome_of(outcome.run) for outcome in validation.outcomes]
    rows = judged_rows(validation.outcomes, unseen)
    write_judged(rows)
    learned = with_coverage(learn(rows), left_out(rows))
    LEARNED.write_bytes(msgspec.json.format(msgspec.json.encode(learned), indent=1) + b"\n")
    click.echo(f"wrote {RESIDUALS} and {LEARNED}", err=True)


def _validated(rows: Sequence[PublishedRun], *, quiet: bool) -> Validation:
    def progress(done: int, total: int) -> None:
        if not quiet and done % 25 == 0:
            click.echo(f"\r{done} of {total} rows", nl=False, err=True)

    validation = validate(rows, progress=progress)
    if not quiet:
        click.echo("\r", nl=False, err=True)
    return validation


def validation_facts(validation: Validation) -> dict[str, Any]:
    """Return plain values: each row, and summaries; the keys are stable."""
    return {
        "rows": [row_facts(outcome) for outcome in validation.outcomes],
        "summary": {
            "all": summary(validation.outcomes),
            "dense": summary(validation.timed(mixture=False)),
            "mixture": summary(validation.timed(mixture=True)),
        },
        "families": {name: summary(members) for name, members in validation.families().items()},
        "sweeps": [dataclasses.asdict(sweep) for sweep in validation.sweeps],
        "fits": dataclasses.asdict(validation.fits),
        "scalars": {name: dataclasses.asdict(scalar) for name, scalar in validation.scalars.items()},
    }


def row_facts(outcome: Outcome) -> dict[str, Any]:
    """Return one row: predicted, measured, errors, or the reason why it was left out."""
    run, time, memory = outcome.run, outcome.time, outcome.memory
    return {
        "id": run.id,
        "family": run.family,
        "model": run.model,
        "gpu": run.gpu,
        "gpus": run.gpus,
        "excluded": outcome.excluded or None,
        "predicted_step_s": time.predicted_s if time else None,
        "measured_step_s": time.measured_s if time else None,
        "error": time.error if time else None,
        "scalar": time.scalar.value if time else None,
        "scaled_error": time.scaled_error if time else None,
        "time_by_term_s": dict(time.terms) if time else None,
        "predicted_memory_bytes": memory.predicted_bytes if memory else None,
        "measured_memory_bytes": memory.measured_bytes if memory else None,
        "memory_basis": memory.basis if memory else None,
        "memory_error": memory.error if memory else None,
    }


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return counts and errors of some rows."""
    kinds = {
        "time": errors(o.time.error for o in outcomes if o.time),
        "scaled_time": errors(o.time.scaled_error for o in outcomes if o.time),
        "memory": errors(o.memory.error for o in outcomes if o.memory),
    }
    return {
        "rows": len(outcomes),
        "excluded": sum(bool(outcome.excluded) for outcome in outcomes),
        **{name: dataclasses.asdict(stats) if stats else None for name, stats in kinds.items()},
    }


def _print(validation: Validation) -> None:
    console = Console(highlight=False)
    table = Table(
        title="Predicted over measured, less one: median of absolute values, and worst", title_justify="left"
    )
    for column in ("family", "rows", "excluded", "time", "worst", "with factor", "worst", "memory", "worst"):
        table.add_column(column, justify="left" if column == "family" else "right")
    groups = {
        "all": validation.outcomes,
        "dense": validation.timed(mixture=False),
        "mixture": validation.timed(mixture=True),
    }
    for name, members in {**validation.families(), **groups}.items():
        facts = summary(members)
        cells = [part for kind in ("time", "scaled_time", "memory") for part in _cells(facts[kind])]
        table.add_row(
            name, str(facts["rows"]), str(facts["excluded"]), *cells, style="bold" if name in groups else None
        )
    console.print(table)
    fits = validation.fits
    console.print(
        f"ran out of memory: {fits.ran_out_predicted} of {fits.ran_out} predicted; "
        f"ran: {fits.ran_predicted} of {fits.ran} predicted"
    )
    for sweep in validation.sweeps:
        console.print(
            f"{sweep.name}: {sweep.layouts} layouts, regret {sweep.regret:.1%} (at random {sweep.mean_regret:.1%}), "
            f"tau {sweep.tau:.2f}"
        )


def _cells(facts: dict[str, Any] | None) -> tuple[str, str]:
    return (f"{facts['median']:.1%}", f"{facts['worst']:+.1%}") if facts else ("-", "-")
