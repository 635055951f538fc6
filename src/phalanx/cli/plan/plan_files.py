"""The files that ``phalanx plan`` writes: the report, the trace, and the run file of the layout that was chosen."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from phalanx.plan.search.plan import Plan
    from phalanx.plan.search.query import Aim
    from phalanx.run.spec import RunSpec

_TO_FILL_IN = ("data.path", "data.corpus", "data.tokenizer", "optimizer.lr", "schedule.warmup_steps")
"""Fields that decide what is learned, which a plan of a model by its name cannot know."""


@dataclass(frozen=True)
class Written:
    """The paths of the files to write; ``None`` for those that were not asked for."""

    report: Path | None
    trace: Path | None
    out: Path | None


def write_files(
    plan: Plan,
    spec: RunSpec,
    aim: Aim,
    written: Written,
    stated: set[str] | None,
) -> None:
    """Writes what was asked for, and says so; ``stated`` are the fields given beside a model's name, ``None`` with a run file."""
    report, trace, out = written.report, written.trace, written.out
    if report is not None:
        from phalanx.plan.report.page import report_page

        report.write_text(report_page(plan), encoding="utf-8")
    if trace is not None:
        from phalanx.plan.report.trace import perfetto

        trace.write_text(json.dumps(perfetto(plan.job, plan.chosen)), encoding="utf-8")
    if out is not None:
        import tomli_w

        from phalanx.plan.search.advice import run_of_layout
        from phalanx.run.read import to_table

        winner = run_of_layout(spec, plan.job, plan.chosen.layout, plan.tokens if aim.tokens else None)
        unfilled = tuple(field for field in _TO_FILL_IN if stated is not None and field not in stated)
        if unfilled:
            listed = ", ".join(unfilled)
            click.echo(f"{out}: fill in {listed} before it is trained: they are defaults", err=True)
        winner = replace(winner, unfilled=unfilled or winner.unfilled)
        out.write_text(tomli_w.dumps(to_table(winner)), encoding="utf-8")
    paths = [str(path) for path in (report, trace, out) if path is not None]
    if paths:
        click.echo(f"wrote {', '.join(paths)}", err=True)
