"""``phalanx plan``: layouts, step times, memory and cost of a run, with their uncertainty.

The heavy parts (arrays, catalogs) are imported when they are needed, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from phalanx.command import command_options
from phalanx_plan.cli.plan_request import (
    GivenOnce,
    PlanOptions,
    budget_question,
    mistakes,
    refuse_outputs,
    refuse_repeated,
    refuse_without,
    requested_cluster,
    requested_placer,
    requested_spec,
    require_one_run_file,
    require_service,
)
from phalanx_plan.cli.what_to_train import answer_budget, answer_fit, refuse_beside

if TYPE_CHECKING:
    from phalanx.run.spec import RunSpec
    from phalanx_plan.search.plan import Plan
    from phalanx_plan.search.query import Aim


# Files that ``phalanx plan`` writes: the report, the trace, and the run file of the chosen layout.

_TO_FILL_IN = ("data.path", "data.corpus", "data.tokenizer", "optimizer.lr", "schedule.warmup_steps")
"""Fields that decide what is learned; a plan of a model by its name cannot know them."""


def write_files(plan: Plan, spec: RunSpec, options: PlanOptions) -> None:
    """Write the files of the options, and print their paths."""
    report, trace, out = options.report, options.trace, options.out
    if report is not None:
        from phalanx_plan.report.page import report_page

        report.write_text(report_page(plan), encoding="utf-8")
    if trace is not None:
        from phalanx_plan.report.analyses import perfetto

        trace.write_text(json.dumps(perfetto(plan.job, plan.chosen)), encoding="utf-8")
    if out is not None:
        import tomli_w

        from phalanx.run.read import to_table
        from phalanx_plan.search.layout_text import run_of_layout

        winner = run_of_layout(spec, plan.job, plan.chosen.layout, plan.tokens if options.tokens else None)
        stated = options.stated
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
@command_options(PlanOptions)
def command(options: PlanOptions) -> None:
    """Find the best layouts of a run on a cluster, with the reasons; explain one layout; or size a model for a budget.

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
        if options.stacks:
            return _list_stacks(as_json=options.as_json)
        from phalanx_plan.search.query import Aim

        refuse_repeated(options.overrides)
        refuse_outputs(options)
        if options.step_error is not None and math.isnan(options.step_error):
            raise click.UsageError("--step-error nan: write a number from 0 to 1")
        if options.serve:
            return _answer_service(options)
        refuse_without("--serve", ("traffic", "slo", "weight_format"))
        if options.fits:
            refuse_beside("--fit", _WITH_FIT, _INSTEAD_OF_FIT)
            return answer_fit(
                options.files,
                overrides=options.overrides,
                tokens=options.tokens,
                budget=options.budget,
                as_json=options.as_json,
            )
        aim = Aim(
            *(options.optimize, options.require, options.top, options.stack),
            *(options.layout, options.tokens, options.step_error, options.assume),
        )
        if options.budget is not None:
            question = budget_question(options, aim)
            return answer_budget(question, out=options.out, report=options.report, as_json=options.as_json)
        refuse_without("--budget", ("kind", "unique_tokens", "inference_tokens"))
        return _answer_layouts(options, aim)


_WITH_FIT = ("files", "fits", "budget", "tokens", "overrides", "as_json")
"""Options that go with --fit."""
_INSTEAD_OF_FIT = "it fits the run directories that follow, and predicts one run file, or FLOP of --budget"


def _list_stacks(*, as_json: bool) -> None:
    from phalanx_plan.cli.plan_tables import print_stacks

    refuse_beside("--stacks", ("stacks", "as_json"), "it lists software, and stops")
    print_stacks(as_json=as_json)


def _answer_service(options: PlanOptions) -> None:
    """Plan workers that serve the model, and print them."""
    from phalanx_plan.cli.serving_table import answer_service

    traffic, slo = require_service(options), options.slo or ""
    spec, cluster = requested_spec(options), requested_cluster(options)
    answer_service(
        spec, cluster, traffic, slo, options.weight_format, top=options.top, as_json=options.as_json
    )


def _answer_layouts(options: PlanOptions, aim: Aim) -> None:
    """Plan layouts of the run, write the files of the options and print the plan. Raises an error for a field that plans do not use."""
    from phalanx_plan.api import plan_json
    from phalanx_plan.cli.plan_tables import print_plan
    from phalanx_plan.search.plan import make_plan
    from phalanx_plan.search.query import refuse_unused

    require_one_run_file(options.files)
    refuse_unused(options.fields, searching=aim.layout is None, tokens=aim.tokens)
    spec, cluster = requested_spec(options), requested_cluster(options)
    plan = make_plan(
        *(spec, cluster, aim),
        stated=options.stated,
        searching=aim.layout is None or options.explain,
        placer=requested_placer(options, spec),
    )
    write_files(plan, spec, options)
    if options.as_json:
        click.echo(json.dumps(plan_json(plan), allow_nan=False))
    else:
        print_plan(plan, explain=options.explain)
    if not plan.chosen.fits:
        raise SystemExit(1)
