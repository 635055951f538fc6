"""``phalanx plan``: which layout, how fast, will it fit, for how much, and how sure that is.

The heavy parts (arrays, catalogs) are imported when they are needed, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.plan.plan_request import (
    GivenOnce,
    Subject,
    given_options,
    mistakes,
    one_run_file,
    placer_asked,
    question_asked,
    refuse_nowhere,
    refuse_over,
    refuse_repeated,
    refuse_without,
    require_service,
    spec_asked,
)
from phalanx.cli.plan.what_to_train import answer_budget, answer_fit, refuse_beside

if TYPE_CHECKING:
    from phalanx.hardware.cluster import Cluster
    from phalanx.plan.search.alternatives import Placer
    from phalanx.plan.search.plan import Plan
    from phalanx.plan.search.query import Aim
    from phalanx.run.spec import RunSpec


# The files that ``phalanx plan`` writes: the report, the trace, and the run file of the layout that was chosen.

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

        from phalanx.plan.search.layout_text import run_of_layout
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


@click.command("plan", cls=GivenOnce)
@click.argument("files", nargs=-1, metavar="[RUN_FILE | RUN_DIR...]", type=click.Path(path_type=Path))
@click.option("--model", help="A known model instead of a run file, such as llama3-405b.")
@click.option(
    "--budget", help="What to train for so much: 40M$, 1e25FLOP, 30d, 1M gpu-hours; instead of a run file."
)
@click.option(
    "--kind", type=click.Choice(["dense", "mixture"]), help="With --budget: only models of this kind."
)
@click.option("--unique-tokens", help="With --budget: the text there is, as in 1T; more tokens repeat it.")
@click.option("--inference-tokens", help="With --budget: tokens to be served later, which it pays for too.")
@click.option(
    "--fit",
    "fits",
    is_flag=True,
    help="Fit a scaling law to finished runs: --fit RUN_DIR..., beside a run file to predict.",
)
@click.option(
    "--cluster", "cluster_name", default="this", show_default=True, help="Where: NAME:COUNT, or a TOML file."
)
@click.option(
    "--tokens", help="Train on so many, as in 15T; by default what the run file says, or 20 a parameter."
)
@click.option("--optimize", type=click.Choice(["time", "cost", "gpus"]), default="time", show_default=True)
@click.option(
    "--layout", help='One layout: tp=8,pp=16,dp=128; what it leaves out, or "file", is as in the run file.'
)
@click.option(
    "--explain", is_flag=True, help="Memory and time of the layout term by term, beside the best one's."
)
@click.option(
    "--require", multiple=True, metavar="CONDITION", help="Only layouts where this holds; may be repeated."
)
@click.option(
    "--top", type=click.IntRange(1, 1000), default=8, show_default=True, help="How many layouts to list."
)
@click.option(
    "--stack", default="phalanx", show_default=True, help="The software that trains; --stacks lists them."
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    help="With --model or --budget: sequences.",
)
@click.option(
    "--seq-len",
    type=click.IntRange(min=1),
    default=8192,
    show_default=True,
    help="With --model or --budget: tokens.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Override a field of the run file, or a figure.",
)
@click.option(
    "--step-error",
    type=click.FloatRange(0, 1),
    help="Relative standard deviation of step times; by default as published runs say.",
)
@click.option(
    "--assume",
    multiple=True,
    metavar="NAME=VALUE",
    help="Of the run: recovery=restart, repair_s=14400, failures_per_1000_node_days=6.5, ...",
)
@click.option(
    "--topology",
    "network",
    metavar="FILE|slurm|kubernetes",
    help="Rank layouts with what their placement on this network adds to a step (see `phalanx place`).",
)
@click.option(
    "--share",
    "shares",
    multiple=True,
    metavar="LEVEL=FRACTION",
    help="With --topology: the part of its nodes' rate that may leave a domain of a level at once.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page that stands alone (HTML).",
)
@click.option(
    "--trace", type=click.Path(dir_okay=False, path_type=Path), help="Write the step for ui.perfetto.dev."
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write a run file for the best layout."
)
@click.option("--serve", is_flag=True, help="Plan workers that serve the model, for --traffic within --slo.")
@click.option(
    "--traffic", help="With --serve: tokens and requests a second, as in in=2000,out=500,hit=0.3,rate=40."
)
@click.option(
    "--slo", help="With --serve: times of 99 in 100 requests, as in ttft=1s,tpot=50ms; also percentile=0.9."
)
@click.option(
    "--format",
    "weight_format",
    type=click.Choice(["bf16", "fp8"]),
    default="bf16",
    show_default=True,
    help="With --serve: the format of weights in products.",
)
@click.option(
    "--stacks",
    is_flag=True,
    help="List the software that can be planned for, with the published runs known of it, and stop.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    files: tuple[Path, ...],
    model: str | None,
    budget: str | None,
    kind: str | None,
    unique_tokens: str | None,
    inference_tokens: str | None,
    fits: bool,
    cluster_name: str,
    tokens: str | None,
    optimize: str,
    layout: str | None,
    explain: bool,
    require: tuple[str, ...],
    top: int,
    stack: str,
    batch: int,
    seq_len: int,
    overrides: tuple[str, ...],
    step_error: float | None,
    assume: tuple[str, ...],
    network: str | None,
    shares: tuple[str, ...],
    report: Path | None,
    trace: Path | None,
    out: Path | None,
    serve: bool,
    traffic: str | None,
    slo: str | None,
    weight_format: str,
    stacks: bool,
    as_json: bool,
) -> None:
    """Find the best layouts of a run on a cluster, and say why; or explain one layout; or say what to train for a budget.

    Needs no accelerator. Figures of the cluster can be overridden with --set cluster.NAME=VALUE, as in
    --set cluster.accelerator.price_per_hour=1.9. Conditions are on the fields of a layout: tp, cp, pp, vpp, ep, etp, dp,
    fsdp, mbs, zero, gpus, schedule, recompute, ... Exit code 1: the layout of --layout does not fit in memory.

    \b
      phalanx plan configs/llama3-405b.toml --cluster h100:16384
      phalanx plan configs/deepseek-v3.toml --cluster "gb200-nvl72 x 29" --tokens 15T --optimize cost
      phalanx plan configs/llama3-405b.toml --cluster h100:16384 --layout tp=8,pp=16,dp=128 --explain
      phalanx plan --model moe-100t --cluster vr200-nvl72:100000 --require 'tp<=8' --report out.html
      phalanx plan configs/llama3-405b.toml --cluster h100:16384 --topology fabric.toml --share pod=0.5
      phalanx plan configs/quickstart.toml --cluster this --out winner.toml
      phalanx plan --budget 40M$ --cluster h100:4096 --unique-tokens 5T
      phalanx plan --budget 1e25FLOP
      phalanx plan --fit runs/small-* large.toml
      phalanx plan configs/llama3-405b.toml --serve --cluster h200:64 --traffic in=2000,out=500,rate=10 --slo ttft=2s,tpot=50ms
    """
    with mistakes():
        if stacks:
            return _list_stacks(as_json=as_json)
        from phalanx.plan.search.query import Aim

        refuse_repeated(overrides)
        refuse_nowhere(report=report, trace=trace, out=out)
        refuse_over(files, report=report, trace=trace)
        if step_error is not None and math.isnan(step_error):
            raise click.UsageError("--step-error nan: write a number from 0 to 1")
        subject = Subject(files, model, batch, seq_len, cluster_name, overrides)
        if serve:
            return _answer_service(subject, traffic, slo or "", weight_format, top=top, as_json=as_json)
        refuse_without("--serve", ("traffic", "slo", "weight_format"))
        if fits:
            refuse_beside("--fit", given_options(), _WITH_FIT, _INSTEAD_OF_FIT)
            return answer_fit(files, overrides=overrides, tokens=tokens, budget=budget, as_json=as_json)
        aim = Aim(optimize, require, top, stack, layout, tokens, step_error, assume)
        if budget is not None:
            question = question_asked(budget, aim, kind, unique_tokens, inference_tokens, overrides)
            return answer_budget(subject.complete(question), out=out, report=report, as_json=as_json)
        refuse_without("--budget", ("kind", "unique_tokens", "inference_tokens"))
        spec = spec_asked(one_run_file(files), model, batch, seq_len, _used(subject.fields, aim))
        cluster, placer = subject.cluster(), placer_asked(network, shares, spec)
        return _answer(
            spec, cluster, aim, subject.stated(), placer, Written(report, trace, out), explain, as_json
        )


_WITH_FIT = ("files", "fits", "budget", "tokens", "overrides", "as_json")
"""Options that go with --fit."""
_INSTEAD_OF_FIT = "it fits the run directories that follow, and predicts one run file, or FLOP of --budget"


def _list_stacks(*, as_json: bool) -> None:
    from phalanx.cli.plan.tables.stacks_table import print_stacks

    refuse_beside("--stacks", given_options(), ("stacks", "as_json"), "it lists software, and stops")
    print_stacks(as_json=as_json)


def _answer_service(
    subject: Subject, traffic: str | None, slo: str, weight_format: str, *, top: int, as_json: bool
) -> None:
    """Plans workers that serve the model, and prints what was found."""
    from phalanx.cli.plan.tables.serving_table import answer_service

    asked = require_service(subject.files, traffic)
    answer_service(subject.spec(), subject.cluster(), asked, slo, weight_format, top=top, as_json=as_json)


def _used(fields: list[str], aim: Aim) -> list[str]:
    """``fields``, all of which a plan uses. Raises an error that names one that it would not."""
    from phalanx.plan.search.query import refuse_unused

    refuse_unused(fields, searching=aim.layout is None, tokens=aim.tokens)
    return fields


def _answer(
    spec: RunSpec,
    cluster: Cluster,
    aim: Aim,
    stated: set[str] | None,
    placer: Placer | None,
    written: Written,
    explain: bool,
    as_json: bool,
) -> None:
    """Makes the plan, writes the files that were asked for and prints it."""
    from phalanx.cli.plan.tables.plan_table import print_plan
    from phalanx.plan.search.as_json import plan_json
    from phalanx.plan.search.plan import make_plan

    searching = aim.layout is None or explain
    plan = make_plan(spec, cluster, aim, stated=stated, searching=searching, placer=placer)
    write_files(plan, spec, aim, written, stated)
    if as_json:
        click.echo(json.dumps(plan_json(plan), allow_nan=False))
    else:
        print_plan(plan, explain=explain)
    if not plan.chosen.fits:
        raise SystemExit(1)
