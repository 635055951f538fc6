"""What the options of ``phalanx plan`` ask for: the run, the cluster, the network, the question of a budget; and which go together.

The heavy parts (arrays, catalogs) are imported when they are needed, so that ``--help`` answers at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.errors import explained
from phalanx.cli.plan.what_to_train import refuse_beside, refuse_model_fields

if TYPE_CHECKING:
    from phalanx.hardware.cluster import Cluster
    from phalanx.plan.scaling.answer import Question
    from phalanx.plan.search.alternatives import Placer
    from phalanx.plan.search.query import Aim
    from phalanx.run.spec import RunSpec


class GivenOnce(click.Command):
    """A command that refuses an option which is given twice, rather than to take the last, unless it may be repeated."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        given = [one for one in order if isinstance(one, click.Option) and not (one.multiple or one.is_flag)]
        for option in given:
            # A shell that completes what was typed parses resiliently.
            if given.count(option) > 1 and not ctx.resilient_parsing:
                raise click.UsageError(f"{option.opts[0]} is given more than once: give it once", ctx)
        return super().parse_args(ctx, args)


def refuse_repeated(overrides: tuple[str, ...]) -> None:
    """Raises UsageError for a field that is set twice."""
    names = [text.partition("=")[0].strip() for text in overrides]
    for name in names:
        if names.count(name) > 1:
            raise click.UsageError(f"--set {name} is given more than once: give it once")


def refuse_nowhere(**paths: Path | None) -> None:
    """Raises UsageError for a file to write that has no folder, or is written twice, before anything is searched."""
    written: dict[Path, str] = {}
    for name, path in paths.items():
        if path is not None and (first := written.setdefault(path.resolve(), name)) != name:
            raise click.UsageError(f"--{first} and --{name} both write {path}: give each a file of its own")
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            what = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise click.UsageError(
                f"--{name} {path}: {what}: give the path of a file in a folder that exists"
            )


def refuse_over(read: tuple[Path, ...], **paths: Path | None) -> None:
    """Raises UsageError for a file to write that is one of those which are ``read``."""
    for name, path in paths.items():
        if path is not None and path.resolve() in {one.resolve() for one in read}:
            raise click.UsageError(f"--{name} would write over the run file {path}: give another name")


def placer_asked(network: str | None, shares: tuple[str, ...], spec: RunSpec) -> Placer | None:
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


def one_run_file(files: tuple[Path, ...]) -> Path | None:
    """The run file to plan, if one is given. Raises UsageError for several, and for options that are about a model's name."""
    if len(files) > 1:
        raise click.UsageError(
            f"one run file is planned at a time, not {len(files)}; --fit takes run directories"
        )
    if files and (is_given("batch") or is_given("seq_len")):
        raise click.UsageError(
            "--batch and --seq-len go with --model; of a run file, use --set train.batch_size=..."
        )
    return files[0] if files else None


def require_service(files: tuple[Path, ...], traffic: str | None) -> str:
    """The traffic to plan for. Raises UsageError for options that do not plan a service."""
    refuse_beside(
        "--serve", given_options(), _WITH_SERVE, "it plans workers, not the layout of a training run"
    )
    if traffic is None:
        raise click.UsageError("--serve needs --traffic, as in --traffic in=2000,out=500,rate=40")
    if len(files) > 1:
        raise click.UsageError(f"one model is planned at a time, not {len(files)}")
    return traffic


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


def refuse_without(option: str, parameters: Iterable[str]) -> None:
    """Raises UsageError for one of ``parameters`` on the command line where ``option``, which it goes with, is not."""
    written = {one.name: one.opts[0] for one in click.get_current_context().command.params}
    for name in filter(is_given, parameters):
        raise click.UsageError(f"{written[name]} goes with {option}")


def given_options() -> list[str]:
    """The parameters that stand on the command line."""
    return [name for name in click.get_current_context().params if is_given(name)]


def question_asked(
    budget: str,
    aim: Aim,
    kind: str | None,
    unique_tokens: str | None,
    inference_tokens: str | None,
    overrides: tuple[str, ...],
) -> Question:
    """The question that a budget asks, about no cluster yet. Raises an error for options and fields that are the answer's."""
    from phalanx.plan.scaling.answer import Question
    from phalanx.plan.scaling.optimum import read_budget
    from phalanx.plan.scaling.shapes import MODEL_KINDS
    from phalanx.plan.search.query import read_tokens, refuse_unused

    refuse_beside(
        "--budget", given_options(), _WITH_BUDGET, "the model, its tokens and its layout are the answer"
    )
    fields = without_cluster(overrides)
    refuse_unused(fields, searching=True, tokens=None)
    refuse_model_fields(fields)
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
def mistakes() -> Iterator[None]:
    """Shows what is wrong with a request in one message, exit code 2."""
    try:
        with explained(ValueError, OSError):
            yield
    except click.UsageError:
        raise
    except click.ClickException as error:
        raise _Mistake(error.message) from error


def is_given(option: str) -> bool:
    """True if the option stands on the command line."""
    source = click.get_current_context().get_parameter_source(option)
    return source is click.core.ParameterSource.COMMANDLINE


def spec_asked(
    run_file: Path | None, model: str | None, batch: int, seq_len: int, overrides: list[str]
) -> RunSpec:
    """The run of the file or of the known model, with what overrides it. Raises UsageError unless it is one of the two."""
    if (run_file is None) == (model is None):
        raise click.UsageError("give a run file, or --model NAME (phalanx models lists them)")
    from phalanx.model.facts.presets import PRESETS
    from phalanx.plan.search.query import run_of_model
    from phalanx.run.read import read_run

    if model is not None:
        for field, option in (("train.batch_size", "batch"), ("train.seq_len", "seq_len")):
            if is_given(option) and any(text.startswith(f"{field}=") for text in overrides):
                raise click.UsageError(
                    f"--set {field} and --{option.replace('_', '-')} say the same: give one"
                )
        return run_of_model(model, seq_len, batch, tuple(overrides))
    assert run_file is not None, "one of the two is given"
    return read_run(run_file, PRESETS, tuple(overrides))


_CLUSTER_FIGURES = "cluster."


def without_cluster(overrides: Iterable[str]) -> list[str]:
    """The overrides of the run file's fields: without figures of the cluster."""
    return [text for text in overrides if not text.startswith(_CLUSTER_FIGURES)]


def cluster_asked(name: str, overrides: Iterable[str]) -> Cluster:
    """The cluster by its name or file, with the figures that overrides give it."""
    from phalanx.hardware.catalog import cluster
    from phalanx.hardware.overrides import read_figure, with_value

    found = cluster(name)
    if re.fullmatch(r"[\w-]+", name) and name != "this":
        click.echo(
            f"--cluster {name}: one domain, {found.key}; --cluster {name}:N is of N accelerators", err=True
        )
    for text in overrides:
        if text.startswith(_CLUSTER_FIGURES):
            figure, _, value = text.removeprefix(_CLUSTER_FIGURES).partition("=")
            try:
                found = with_value(found, figure.strip(), read_figure(value))
            except ValueError as error:
                raise click.UsageError(f"--set {text}: {error}") from error
    return found


@dataclass(frozen=True)
class Subject:
    """The arguments of the command line that say which model is planned, and for which cluster."""

    files: tuple[Path, ...]
    model: str | None
    batch: int
    seq_len: int
    cluster_name: str
    overrides: tuple[str, ...]

    @property
    def fields(self) -> list[str]:
        """The overrides of fields of the run file, without those of the cluster."""
        return without_cluster(self.overrides)

    def spec(self) -> RunSpec:
        """The run of the first file, or of the known model."""
        first = self.files[0] if self.files else None
        return spec_asked(first, self.model, self.batch, self.seq_len, self.fields)

    def cluster(self) -> Cluster:
        """The cluster with its overridden figures."""
        return cluster_asked(self.cluster_name, self.overrides)

    def stated(self) -> set[str] | None:
        """The fields that are stated of a known model; ``None`` of a run file, which states them all."""
        return None if self.model is None else {text.partition("=")[0].strip() for text in self.fields}

    def complete(self, question: Question) -> Question:
        """The question of a budget, about the cluster that was given, if one was, and sequences of this length."""
        place = self.cluster() if is_given("cluster_name") else question.cluster
        batch = self.batch if is_given("batch") else None
        return replace(question, cluster=place, seq_len=self.seq_len, batch=batch)
