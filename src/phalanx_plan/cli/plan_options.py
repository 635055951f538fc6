"""Options of ``phalanx plan`` and its commands: one declaration each, which the commands inherit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import click

from phalanx.command import Argument, AsJson, FilePath, Heading, Option, Overrides
from phalanx.command_help import Command
from phalanx.run.fields import FRACTION, POSITIVE, ValueRange

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
