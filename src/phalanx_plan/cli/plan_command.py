"""``phalanx plan``: layouts, step times, memory and cost of a run, with their uncertainty.

The heavy parts (arrays, catalogs) are imported when they are needed, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING

import click

from phalanx.command import command_options
from phalanx.command_help import DefaultGroup
from phalanx_plan.cli import plan_request as request

if TYPE_CHECKING:
    from phalanx.run.spec import RunSpec
    from phalanx_plan.search.plan import Plan


def write_files(plan: Plan, spec: RunSpec, options: request.LayoutOptions) -> None:
    """Write the files that the options name (HTML report, Perfetto trace, run file); print their paths on standard error.

    The run file of a known model marks fields that the user has to fill in (``write_run_file``).
    """
    report, trace, out = options.report, options.trace, options.out
    if report is not None:
        from phalanx_plan.report.page import report_page

        report.write_text(report_page(plan), encoding="utf-8")
    if trace is not None:
        from phalanx_plan.report.analyses import perfetto

        trace.write_text(json.dumps(perfetto(plan.job, plan.chosen)), encoding="utf-8")
    if out is not None:
        from phalanx_plan.search.layout_text import run_of_layout

        winner = run_of_layout(spec, plan.job, plan.chosen.layout, plan.tokens if options.tokens else None)
        request.write_run_file(out, winner, options.stated)
    paths = [str(path) for path in (report, trace, out) if path is not None]
    if paths:
        click.echo(f"wrote {', '.join(paths)}", err=True)


@click.command("layout", cls=request.GivenOnce)
@command_options(request.LayoutOptions)
def layout_command(options: request.LayoutOptions) -> None:
    """Find the best layouts of a run on a cluster, with the reasons, or explain one layout.

    Needs no accelerator. Figures of the cluster can be overridden with --set cluster.NAME=VALUE, as in
    --set cluster.accelerator.price_per_hour=1.9. Conditions are on the fields of a layout: tp, cp, pp, vpp, ep, etp, dp,
    fsdp, mbs, zero, gpus, schedule, recompute, ... Exit code 1: the layout of --layout does not fit in memory.

    \b
      phalanx plan layout configs/llama3-405b.toml --cluster h100:16384
      phalanx plan layout configs/deepseek-v3.toml --cluster "gb200-nvl72 x 29" --tokens 15T --optimize cost
      phalanx plan layout configs/llama3-405b.toml --cluster h100:16384 --layout tp=8,pp=16,dp=128 --explain
      phalanx plan layout --model moe-100t --cluster vr200-nvl72:100000 --require 'tp<=8' --report out.html
      phalanx plan layout configs/llama3-405b.toml --cluster h100:16384 --topology fabric.toml --share pod=0.5
      phalanx plan layout configs/quickstart.toml --cluster this --out winner.toml
    """
    with request.mistakes():
        _answer_layouts(options)


@click.command("budget", cls=request.GivenOnce)
@command_options(request.BudgetOptions)
def budget_command(options: request.BudgetOptions) -> None:
    """Plan what to train for BUDGET: the model's size, its tokens and, on a cluster, its layout.

    BUDGET is money, compute or time: 40M$, 1e25FLOP, 30d, "1M gpu-hours". All but compute need --cluster.

    \b
      phalanx plan budget 1e25FLOP
      phalanx plan budget 40M$ --cluster h100:4096 --unique-tokens 5T
    """
    with request.mistakes():
        _answer_budget(options.budget, options)


@click.command("fit", cls=request.GivenOnce)
@command_options(request.FitOptions)
def fit_command(options: request.FitOptions) -> None:
    """Fit a scaling law to finished runs, and predict a larger run from it.

    The runs in the directories differ in size and tokens alone. The prediction is for RUN_FILE, or for the best model of --budget.

    \b
      phalanx plan fit runs/small-* large.toml
      phalanx plan fit runs/small-* --budget 1e20FLOP
    """
    with request.mistakes():
        request.refuse_repeated(options.overrides)
        _fit_law(options)


@click.command("serve", cls=request.GivenOnce)
@command_options(request.ServiceOptions)
def serve_command(options: request.ServiceOptions) -> None:
    """Plan workers that serve a model: how many of which division carry --traffic within --slo, and their cost.

    \b
      phalanx plan serve configs/llama3-405b.toml --cluster h200:64 --traffic in=2000,out=500
      phalanx plan serve --model llama3-8b --cluster h100:8 --traffic in=2000,out=500,rate=10 --slo ttft=2s,tpot=50ms
    """
    with request.mistakes():
        _answer_service(options)


@click.command("stacks", cls=request.GivenOnce)
@command_options(request.StackOptions)
def stacks_command(options: request.StackOptions) -> None:
    """List the software that can be planned for, with its published runs.

    \b
      phalanx plan stacks
      phalanx plan stacks --json
    """
    with request.mistakes():
        _list_stacks(options)


@click.command("plan", cls=request.GivenOnce)
@command_options(request.PlanOptions)
def unnamed_command(options: request.PlanOptions) -> None:
    """Find the best layouts of a run on a cluster, as `phalanx plan layout` does.

    --budget, --fit, --serve and --stacks are the earlier spelling of the commands `phalanx plan budget`, `fit`, `serve`
    and `stacks`, whose help shows the options of each.

    \b
      phalanx plan configs/llama3-405b.toml --cluster h100:16384
    """
    with request.mistakes():
        if options.stacks:
            request.refuse_beside("--stacks", ("stacks", "as_json"), "it lists software, and stops")
            _list_stacks(options)
        elif options.serve:
            request.refuse_beside("--serve", _fields(request.ServiceOptions, "serve"), _INSTEAD_OF_SERVE)
            _answer_service(options)
        else:
            request.refuse_without(
                "--serve", _fields(request.ServiceOptions) - _fields(request.LayoutOptions)
            )
            _answer_run(options)


_INSTEAD_OF_SERVE = "it plans workers, not the layout of a training run"
_INSTEAD_OF_FIT = "it fits the run directories that follow, and predicts one run file, or FLOP of --budget"
_INSTEAD_OF_BUDGET = "the model, its tokens and its layout are the answer"


@click.group(
    "plan",
    cls=DefaultGroup,
    unnamed=unnamed_command,
    commands=[layout_command, budget_command, fit_command, serve_command, stacks_command],
)
def command() -> None:
    """Plan a run before it costs anything: its layout on a cluster, its size for a budget, or the workers that serve it.

    Without the name of a command: phalanx plan layout. The options --budget, --fit, --serve and --stacks are the earlier
    spelling of the commands of these names.

    \b
      phalanx plan layout configs/llama3-405b.toml --cluster h100:16384
      phalanx plan budget 40M$ --cluster h100:4096
      phalanx plan fit runs/small-a runs/small-b large.toml
      phalanx plan serve configs/llama3-405b.toml --cluster h200:64 --traffic in=2000,out=500
    """


def _fields(section: type, *more: str) -> set[str]:
    """Return the names of a section's options, and ``more``."""
    return {field.name for field in fields(section)} | {*more}


def _answer_run(options: request.PlanOptions) -> None:
    """Plan a training run: fit a law with ``--fit``, size a model with ``--budget``, else plan layouts.

    Raises UsageError for options that do not go with the one that decides.
    """
    if options.fits:
        request.refuse_beside("--fit", _fields(request.FitOptions, "fits"), _INSTEAD_OF_FIT)
        _fit_law(options)
    elif options.budget is not None:
        request.refuse_beside("--budget", _fields(request.BudgetOptions), _INSTEAD_OF_BUDGET)
        _answer_budget(options.budget, options)
    else:
        request.refuse_without("--budget", _fields(request.SizeOptions) - _fields(request.LayoutOptions))
        _answer_layouts(options)


def _list_stacks(options: request.StackOptions) -> None:
    from phalanx_plan.cli.plan_tables import print_stacks

    print_stacks(as_json=options.as_json)


def _fit_law(options: request.FitOptions | request.PlanOptions) -> None:
    from phalanx_plan.cli.what_to_train import answer_fit

    answer_fit(options)


def _answer_budget(budget: str, options: request.SizeOptions) -> None:
    """Find the best model for a budget, print it and write the files. Raises UsageError for options that conflict."""
    from phalanx_plan.cli.what_to_train import answer_budget

    request.refuse_repeated(options.overrides)
    request.refuse_outputs(options)
    question = request.budget_question(budget, options)
    answer_budget(question, out=options.out, report=options.report, as_json=options.as_json)


def _answer_service(options: request.ServiceOptions) -> None:
    """Plan workers that serve the model, and print them. Raises UsageError or ``DemandError``."""
    from phalanx_plan.cli.plan_tables import answer_service

    request.refuse_repeated(options.overrides)
    traffic, slo = request.require_service(options), options.slo or ""
    spec, cluster = request.requested_spec(options), request.requested_cluster(options)
    answer_service(
        spec, cluster, traffic, slo, options.weight_format, top=options.top, as_json=options.as_json
    )


def _answer_layouts(options: request.LayoutOptions) -> None:
    """Plan layouts of the run, write the files of the options and print the plan. ``--layout`` estimates that one.

    Searches without ``--layout``, or with ``--explain``. Raises UsageError for conflicting options, and an error for a
    field that plans do not use. Exits with code 1 if the chosen layout does not fit, after all is written.
    """
    from phalanx_plan.api import plan_json
    from phalanx_plan.cli.plan_tables import print_plan
    from phalanx_plan.search.plan import make_plan
    from phalanx_plan.search.query import refuse_unused

    request.refuse_repeated(options.overrides)
    request.refuse_outputs(options, options.trace, options.files, options.network)
    aim = request.requested_aim(options, options.top, options.layout, options.tokens)
    request.require_one_run_file(options.files)
    refuse_unused(options.fields, searching=aim.layout is None, tokens=aim.tokens)
    spec, cluster = request.requested_spec(options, options), request.requested_cluster(options)
    plan = make_plan(
        *(spec, cluster, aim),
        stated=options.stated,
        searching=aim.layout is None or options.explain,
        placer=request.requested_placer(options, spec),
    )
    write_files(plan, spec, options)
    if options.as_json:
        click.echo(json.dumps(plan_json(plan), allow_nan=False))
    else:
        print_plan(plan, explain=options.explain)
    if not plan.chosen.fits:
        raise SystemExit(1)
