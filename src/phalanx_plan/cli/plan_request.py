"""Options of ``phalanx plan`` and their combinations; the run, cluster, network and budget question that they name.

The heavy parts (arrays, catalogs) are imported when they are needed, so that ``--help`` answers at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from phalanx.cli.errors import explained
from phalanx.command import Argument, AsJson, FilePath, Option, Overrides, given_options
from phalanx.run.fields import FRACTION, POSITIVE, ValueRange
from phalanx_plan.cli.what_to_train import refuse_beside, refuse_model_fields

if TYPE_CHECKING:
    from phalanx.hardware.cluster import Cluster
    from phalanx.run.spec import RunSpec
    from phalanx_plan.scaling.answer import Question
    from phalanx_plan.search.alternatives import Placer
    from phalanx_plan.search.query import Aim


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    files: Annotated[tuple[Path, ...], Argument(metavar="[RUN_FILE | RUN_DIR...]")] = ()
    model: str | None = None
    """A known model instead of a run file, such as llama3-405b."""
    budget: str | None = None
    """Plan what to train for so much: 40M$, 1e25FLOP, 30d, 1M gpu-hours; instead of a run file."""
    kind: Literal["dense", "mixture"] | None = None
    """With --budget: only models of this kind."""
    unique_tokens: str | None = None
    """With --budget: the text there is, as in 1T; more tokens repeat it."""
    inference_tokens: str | None = None
    """With --budget: tokens to be served later, which it pays for too."""
    fits: Annotated[bool, Option("--fit")] = False
    """Fit a scaling law to finished runs: --fit RUN_DIR..., beside a run file to predict."""
    cluster_name: Annotated[str, Option("--cluster")] = "this"
    """Where: NAME:COUNT, or a TOML file."""
    tokens: str | None = None
    """Train on so many, as in 15T; by default those of the run file, or 20 a parameter."""
    optimize: Literal["time", "cost", "gpus"] = "time"
    layout: str | None = None
    """One layout: tp=8,pp=16,dp=128; what it leaves out, or "file", is as in the run file."""
    explain: bool = False
    """Memory and time of the layout term by term, beside the best one's."""
    require: Annotated[tuple[str, ...], Option(metavar="CONDITION")] = ()
    """Only layouts where this holds; may be repeated."""
    top: Annotated[int, ValueRange(at_least=1, at_most=1000)] = 8
    """How many layouts to list."""
    stack: str = "phalanx"
    """The software that trains; --stacks lists them."""
    batch: Annotated[int, POSITIVE] = 2048
    """With --model or --budget: sequences."""
    seq_len: Annotated[int, POSITIVE] = 8192
    """With --model or --budget: tokens."""
    overrides: Overrides = ()
    """Override a field of the run file, or a figure."""
    step_error: Annotated[float | None, FRACTION] = None
    """Relative standard deviation of step times; by default that of published runs."""
    assume: Annotated[tuple[str, ...], Option(metavar="NAME=VALUE")] = ()
    """Assumption about the run: recovery=restart, repair_s=14400, failures_per_1000_node_days=6.5, ..."""
    network: Annotated[str | None, Option("--topology", metavar="FILE|slurm|kubernetes")] = None
    """Rank layouts with what their placement on this network adds to a step (see `phalanx place`)."""
    shares: Annotated[tuple[str, ...], Option("--share", metavar="LEVEL=FRACTION")] = ()
    """With --topology: the part of its nodes' rate that may leave a domain of a level at once."""
    report: FilePath | None = None
    """Write a page that stands alone (HTML)."""
    trace: FilePath | None = None
    """Write the step for ui.perfetto.dev."""
    out: FilePath | None = None
    """Write a run file for the best layout."""
    serve: bool = False
    """Plan workers that serve the model, for --traffic within --slo."""
    traffic: str | None = None
    """With --serve: tokens and requests a second, as in in=2000,out=500,hit=0.3,rate=40."""
    slo: str | None = None
    """With --serve: times of 99 in 100 requests, as in ttft=1s,tpot=50ms; also percentile=0.9."""
    weight_format: Annotated[Literal["bf16", "fp8"], Option("--format")] = "bf16"
    """With --serve: the format of weights in products."""
    stacks: bool = False
    """List the software that can be planned for, with the published runs known of it, and stop."""
    as_json: AsJson = False

    @property
    def fields(self) -> list[str]:
        """The overrides of fields of the run file, without those of the cluster."""
        return [text for text in self.overrides if not text.startswith(_CLUSTER_FIGURES)]

    @property
    def stated(self) -> set[str] | None:
        """Fields that the user set beside a known model; ``None`` for a run file, which states all fields."""
        return None if self.model is None else {text.partition("=")[0].strip() for text in self.fields}


class GivenOnce(click.Command):
    """A command that refuses a repeated option, unless the option is declared to be repeatable."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        once_only = [
            option
            for option in order
            if isinstance(option, click.Option) and not (option.multiple or option.is_flag)
        ]
        for option in once_only:
            # Shell completion parses resiliently.
            if once_only.count(option) > 1 and not ctx.resilient_parsing:
                raise click.UsageError(f"{option.opts[0]} is given more than once: give it once", ctx)
        return super().parse_args(ctx, args)


def refuse_repeated(overrides: tuple[str, ...]) -> None:
    """Raise UsageError for a field that is set twice."""
    names = [text.partition("=")[0].strip() for text in overrides]
    for name in names:
        if names.count(name) > 1:
            raise click.UsageError(f"--set {name} is given more than once: give it once")


def refuse_outputs(options: PlanOptions) -> None:
    """Raise UsageError, before the search, for an output file that has no folder, is written twice, or is also read."""
    written: dict[Path, str] = {}
    outputs = {"report": options.report, "trace": options.trace, "out": options.out}
    for name, path in outputs.items():
        if path is not None and (first := written.setdefault(path.resolve(), name)) != name:
            raise click.UsageError(f"--{first} and --{name} both write {path}: give each a file of its own")
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            cause = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise click.UsageError(
                f"--{name} {path}: {cause}: give the path of a file in a folder that exists"
            )
    for name in ("report", "trace"):
        path = outputs[name]
        if path is not None and path.resolve() in {file.resolve() for file in options.files}:
            raise click.UsageError(f"--{name} would write over the run file {path}: give another name")


def requested_placer(options: PlanOptions, spec: RunSpec) -> Placer | None:
    """Return the placer of layouts on the network of the options; ``None`` without a network."""
    network, shares = options.network, options.shares
    if network is None:
        if shares:
            raise click.UsageError("--share is about a network: --topology FILE, slurm or kubernetes")
        return None
    from phalanx.launch.engines.order import EngineError
    from phalanx.launch.topology_files import load_topology
    from phalanx_plan.planner import fractions, placer_on

    try:
        topology = load_topology(network, spec.launch.partition if network == "slurm" else "")
    except EngineError as error:
        raise click.UsageError(f"--topology {network}: {error}") from error
    rates = topology.with_rates(topology.node_bytes_per_s, fractions(shares or spec.launch.shares))
    return placer_on(rates, spec)


def require_one_run_file(files: tuple[Path, ...]) -> None:
    """Raise UsageError for several run files, and for options of a model's name beside a run file."""
    if len(files) > 1:
        raise click.UsageError(
            f"one run file is planned at a time, not {len(files)}; --fit takes run directories"
        )
    if files and not {"batch", "seq_len"}.isdisjoint(given_options()):
        raise click.UsageError(
            "--batch and --seq-len go with --model; of a run file, use --set train.batch_size=..."
        )


def require_service(options: PlanOptions) -> str:
    """Return the traffic to plan for. Raises UsageError for options that do not plan a service."""
    refuse_beside("--serve", _WITH_SERVE, "it plans workers, not the layout of a training run")
    if options.traffic is None:
        raise click.UsageError("--serve needs --traffic, as in --traffic in=2000,out=500,rate=40")
    if len(options.files) > 1:
        raise click.UsageError(f"one model is planned at a time, not {len(options.files)}")
    return options.traffic


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


def refuse_without(option: str, fields: Iterable[str]) -> None:
    """Raise UsageError if one of ``fields`` is on the command line without ``option``."""
    written = given_options()
    for field in fields:
        if field in written:
            raise click.UsageError(f"{written[field]} goes with {option}")


def budget_question(options: PlanOptions, aim: Aim) -> Question:
    """Return the question of a budget. Raises an error for options and fields that the answer decides."""
    from phalanx_plan.scaling.answer import Question
    from phalanx_plan.scaling.optimum import read_budget
    from phalanx_plan.scaling.shapes import MODEL_KINDS
    from phalanx_plan.search.query import read_tokens, refuse_unused

    refuse_beside("--budget", _WITH_BUDGET, "the model, its tokens and its layout are the answer")
    refuse_unused(options.fields, searching=True, tokens=None)
    refuse_model_fields(options.fields)
    unique, inference = options.unique_tokens, options.inference_tokens
    question = Question(
        read_budget(options.budget or ""),
        None,
        aim,
        overrides=tuple(options.fields),
        kinds=tuple(kind for kind in MODEL_KINDS if options.kind in (None, kind)),
        unique_tokens=read_tokens(unique, "--unique-tokens") if unique else math.inf,
        inference_tokens=read_tokens(inference, "--inference-tokens") if inference else 0.0,
    )
    written = given_options()
    cluster = requested_cluster(options) if "cluster_name" in written else question.cluster
    batch = options.batch if "batch" in written else None
    return replace(question, cluster=cluster, seq_len=options.seq_len, batch=batch)


class _Mistake(click.ClickException):
    """An error in a request."""

    exit_code = click.UsageError.exit_code


@contextmanager
def mistakes() -> Iterator[None]:
    """Show the error of a request in one message, with exit code 2."""
    try:
        with explained(ValueError, OSError):
            yield
    except click.UsageError:
        raise
    except click.ClickException as error:
        raise _Mistake(error.message) from error


def requested_spec(options: PlanOptions) -> RunSpec:
    """Return the run of the first file or of the known model, with its overrides. Raises UsageError unless exactly one is set."""
    model, overrides = options.model, options.fields
    if bool(options.files) == (model is not None):
        raise click.UsageError("give a run file, or --model NAME (phalanx models lists them)")
    from phalanx.model.facts.presets import PRESETS
    from phalanx.run.read import read_run
    from phalanx_plan.search.query import run_of_model

    if model is not None:
        for field, option in (("train.batch_size", "batch"), ("train.seq_len", "seq_len")):
            if option in given_options() and any(text.startswith(f"{field}=") for text in overrides):
                raise click.UsageError(
                    f"--set {field} and --{option.replace('_', '-')} set the same field: give one"
                )
        return run_of_model(model, options.seq_len, options.batch, tuple(overrides))
    return read_run(options.files[0], PRESETS, tuple(overrides))


_CLUSTER_FIGURES = "cluster."


def requested_cluster(options: PlanOptions) -> Cluster:
    """Return the cluster by its name or file, with the overridden figures."""
    from phalanx.hardware.catalog import cluster
    from phalanx.hardware.cluster import read_figure, with_value

    name = options.cluster_name
    target = cluster(name)
    if re.fullmatch(r"[\w-]+", name) and name != "this":
        click.echo(
            f"--cluster {name}: one domain, {target.key}; --cluster {name}:N is of N accelerators", err=True
        )
    for text in options.overrides:
        if text.startswith(_CLUSTER_FIGURES):
            figure, _, value = text.removeprefix(_CLUSTER_FIGURES).partition("=")
            try:
                target = with_value(target, figure.strip(), read_figure(value))
            except ValueError as error:
                raise click.UsageError(f"--set {text}: {error}") from error
    return target
