"""``phalanx submit``: starts a run on a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from phalanx.cli.errors import explained
from phalanx.command import (
    Argument,
    AsJson,
    ExistingFile,
    ExistingFolder,
    FilePath,
    Heading,
    Option,
    Overrides,
    PluginName,
    Sets,
    command_options,
    set_fields,
    written_options,
)
from phalanx.command_help import Command
from phalanx.plugins import plugin_names
from phalanx.run.fields import NOT_NEGATIVE, POSITIVE

if TYPE_CHECKING:
    from phalanx.launch.engines.engine import LaunchEngine, SubmitRequest
    from phalanx.run.spec import RunSpec

_OF_SOME_ENGINES = {"out": "manifests", "lender": "nodes that several runs share"}
"""Options that not every engine uses -> their purpose."""


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    run_file: Annotated[Path, Argument()]
    engine: Annotated[
        str | None, PluginName("phalanx.engines"), Option("--on"), Sets("launch.engine"), Heading("Engine")
    ] = None
    """The engine; by default launch.engine."""
    overrides: Annotated[Overrides, Heading("Run")] = ()
    """Override a field of the run file."""
    nodes: Annotated[int | None, POSITIVE, Sets("fleet.nodes")] = None
    """Nodes that hold ranks: fleet.nodes."""
    spares: Annotated[int | None, NOT_NEGATIVE, Sets("fleet.spares")] = None
    """Spare nodes beside them: fleet.spares."""
    hosts: Annotated[ExistingFile | None, Sets("launch.hosts"), Heading("Engine")] = None
    """For ssh, a file with one host a line: launch.hosts."""
    partition: Annotated[
        str | None, Option("--partition", "--queue"), Sets("launch.partition"), Heading("Queue")
    ] = None
    """launch.partition: of Slurm, or the queue of Kueue or Volcano."""
    namespace: Annotated[str | None, Sets("launch.namespace")] = None
    """For kubernetes: launch.namespace."""
    account: Annotated[str | None, Sets("launch.account")] = None
    """launch.account."""
    qos: Annotated[str | None, Sets("launch.qos")] = None
    """launch.qos."""
    time: Annotated[str | None, Sets("launch.time_limit")] = None
    """Longest time of one job, as 2d or 12h: launch.time_limit. The run then queues itself again."""
    constraint: Annotated[str | None, Sets("launch.constraint")] = None
    """launch.constraint."""
    reservation: Annotated[str | None, Sets("launch.reservation")] = None
    """launch.reservation."""
    exclude: Annotated[str | None, Sets("launch.exclude")] = None
    """Nodes not to use: launch.exclude."""
    container_image: Annotated[
        str | None, Option("--container-image", "--image"), Sets("launch.container_image"), Heading("Engine")
    ] = None
    """launch.container_image."""
    cluster: Annotated[str | None, Sets("launch.cluster")] = None
    """The kind of the nodes, for the cost of their placement: launch.cluster."""
    lender: Annotated[ExistingFolder | None, Option("--take-from"), Heading("Queue")] = None
    """A run of yours that gives back the missing nodes, and gets as many again when this one ends."""
    dry_run: Annotated[bool, Heading("Options")] = False
    """Print exactly what would be submitted, and change nothing."""
    out: FilePath | None = None
    """For kubernetes with --dry-run: also write the manifests into this file."""
    as_json: AsJson = False


@click.command("submit", cls=Command)
@command_options(SubmitOptions)
def command(options: SubmitOptions) -> None:
    """Start the run of RUN_FILE on a cluster, on hosts by ssh, or in the background of this machine: one job,
    one agent on every node, spares included.

    All errors that would keep the job from ever starting are printed before it is queued. The run file is
    frozen with its overrides in RUN_DIR/launch. When the job's time is up, or it is preempted with grace, the
    run saves and queues itself again, and continues with the same bits. Give the same command again to
    restart an ended or failed run where it stopped.

    \b
      phalanx submit run.toml --on slurm
      phalanx submit run.toml --on slurm --nodes 16 --spares 2 --partition big --time 2d
      phalanx submit run.toml --on slurm --dry-run
      phalanx submit run.toml --on kubernetes --nodes 16 --spares 2 --queue research --image REGISTRY/phalanx:0.1
      phalanx submit run.toml --on ssh --hosts hosts.txt --nodes 4
      phalanx submit run.toml --on local --nodes 2              # in the background of this machine
      phalanx submit urgent.toml --on slurm --nodes 6 --take-from runs/big-1f3a9c04
    """
    from phalanx.launch.engines.engine import engine_named, problems_of
    from phalanx.launch.engines.order import EngineError
    from phalanx.run.fields import RunFileError

    working_dir, notify = Path.cwd(), partial(click.echo, err=True)
    with explained(EngineError):
        spec = _read(options)
        engine = engine_named(spec.launch.engine)
        _refuse_unused(engine, spec, options)
        spec, lines = engine.prepare(spec, working_dir)
        for line in lines:
            notify(line)
        if problems := problems_of(spec, engine):
            raise RunFileError(options.run_file, problems)
        for doubt in engine.doubts(spec, working_dir):
            click.secho(f"warning: {doubt}", fg="yellow", err=True)
        report = engine.submit(spec, working_dir, _request(options, notify))
    text = json.dumps(report.values) if options.as_json else report.text
    click.echo(text, nl=not text.endswith("\n"))


def _read(options: SubmitOptions) -> RunSpec:
    """Return the run with its overrides.

    Raises ``click.UsageError`` without an engine, ``RunFileError`` for an unknown one.
    """
    from phalanx.launch.engines.engine import GROUP
    from phalanx.model.facts.presets import PRESETS
    from phalanx.run.fields import RunFileError, unknown_value
    from phalanx.run.read import read_run

    spec = read_run(options.run_file, PRESETS, [*options.overrides, *set_fields(options)])
    engines = plugin_names(GROUP)
    if not spec.launch.engine:
        raise click.UsageError(
            f"which engine gives the nodes? --on {', '.join(engines)}, or launch.engine in the run file"
        )
    if spec.launch.engine not in engines:
        raise RunFileError(options.run_file, [unknown_value("launch.engine", spec.launch.engine, engines)])
    return spec


def _refuse_unused(engine: LaunchEngine, spec: RunSpec, options: SubmitOptions) -> None:
    """Raise ``click.UsageError`` for options that the run's engine would ignore."""
    for field, purpose in _OF_SOME_ENGINES.items():
        if getattr(options, field) is not None and field not in engine.options:
            (option,) = written_options(options, field)
            raise click.UsageError(f"{option} is for {purpose}; --on {engine.name} has none")
    if options.out is not None and not options.dry_run:
        raise click.UsageError(
            "--out is where --dry-run writes the manifests; without --dry-run they go to the cluster"
        )
    if options.spares and not spec.fleet.nodes and not engine.needs_nodes:
        raise click.UsageError("--spares needs a fleet: add --nodes N")


def _request(options: SubmitOptions, notify: Callable[[str], None]) -> SubmitRequest:
    from phalanx.launch.engines.engine import Lender, SubmitRequest

    lender = options.lender
    return SubmitRequest(
        dry_run=options.dry_run,
        out=options.out,
        lender=None if lender is None else Lender(lender, partial(_take_nodes, lender)),
        notify=notify,
    )


def _take_nodes(lender: Path, count: int) -> list[str]:
    """Have a run give back nodes of its choice. Return their names once they have left it. Prints them to standard error."""
    from phalanx.cli.fleet.fleet_command import request_release, wait_until_released

    names = request_release(lender, count, ())
    click.echo(f"{lender} gives back {' '.join(names)}", err=True)
    wait_until_released(lender, names)
    return names
