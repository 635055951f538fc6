"""``phalanx plan``: which layout, how fast, will it fit, for how much, and how sure that is.

The heavy parts (arrays, catalogs) are imported when they are needed, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.errors import explained
from phalanx.cli.plan.what_to_train import answer_budget, answer_fit, refuse_beside, refuse_model_fields

if TYPE_CHECKING:
    from phalanx.hardware.cluster import Cluster
    from phalanx.plan.scaling.answer import Question
    from phalanx.plan.search.network import Placer
    from phalanx.plan.search.plan import Plan
    from phalanx.plan.search.query import Aim
    from phalanx.run.spec import RunSpec


def _list_stacks(context: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked:
        from phalanx.cli.plan.stacks_table import print_stacks

        print_stacks()
        context.exit()


@click.command("plan")
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
    expose_value=False,
    is_eager=True,
    callback=_list_stacks,
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
    as_json: bool,
) -> None:
    """Find the best layouts of a run on a cluster, and say why; or explain one layout; or say what to train for a budget.

    Needs no accelerator. Figures of the cluster can be overridden with --set cluster.NAME=VALUE, as in
    --set cluster.accelerator.price_per_hour=1.9. Conditions are on the fields of a layout: tp, cp, pp, vpp, ep, etp, dp,
    fsdp, mbs, zero, gpus, schedule, recompute, ...

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
      phalanx plan configs/llama3-405b.toml --serve --cluster h200:64 --traffic in=2000,out=500,rate=20 --slo ttft=2s,tpot=50ms
    """
    with _mistakes():
        from phalanx.plan.search.query import Aim, refuse_unused

        if serve:
            _require_service(files, traffic)
            from phalanx.cli.plan.serving_table import answer_service

            chosen = _spec(files[0] if files else None, model, batch, seq_len, _without_cluster(overrides))
            place = _cluster(cluster_name, overrides)
            answer_service(chosen, place, traffic or "", slo or "", weight_format, top=top, as_json=as_json)
            return
        if without := [name for name in ("traffic", "slo", "weight_format") if _is_given(name)]:
            raise click.UsageError(f"--{without[0].removeprefix('weight_')} goes with --serve")
        if fits:
            instead = (
                "it fits the run directories that follow, and predicts one run file, or FLOP of --budget"
            )
            refuse_beside(
                "--fit", _given(), ("files", "fits", "budget", "tokens", "overrides", "as_json"), instead
            )
            answer_fit(files, overrides=overrides, tokens=tokens, budget=budget, as_json=as_json)
            return
        aim = Aim(optimize, require, top, stack, layout, tokens, step_error, assume)
        if budget is not None:
            refuse_beside(
                "--budget", _given(), _WITH_BUDGET, "the model, its tokens and its layout are the answer"
            )
            fields = _without_cluster(overrides)
            refuse_unused(fields, searching=True, tokens=None)
            refuse_model_fields(fields)
            question = _question(budget, aim, kind, unique_tokens, inference_tokens, fields)
            if _is_given("cluster_name"):
                question = replace(question, cluster=_cluster(cluster_name, overrides))
            question = replace(question, seq_len=seq_len, batch=batch if _is_given("batch") else None)
            answer_budget(question, out=out, report=report, as_json=as_json)
            return
        if only := [name for name in ("kind", "unique_tokens", "inference_tokens") if _is_given(name)]:
            raise click.UsageError(f"--{only[0].replace('_', '-')} goes with --budget")
        if len(files) > 1:
            raise click.UsageError(
                f"one run file is planned at a time, not {len(files)}; --fit takes run directories"
            )
        run_file = files[0] if files else None
        from phalanx.cli.plan.plan_table import print_plan
        from phalanx.plan.search.as_json import plan_json
        from phalanx.plan.search.plan import make_plan

        given = {name for name in ("batch", "seq_len") if _is_given(name)}
        if given and run_file is not None:
            raise click.UsageError(
                "--batch and --seq-len go with --model; of a run file, use --set train.batch_size=..."
            )
        fields = _without_cluster(overrides)
        searching = layout is None or explain
        refuse_unused(fields, searching=layout is None, tokens=tokens)
        spec = _spec(run_file, model, batch, seq_len, fields)
        cluster = _cluster(cluster_name, overrides)
        stated = None if model is None else {text.partition("=")[0].strip() for text in fields}
        placer = _placer(network, shares, spec)
        plan = make_plan(spec, cluster, aim, stated=stated, searching=searching, placer=placer)
        _write_files(plan, spec, aim, report, trace, out, stated)
        if as_json:
            click.echo(json.dumps(plan_json(plan), allow_nan=False))
        else:
            print_plan(plan, explain=explain)


def _placer(network: str | None, shares: tuple[str, ...], spec: RunSpec) -> Placer | None:
    """What places layouts on the network that was given; none without one."""
    if network is None:
        if shares:
            raise click.UsageError("--share is about a network: --topology FILE, slurm or kubernetes")
        return None
    from phalanx.launch.engines.live_topology import load_topology
    from phalanx.launch.engines.tools import EngineError
    from phalanx.launch.given_nodes import fractions
    from phalanx.launch.placed_layout import placer_on

    try:
        topology = load_topology(network, spec.launch.partition if network == "slurm" else "")
    except EngineError as error:
        raise click.UsageError(f"--topology {network}: {error}") from error
    rates = topology.with_rates(topology.node_bytes_per_s, fractions(shares or spec.launch.shares))
    return placer_on(rates, spec)


def _require_service(files: tuple[Path, ...], traffic: str | None) -> None:
    """Raises UsageError for options that do not plan a service."""
    refuse_beside("--serve", _given(), _WITH_SERVE, "it plans workers, not the layout of a training run")
    if traffic is None:
        raise click.UsageError("--serve needs --traffic, as in --traffic in=2000,out=500,rate=40")
    if len(files) > 1:
        raise click.UsageError(f"one model is planned at a time, not {len(files)}")


_WITH_SERVE = (
    "files",
    "model",
    "serve",
    "traffic",
    "slo",
    "weight_format",
    "cluster_name",
    "overrides",
    "top",
    "as_json",
)
"""Options that go with --serve."""
_WITH_BUDGET = (
    "budget",
    "kind",
    "unique_tokens",
    "inference_tokens",
    "cluster_name",
    "optimize",
    "require",
    "stack",
    "batch",
    "seq_len",
    "overrides",
    "step_error",
    "assume",
    "report",
    "out",
    "as_json",
)
"""Options that go with --budget."""


def _given() -> list[str]:
    """The parameters that stand on the command line."""
    return [name for name in click.get_current_context().params if _is_given(name)]


def _question(
    budget: str,
    aim: Aim,
    kind: str | None,
    unique_tokens: str | None,
    inference_tokens: str | None,
    fields: list[str],
) -> Question:
    from phalanx.plan.scaling.answer import Question
    from phalanx.plan.scaling.budget import read_budget
    from phalanx.plan.scaling.shapes import MODEL_KINDS
    from phalanx.plan.search.query import read_tokens

    return Question(
        read_budget(budget),
        None,
        aim,
        overrides=tuple(fields),
        kinds=tuple(one for one in MODEL_KINDS if kind in (None, one)),
        unique_tokens=read_tokens(unique_tokens, "--unique-tokens") if unique_tokens else math.inf,
        inference_tokens=read_tokens(inference_tokens, "--inference-tokens") if inference_tokens else 0.0,
    )


class _Mistake(click.ClickException):
    """Something wrong with a request."""

    exit_code = click.UsageError.exit_code


@contextmanager
def _mistakes() -> Iterator[None]:
    """Shows what is wrong with a request in one message, exit code 2."""
    try:
        with explained(ValueError, OSError):
            yield
    except click.UsageError:
        raise
    except click.ClickException as error:
        raise _Mistake(error.message) from error


def _is_given(option: str) -> bool:
    source = click.get_current_context().get_parameter_source(option)
    return source is click.core.ParameterSource.COMMANDLINE


def _spec(
    run_file: Path | None, model: str | None, batch: int, seq_len: int, overrides: list[str]
) -> RunSpec:
    if (run_file is None) == (model is None):
        raise click.UsageError("give a run file, or --model NAME (phalanx models lists them)")
    from phalanx.model.facts.presets import PRESETS
    from phalanx.plan.search.query import run_of_model
    from phalanx.run.read import read_run

    if model is not None:
        for field, option in (("train.batch_size", "batch"), ("train.seq_len", "seq_len")):
            if _is_given(option) and any(text.startswith(f"{field}=") for text in overrides):
                raise click.UsageError(
                    f"--set {field} and --{option.replace('_', '-')} say the same: give one"
                )
        return run_of_model(model, seq_len, batch, tuple(overrides))
    assert run_file is not None, "one of the two is given"
    return read_run(run_file, PRESETS, tuple(overrides))


_CLUSTER = "cluster."


def _without_cluster(overrides: Iterable[str]) -> list[str]:
    return [text for text in overrides if not text.startswith(_CLUSTER)]


def _cluster(name: str, overrides: Iterable[str]) -> Cluster:
    from phalanx.hardware.catalog import cluster
    from phalanx.hardware.overrides import with_value

    found = cluster(name)
    if re.fullmatch(r"[\w-]+", name) and name != "this":
        click.echo(
            f"--cluster {name}: one domain, {found.key}; --cluster {name}:N is of N accelerators", err=True
        )
    for text in overrides:
        if text.startswith(_CLUSTER):
            figure, _, value = text.removeprefix(_CLUSTER).partition("=")
            try:
                found = with_value(found, figure, float(value))
            except ValueError as error:
                raise click.UsageError(f"--set {text}: {error}") from error
    return found


_TO_FILL_IN = ("data.path", "data.corpus", "data.tokenizer", "optimizer.lr", "schedule.warmup_steps")
"""Fields that decide what is learned, which a plan of a model by its name cannot know."""


def _write_files(
    plan: Plan,
    spec: RunSpec,
    aim: Aim,
    report: Path | None,
    trace: Path | None,
    out: Path | None,
    stated: set[str] | None,
) -> None:
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
    written = [str(path) for path in (report, trace, out) if path is not None]
    if written:
        click.echo(f"wrote {', '.join(written)}", err=True)
