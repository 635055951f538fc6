"""Options of ``phalanx plan`` and its commands, and the run, cluster, network and budget question that they name.

Each option is declared once, and the commands inherit it. Combinations of options that are refused, and the run file that answers, are here too. The heavy parts
(arrays, catalogs) are imported when they are needed, so that ``--help`` answers at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from phalanx.command import Argument, AsJson, FilePath, Heading, Option, Overrides, given_options
from phalanx.command_help import Command
from phalanx.run.fields import FRACTION, POSITIVE, ValueRange

if TYPE_CHECKING:
    from phalanx.hardware.cluster import Cluster
    from phalanx.run.spec import RunSpec
    from phalanx_plan.scaling.answer import Question
    from phalanx_plan.search.alternatives import Placer
    from phalanx_plan.search.query import Aim


CLUSTER_FIGURES = "cluster."
"""Begins an override of a figure of the cluster."""


class GivenOnce(Command):
    """A command that refuses a repeated option, unless the option is declared to be repeatable."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; raises UsageError for an option that takes one value and is given twice."""
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


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """Options of ``phalanx plan stacks``."""

    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class FieldOptions(StackOptions):
    overrides: Overrides = ()
    """Override a field of the run file, or a figure of the cluster."""

    @property
    def fields(self) -> list[str]:
        """The overrides of fields of the run file, without those of the cluster."""
        return [text for text in self.overrides if not text.startswith(CLUSTER_FIGURES)]


@dataclass(frozen=True, kw_only=True)
class TokenOptions(FieldOptions):
    tokens: str | None = None
    """Train on so many, as in 15T; by default those of the run file, or 20 a parameter."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(FieldOptions):
    cluster_name: Annotated[str, Option("--cluster"), Heading("Cluster")] = "this"
    """Where: NAME:COUNT, or a TOML file."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(ClusterOptions):
    files: Annotated[tuple[Path, ...], Argument(metavar="[RUN_FILE]")] = ()
    model: Annotated[str | None, Heading("Model")] = None
    """A known model instead of a run file, such as llama3-405b."""
    top: Annotated[int, ValueRange(at_least=1, at_most=1000), Heading("Result")] = 8
    """How many layouts or divisions to list."""

    @property
    def stated(self) -> set[str] | None:
        """Fields that the user set beside a known model; ``None`` for a run file, which states all fields."""
        return None if self.model is None else {text.partition("=")[0].strip() for text in self.fields}


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    batch: Annotated[int, POSITIVE, Heading("Batch, if there is no run file")] = 2048
    """Sequences of a batch."""
    seq_len: Annotated[int, POSITIVE] = 8192
    """Tokens of a sequence."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions(BatchOptions, ClusterOptions):
    optimize: Annotated[Literal["time", "cost", "gpus"], Heading("Search")] = "time"
    """The aim of the search."""
    require: Annotated[tuple[str, ...], Option(metavar="CONDITION")] = ()
    """Only layouts where this holds; may be repeated."""
    stack: str = "phalanx"
    """The software that trains; `phalanx plan stacks` lists them."""
    step_error: Annotated[float | None, FRACTION] = None
    """Relative standard deviation of step times; by default that of published runs."""
    assume: Annotated[tuple[str, ...], Option(metavar="NAME=VALUE")] = ()
    """Assumption about the run: recovery=restart, repair_s=14400, failures_per_1000_node_days=6.5, ..."""
    report: Annotated[FilePath | None, Heading("Files to write")] = None
    """Write a page that stands alone (HTML)."""
    out: FilePath | None = None
    """Write a run file for the best layout."""


@dataclass(frozen=True, kw_only=True)
class LayoutOptions(SearchOptions, ModelOptions, TokenOptions):
    """Options of ``phalanx plan layout``."""

    layout: Annotated[str | None, Heading("Layout")] = None
    """One layout: tp=8,pp=16,dp=128; what it leaves out, or "file", is as in the run file."""
    explain: bool = False
    """Memory and time of the layout term by term, beside the best one's."""
    network: Annotated[
        str | None, Option("--topology", metavar="FILE|slurm|kubernetes"), Heading("Network")
    ] = None
    """Rank layouts with what their placement on this network adds to a step (see `phalanx place`)."""
    shares: Annotated[tuple[str, ...], Option("--share", metavar="LEVEL=FRACTION")] = ()
    """With --topology: the part of its nodes' rate that may leave a domain of a level at once."""
    trace: Annotated[FilePath | None, Heading("Files to write")] = None
    """Write the step for ui.perfetto.dev."""


@dataclass(frozen=True, kw_only=True)
class SizeOptions(SearchOptions):
    kind: Annotated[Literal["dense", "mixture"] | None, Heading("Model to find")] = None
    """Only models of this kind."""
    unique_tokens: str | None = None
    """The text there is, as in 1T; more tokens repeat it."""
    inference_tokens: str | None = None
    """Tokens to be served later, which the budget pays for too."""


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(SizeOptions):
    """Options of ``phalanx plan budget``."""

    budget: Annotated[str, Argument()]


@dataclass(frozen=True, kw_only=True)
class FitOptions(TokenOptions):
    """Options of ``phalanx plan fit``."""

    files: Annotated[tuple[Path, ...], Argument(metavar="RUN_DIR... [RUN_FILE]")] = ()
    budget: str | None = None
    """Predict the best model for so much, as in 1e20FLOP."""


@dataclass(frozen=True, kw_only=True)
class ServiceOptions(ModelOptions):
    """Options of ``phalanx plan serve``."""

    traffic: Annotated[str | None, Heading("Service")] = None
    """Tokens and requests a second, as in in=2000,out=500,hit=0.3,rate=40."""
    slo: str | None = None
    """Times of 99 in 100 requests, as in ttft=1s,tpot=50ms; also percentile=0.9."""
    weight_format: Annotated[Literal["bf16", "fp8"], Option("--format")] = "bf16"
    """The format of weights in products."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(LayoutOptions, SizeOptions, ServiceOptions):
    """Options of ``phalanx plan`` without the name of a command: its spelling up to version 0.1."""

    files: Annotated[tuple[Path, ...], Argument(metavar="[RUN_FILE | RUN_DIR...]")] = ()
    budget: Annotated[str | None, Heading("Earlier spelling of other commands")] = None
    """Now `phalanx plan budget BUDGET`, with the groups "Search" and "Model to find"."""
    fits: Annotated[bool, Option("--fit")] = False
    """Now `phalanx plan fit RUN_DIR... [RUN_FILE]`."""
    serve: bool = False
    """Now `phalanx plan serve RUN_FILE`, with the group "Service"."""
    stacks: bool = False
    """Now `phalanx plan stacks`."""


# The options of a plan, and the combinations that are refused.


def refuse_repeated(overrides: tuple[str, ...]) -> None:
    """Raise UsageError for a ``--set`` field that is set twice."""
    names = [text.partition("=")[0].strip() for text in overrides]
    for name in names:
        if names.count(name) > 1:
            raise click.UsageError(f"--set {name} is given more than once: give it once")


def refuse_outputs(
    options: SearchOptions,
    trace: Path | None = None,
    files: tuple[Path, ...] = (),
    network: str | None = None,
) -> None:
    """Raise UsageError for an output path that is a folder, has no parent folder, or is written twice.

    Also for one that would overwrite the description of the cluster or of its ``network``, and for a report or trace
    that would overwrite one of ``files``. Checked before the search.
    """
    from phalanx.hardware.catalog import cluster_file

    descriptions = (cluster_file(options.cluster_name), Path(network) if network else None)
    read = {path.resolve() for path in descriptions if path is not None}
    written: dict[Path, str] = {}
    outputs = {"report": options.report, "trace": trace, "out": options.out}
    for name, path in outputs.items():
        if path is not None and (first := written.setdefault(path.resolve(), name)) != name:
            raise click.UsageError(f"--{first} and --{name} both write {path}: give each a file of its own")
        if path is not None and path.is_file() and path.resolve() in read:
            raise click.UsageError(
                f"--{name} would write over {path}, which describes the cluster: give another name"
            )
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            cause = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise click.UsageError(
                f"--{name} {path}: {cause}: give the path of a file in a folder that exists"
            )
    for name in ("report", "trace"):
        path = outputs[name]
        if path is not None and path.resolve() in {file.resolve() for file in files}:
            raise click.UsageError(f"--{name} would write over the run file {path}: give another name")


def requested_placer(options: LayoutOptions, spec: RunSpec) -> Placer | None:
    """Return the placer of layouts on the network of the options; ``None`` without a network.

    Reads the network's file or queries its scheduler. Raises UsageError for an ``EngineError`` of the scheduler, or if
    ``--share`` has no network. Raises ``TopologyError`` for a file or a share that is not valid.
    """
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
    """Raise UsageError for several run files, or for ``--batch`` or ``--seq-len`` beside a run file."""
    if len(files) > 1:
        raise click.UsageError(
            f"one run file is planned at a time, not {len(files)}; phalanx plan fit takes run directories"
        )
    if files and not {"batch", "seq_len"}.isdisjoint(given_options()):
        raise click.UsageError(
            "--batch and --seq-len go with --model; of a run file, use --set train.batch_size=..."
        )


def require_service(options: ServiceOptions) -> str:
    """Return the text of ``--traffic``. Raises UsageError if it is missing or several run files are given."""
    if options.traffic is None:
        raise click.UsageError("serve needs --traffic, as in --traffic in=2000,out=500,rate=40")
    if len(options.files) > 1:
        raise click.UsageError(f"one model is planned at a time, not {len(options.files)}")
    return options.traffic


def refuse_without(option: str, fields: Iterable[str]) -> None:
    """Raise UsageError if the user gave an option of ``fields``. Call it if ``option``, which they need, is not given."""
    written = given_options()
    for field in fields:
        if field in written:
            raise click.UsageError(f"{written[field]} goes with {option}")


def refuse_beside(option: str, allowed: Iterable[str], instead: str) -> None:
    """Raise one UsageError that lists the given options outside ``allowed``; ``instead`` ends the message and names the remedy."""
    wrong = [
        "a run file or directory" if field == "files" else name
        for field, name in given_options().items()
        if field not in {*allowed}
    ]
    if wrong:
        raise click.UsageError(f"{', '.join(wrong)} cannot be given with {option}: {instead}")


def budget_question(budget: str, options: SizeOptions) -> Question:
    """Return the question for a budget, with the defaults of ``Question`` for options that were not given.

    Raises UsageError for model and batch fields, which are the answer, and an error for fields that plans do not use.
    """
    from phalanx_plan.scaling.answer import Question
    from phalanx_plan.scaling.optimum import MODEL_KINDS, read_budget
    from phalanx_plan.search.query import read_tokens, refuse_unused

    refuse_unused(options.fields, searching=True, tokens=None)
    refuse_model_fields(options.fields)
    unique, inference = options.unique_tokens, options.inference_tokens
    question = Question(
        read_budget(budget),
        None,
        requested_aim(options),
        overrides=tuple(options.fields),
        kinds=tuple(kind for kind in MODEL_KINDS if options.kind in (None, kind)),
        unique_tokens=read_tokens(unique, "--unique-tokens") if unique else math.inf,
        inference_tokens=read_tokens(inference, "--inference-tokens") if inference else 0.0,
    )
    written = given_options()
    cluster = requested_cluster(options) if "cluster_name" in written else question.cluster
    batch = options.batch if "batch" in written else None
    return replace(question, cluster=cluster, seq_len=options.seq_len, batch=batch)


def requested_aim(
    options: SearchOptions, top: int = 8, layout: str | None = None, tokens: str | None = None
) -> Aim:
    """Return the aim of a search; ``layout`` None searches all layouts, ``tokens`` None takes the run's steps.

    Raises UsageError for a ``--step-error`` of NaN.
    """
    from phalanx_plan.search.query import Aim

    if options.step_error is not None and math.isnan(options.step_error):
        raise click.UsageError("--step-error nan: write a number from 0 to 1")
    return Aim(
        *(options.optimize, options.require, top, options.stack),
        *(layout, tokens, options.step_error, options.assume),
    )


class _Mistake(click.ClickException):
    """An error in a request."""

    exit_code = click.UsageError.exit_code


@contextmanager
def mistakes() -> Iterator[None]:
    """Context that shows a ``ValueError`` or ``OSError`` of a request as one message, with exit code 2. UsageErrors pass through."""
    from phalanx.cli.errors import explained  # with the rules of a run file, which the help does not need

    try:
        with explained(ValueError, OSError):
            yield
    except click.UsageError:
        raise
    except click.ClickException as error:
        raise _Mistake(error.message) from error


def requested_spec(options: ModelOptions, sizes: BatchOptions | None = None) -> RunSpec:
    """Return the run of the first file or of the known model, with its overrides.

    ``sizes`` has the batch and length of a known model; None means the defaults. Raises UsageError unless exactly one
    of file and model is given, or if two options set one field. Raises the errors of reading a run.
    """
    model, overrides = options.model, options.fields
    if bool(options.files) == (model is not None):
        raise click.UsageError("give a run file, or --model NAME (phalanx models lists them)")
    from phalanx.model.facts.presets import PRESETS
    from phalanx.run.read import read_run, run_file_at
    from phalanx_plan.search.query import run_of_model

    if model is not None:
        for field, option in (("train.batch_size", "batch"), ("train.seq_len", "seq_len")):
            if option in given_options() and any(text.startswith(f"{field}=") for text in overrides):
                raise click.UsageError(
                    f"--set {field} and --{option.replace('_', '-')} set the same field: give one"
                )
        sizes = sizes or BatchOptions()
        return run_of_model(model, sizes.seq_len, sizes.batch, tuple(overrides))
    return read_run(run_file_at(options.files[0]), PRESETS, tuple(overrides))


def requested_cluster(options: ClusterOptions) -> Cluster:
    """Return the cluster by its name or file, with the figures that ``--set`` overrides.

    A name without a count, other than ``this``, means one domain, and a note on standard error states it. Raises
    UsageError or ``HardwareError``.
    """
    from phalanx.hardware.catalog import cluster
    from phalanx.hardware.cluster import read_figure, with_value

    name = options.cluster_name
    target = cluster(name)
    if re.fullmatch(r"[\w-]+", name) and name != "this":
        click.echo(
            f"--cluster {name}: one domain, {target.key}; --cluster {name}:N is of N accelerators", err=True
        )
    for text in options.overrides:
        if text.startswith(CLUSTER_FIGURES):
            figure, _, value = text.removeprefix(CLUSTER_FIGURES).partition("=")
            try:
                target = with_value(target, figure.strip(), read_figure(value))
            except ValueError as error:
                raise click.UsageError(f"--set {text}: {error}") from error
    return target


def refuse_model_fields(overrides: Sequence[str]) -> None:
    """Raise UsageError for overrides of ``model.``, ``name``, or the run's steps, batch and length: the budget's answer sets them."""
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


_TO_FILL_IN = ("data.path", "data.corpus", "data.tokenizer", "optimizer.lr", "schedule.warmup_steps")
"""Fields that decide what is learned; a plan of a known model or of a budget cannot know them."""


def write_run_file(out: Path, run: RunSpec, stated: Collection[str] | None) -> None:
    """Write ``run`` to ``out``; fields of ``_TO_FILL_IN`` that are not among ``stated`` are marked as unfilled.

    A line on standard error lists them. ``None`` for ``stated`` means all fields.
    """
    import tomli_w

    from phalanx.run.read import to_table

    unfilled = tuple(field for field in _TO_FILL_IN if stated is not None and field not in stated)
    if unfilled:
        listed = ", ".join(unfilled)
        click.echo(f"{out}: fill in {listed} before it is trained: they are defaults", err=True)
    run = replace(run, unfilled=unfilled or run.unfilled)
    out.write_text(tomli_w.dumps(to_table(run)), encoding="utf-8")
