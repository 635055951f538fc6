"""The run, cluster, network and budget question that options of ``phalanx plan`` name, and combinations that are refused.

The heavy parts (arrays, catalogs) are imported when they are needed, so that ``--help`` answers at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.command import given_options
from phalanx_plan.cli.plan_options import (
    CLUSTER_FIGURES,
    BatchOptions,
    ClusterOptions,
    LayoutOptions,
    ModelOptions,
    SearchOptions,
    ServiceOptions,
    SizeOptions,
)
from phalanx_plan.cli.what_to_train import refuse_model_fields

if TYPE_CHECKING:
    from phalanx.hardware.cluster import Cluster
    from phalanx.run.spec import RunSpec
    from phalanx_plan.scaling.answer import Question
    from phalanx_plan.search.alternatives import Placer
    from phalanx_plan.search.query import Aim


def refuse_repeated(overrides: tuple[str, ...]) -> None:
    """Raise UsageError for a field that is set twice."""
    names = [text.partition("=")[0].strip() for text in overrides]
    for name in names:
        if names.count(name) > 1:
            raise click.UsageError(f"--set {name} is given more than once: give it once")


def refuse_outputs(options: SearchOptions, trace: Path | None = None, files: tuple[Path, ...] = ()) -> None:
    """Raise UsageError, before the search, for an output file that has no folder, is written twice, or is one of ``files`` that are read."""
    written: dict[Path, str] = {}
    outputs = {"report": options.report, "trace": trace, "out": options.out}
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
        if path is not None and path.resolve() in {file.resolve() for file in files}:
            raise click.UsageError(f"--{name} would write over the run file {path}: give another name")


def requested_placer(options: LayoutOptions, spec: RunSpec) -> Placer | None:
    """Return the placer of layouts on the network of the options; ``None`` without a network.

    Reads the network's file or its scheduler. Raises UsageError if it cannot be read.
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
    """Raise UsageError for several run files, and for options of a model's name beside a run file."""
    if len(files) > 1:
        raise click.UsageError(
            f"one run file is planned at a time, not {len(files)}; phalanx plan fit takes run directories"
        )
    if files and not {"batch", "seq_len"}.isdisjoint(given_options()):
        raise click.UsageError(
            "--batch and --seq-len go with --model; of a run file, use --set train.batch_size=..."
        )


def require_service(options: ServiceOptions) -> str:
    """Return the traffic to plan for. Raises UsageError for options that do not plan a service."""
    if options.traffic is None:
        raise click.UsageError("serve needs --traffic, as in --traffic in=2000,out=500,rate=40")
    if len(options.files) > 1:
        raise click.UsageError(f"one model is planned at a time, not {len(options.files)}")
    return options.traffic


def refuse_without(option: str, fields: Iterable[str]) -> None:
    """Raise UsageError if one of ``fields`` is on the command line without ``option``."""
    written = given_options()
    for field in fields:
        if field in written:
            raise click.UsageError(f"{written[field]} goes with {option}")


def refuse_beside(option: str, allowed: Iterable[str], instead: str) -> None:
    """Raise ``UsageError`` for options that ``option`` decides itself or ignores."""
    wrong = [
        "a run file or directory" if field == "files" else name
        for field, name in given_options().items()
        if field not in {*allowed}
    ]
    if wrong:
        raise click.UsageError(f"{', '.join(wrong)} cannot be given with {option}: {instead}")


def budget_question(budget: str, options: SizeOptions) -> Question:
    """Return the question of a budget.

    Raises an error for fields that the answer decides. Options that were not given leave its defaults.
    """
    from phalanx_plan.scaling.answer import Question
    from phalanx_plan.scaling.optimum import read_budget
    from phalanx_plan.scaling.shapes import MODEL_KINDS
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
    """Return the aim of a search. Raises UsageError for a deviation that is no number."""
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
    """Context that shows a ``ValueError`` or ``OSError`` of a request in one message, with exit code 2."""
    from phalanx.cli.errors import explained  # with the rules of a run file, which the help does not need

    try:
        with explained(ValueError, OSError):
            yield
    except click.UsageError:
        raise
    except click.ClickException as error:
        raise _Mistake(error.message) from error


def requested_spec(options: ModelOptions, sizes: BatchOptions | None = None) -> RunSpec:
    """Return the run of the first file or of the known model, with its overrides. Raises UsageError unless exactly one
    is set.

    ``sizes`` are the batch of a known model. Also for a field that two options set. Raises the errors of reading a run.
    """
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
        sizes = sizes or BatchOptions()
        return run_of_model(model, sizes.seq_len, sizes.batch, tuple(overrides))
    return read_run(options.files[0], PRESETS, tuple(overrides))


def requested_cluster(options: ClusterOptions) -> Cluster:
    """Return the cluster by its name or file, with the overridden figures.

    A name without a number is explained on standard error. Raises UsageError or ``HardwareError``.
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
