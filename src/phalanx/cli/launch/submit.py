"""``phalanx submit`` and ``phalanx cancel``: start a run on a cluster, find its fleet or its job, and end it, saved if it trains."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import click

from phalanx.cli.errors import demand_folder, explained, full_disk, refuse_unused
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
from phalanx.launch.engines.engine import (
    GROUP,
    LaunchEngine,
    Lender,
    SubmitRequest,
    SubmittedRun,
    engine_named,
    log_of,
    prevent_restart,
    problems_of,
    submission_of,
    wait_until_ended,
)
from phalanx.launch.engines.order import FOLDER, EngineError
from phalanx.launch.engines.submission import Submitted, read_record, submitter_of, wait_for_submitter
from phalanx.model.facts.presets import PRESETS
from phalanx.plugins import plugin_names
from phalanx.run.fields import NOT_NEGATIVE, POSITIVE, RunFileError, unknown_value
from phalanx.run.read import read_run
from phalanx.run.spec import RunSpec

if TYPE_CHECKING:
    from phalanx.fleet.control.fleet_file import FleetFile
    from phalanx.launch.kubernetes.cluster import ClusterJob

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
def submit_command(options: SubmitOptions) -> None:
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
        lender = (
            None if options.lender is None else Lender(options.lender, partial(_take_nodes, options.lender))
        )
        request = SubmitRequest(dry_run=options.dry_run, out=options.out, lender=lender, notify=notify)
        report = engine.submit(spec, working_dir, request)
    text = json.dumps(report.values) if options.as_json else report.text
    click.echo(text, nl=not text.endswith("\n"))


def _read(options: SubmitOptions) -> RunSpec:
    """Return the run of the run file with its overrides and options.

    Raises ``click.UsageError`` without an engine, and ``RunFileError`` for an unknown one or a mistake in the file.
    """
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
    """Raise ``click.UsageError`` for options that the run's engine would ignore: of other engines, --out without
    --dry-run, and --spares without a fleet.
    """
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


def _take_nodes(lender: Path, count: int) -> list[str]:
    """Have the run ``lender`` give back ``count`` nodes of its choice, and wait until they have left it. Return
    their names.

    Prints them to standard error. Raises as ``request_release`` and ``wait_until_released`` do.
    """
    from phalanx.cli.fleet.fleet_command import request_release, wait_until_released

    names = request_release(lender, count, ())
    click.echo(f"{lender} gives back {' '.join(names)}", err=True)
    wait_until_released(lender, names)
    return names


_POLL_S = 1.0


@click.command("cancel", cls=Command)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--now", is_flag=True, help="End it at once: what is not saved is lost.")
@click.option("--no-wait", is_flag=True, help="Do not wait until it has ended.")
@click.option(
    "--on",
    "engine",
    type=click.Choice(["kubernetes"]),
    help="RUN_DIR is the name of a job there, as phalanx submit has printed it.",
)
@click.option("--namespace", default="", help="With --on kubernetes: not that of kubectl's context.")
def cancel_command(run_dir: Path, now: bool, no_wait: bool, engine: str | None, namespace: str) -> None:
    """Cancel the job of the run in RUN_DIR: one that trains saves first; it is not queued again.

    The run can be submitted again later to continue. A submission that is in progress does not start the run.

    \b
      phalanx cancel runs/big-1f3a9c04
      phalanx cancel runs/big-1f3a9c04 --now
      phalanx cancel big-1f3a9c04 --on kubernetes
    """
    if engine is not None:
        with explained(EngineError):
            cancel_job(str(run_dir), namespace, now=now, wait=not no_wait)
        return
    refuse_unused(["--namespace"] * bool(namespace), "is for --on kubernetes")
    demand_folder(run_dir)
    with explained(EngineError):
        submitter = submitter_of(run_dir)
        if not submitter and submission_of(run_dir) is None:
            raise EngineError(
                f"{run_dir} holds no run that phalanx submit has started; `phalanx runs --on slurm` lists them"
            )
        unnoted = prevent_restart(run_dir, at_once=now)
        # Recorded first: a submission that misses the record has already published what it starts.
        submitter = wait_for_submitter(run_dir, partial(click.echo, err=True)) or submitter
        run = None if submitter and read_record(run_dir) is None else submission_of(run_dir)
        if run is None:
            click.echo(f"{submitter} has started nothing: the run is cancelled")
            return
        # Recorded again if a submission has begun or a job has started since: both clear earlier records.
        if (unnoted or submitter) and (unnoted := prevent_restart(run_dir, at_once=now)):
            click.echo(unnoted, err=True)
        run.cancel_joining(waiting_only=True)  # They would get nodes for a run that ends.
        job = run.standing()
        if job is None:
            click.echo(
                f"nothing that {submitter} started is running: the run is cancelled"
                if submitter
                else f"{run.title} has ended already"
            )
            run.cancel_joining()
            _give_back(run_dir, run.made)
            return
        if now or job.is_waiting:
            run.end_now()
        else:
            _request_stop(run)
            click.echo(f"{run.title} saves and ends (phalanx cancel --now ends it at once)")
            if full := full_disk(run_dir):
                click.echo(full, err=True)
        if not no_wait:
            wait_until_ended(run, _POLL_S)
            run.cancel_joining()
        if not no_wait or job.is_waiting:
            _give_back(run_dir, run.made)
    click.echo(f"{run.title} is cancelled" if not no_wait else f"{run.title} gets a request to end")


def _give_back(run_dir: Path, made: Submitted) -> None:
    """Have the run that lent nodes to this one get as many again, unless it lent none or the job's script has done
    so.

    Prints the outcome. A failure is not raised and not tried again: the printed command repeats the request.
    """
    from phalanx.cli.fleet.fleet_command import request_nodes
    from phalanx.launch.engines.slurm_script import RETURNED

    if not made.taken_from:
        return
    lender = Path(made.taken_from)
    try:
        (run_dir / FOLDER / RETURNED).mkdir()
        job = request_nodes(lender, made.taken)
    except FileExistsError:
        return
    except (EngineError, click.ClickException, OSError) as error:  # The folder's disk may be full.
        message = error.message if isinstance(error, click.ClickException) else str(error)
        again = f"phalanx fleet grow {quote(str(lender))} --by {made.taken} repeats the request"
        click.echo(f"{lender} does not take its {made.taken} nodes again: {message}; {again}", err=True)
        return
    click.echo(f"{lender} takes {made.taken} nodes again: job {job}")


def _request_stop(run: SubmittedRun) -> None:
    """Have a run save and end: by its engine, or else by the coordinator of its fleet. Does nothing if it is
    stopping already.

    Raises as both do.
    """
    from phalanx.cli.fleet.fleet_command import send_request
    from phalanx.fleet.core.messages import StopRun

    fleet = formed_fleet(run)
    fleet = None if fleet is None or fleet.over else fleet
    if fleet is not None and fleet.stopping:
        return
    if not run.request_stop(None if fleet is None else fleet.reign) and fleet is not None:
        send_request(run.run_dir, StopRun(never_at_once=True), None)


def formed_fleet(run: SubmittedRun) -> FleetFile | None:
    """Return the fleet of a run's last start; ``None`` if that start has formed no fleet yet, or the file is
    unreadable.
    """
    from phalanx.fleet.control.fleet_file import FleetFileError, path_in, read_fleet_file

    # A start writes this file first, and the fleet never changes it: an older fleet file is of an earlier
    # start.
    mark = run.run_dir / FOLDER / run.start_mark
    try:
        fleet = read_fleet_file(run.run_dir)
        return fleet if path_in(run.run_dir).stat().st_mtime > mark.stat().st_mtime else None
    except (FleetFileError, OSError):
        return None


def leading_log(run: SubmittedRun) -> Path:
    """Return the log of a job, or of the leading host: on hosts without a scheduler another may have succeeded the first."""
    first, fleet = log_of(run), formed_fleet(run) if run.has_hosts else None
    log = first if fleet is None else first.with_name(f"{fleet.leader}.log")
    return log if log.exists() else first


def print_status(name: str, namespace: str, last: int, *, as_json: bool) -> None:
    """Print the state of a Kubernetes job; if it runs, also that of its fleet, as the leading pod reports it.

    With ``as_json``, only the fleet's if it runs. ``last`` is the number of incidents. Raises ``EngineError``.
    """
    from phalanx.launch.kubernetes import cluster

    job = _job_named(name, namespace)
    if not as_json:
        click.echo(f"job {job.name} (kubernetes): {job.sentence}")
    elif job.state != "running":
        click.echo(json.dumps(asdict(job)))
        return
    if job.state == "running":
        words = ["--json"] if as_json else ["--last", str(last)]
        click.echo(cluster.ask_in_pod(job, "status", job.run_dir, *words), nl=False)


def cancel_job(name: str, namespace: str, *, now: bool, wait: bool) -> None:
    """Delete a Kubernetes job, and print so; one that trains saves first, unless ``now``.

    ``wait`` until its pods are gone; with ``now`` nothing is awaited. Raises ``EngineError``, also if there is
    no such job.
    """
    from phalanx.launch.kubernetes import cluster

    job = _job_named(name, namespace)
    if not now and not job.ended:
        click.echo(f"job {job.name} saves and ends (phalanx cancel --now ends it at once)")
    cluster.end(job, at_once=now, wait=wait)
    done = "is cancelled; the same phalanx submit resumes from its newest checkpoint, if it has one"
    click.echo(f"job {job.name} {done if wait and not now else 'gets a request to end'}")


def print_log(name: str, namespace: str, *, index: int, follow: bool, last: int) -> int:
    """Print the output of a run's pod. Return kubectl's exit code. Raises ``EngineError`` if there is no such job
    or pod.
    """
    from phalanx.launch.kubernetes import cluster

    return cluster.print_logs(_job_named(name, namespace), index=index, follow=follow, last=last)


def _job_named(name: str, namespace: str) -> ClusterJob:
    """Return the job of a name. Raises ``EngineError`` if there is none, or the cluster does not answer."""
    from phalanx.launch.kubernetes import cluster

    job = cluster.job_named(name, namespace)
    if job is None:
        raise EngineError(
            f"there is no job {name} in this namespace: phalanx runs --on kubernetes lists them, --namespace names another; a finished job may have been "
            "removed, with its run directory left where it is"
        )
    return job
