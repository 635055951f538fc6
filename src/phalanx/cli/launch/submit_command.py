"""``phalanx submit``: starts a run on a cluster."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import click

from phalanx.cli.errors import explained
from phalanx.command import (
    Argument,
    AsJson,
    ExistingFile,
    ExistingFolder,
    FilePath,
    Option,
    Overrides,
    Sets,
    command_options,
    set_fields,
)
from phalanx.run.fields import NOT_NEGATIVE, POSITIVE

if TYPE_CHECKING:
    from phalanx.launch.engines.order import LaunchOrder
    from phalanx.launch.engines.submission import Submitted
    from phalanx.launch.placing import Topology
    from phalanx.launch.planner import PricedNodes
    from phalanx.run.spec import LaunchSpec, RunSpec


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    run_file: Annotated[Path, Argument()]
    engine: Annotated[
        Literal["slurm", "kubernetes", "ssh", "local"] | None, Option("--on"), Sets("launch.engine")
    ] = None
    """The engine; by default launch.engine."""
    overrides: Overrides = ()
    """Override a field of the run file."""
    nodes: Annotated[int | None, POSITIVE, Sets("fleet.nodes")] = None
    """Nodes that hold ranks: fleet.nodes."""
    spares: Annotated[int | None, NOT_NEGATIVE, Sets("fleet.spares")] = None
    """Spare nodes beside them: fleet.spares."""
    hosts: Annotated[ExistingFile | None, Sets("launch.hosts")] = None
    """For ssh, a file with one host a line: launch.hosts."""
    partition: Annotated[str | None, Option("--partition", "--queue"), Sets("launch.partition")] = None
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
        str | None, Option("--container-image", "--image"), Sets("launch.container_image")
    ] = None
    """launch.container_image."""
    cluster: Annotated[str | None, Sets("launch.cluster")] = None
    """The kind of the nodes, for the price of their placement: launch.cluster."""
    lender: Annotated[ExistingFolder | None, Option("--take-from")] = None
    """A run of yours that gives back the nodes that are not free now, and gets as many again when this one ends."""
    dry_run: bool = False
    """Print exactly what would be submitted, and change nothing."""
    out: FilePath | None = None
    """For kubernetes with --dry-run: also write the manifests into this file."""
    as_json: AsJson = False


@click.command("submit")
@command_options(SubmitOptions)
def command(options: SubmitOptions) -> None:
    """Start the run of RUN_FILE on a cluster, on hosts by ssh, or in the background of this machine: one job, one agent on every node, spares included.

    What would keep the job from ever starting is said before it is queued, all of it. The run file is frozen with its overrides in
    RUN_DIR/launch. When the job's time is up, or it is preempted with grace, the run saves and queues itself again; it goes on with the same
    bits. Give the same command again to start an ended or failed run anew from where it was.

    \b
      phalanx submit run.toml --on slurm --nodes 16 --spares 2 --partition big --time 2d
      phalanx submit run.toml --on slurm --dry-run
      phalanx submit run.toml --on kubernetes --nodes 16 --spares 2 --queue research --image REGISTRY/phalanx:0.1
      phalanx submit run.toml --on ssh --hosts hosts.txt --nodes 4
      phalanx submit run.toml --on local --nodes 2              # in the background of this machine
      phalanx submit urgent.toml --on slurm --nodes 6 --take-from runs/big-1f3a9c04
    """
    from phalanx.launch.engines.order import EngineError
    from phalanx.launch.engines.submission import doubts_of

    working_dir = Path.cwd()
    with explained(EngineError):
        spec = _read(options.run_file, [*options.overrides, *set_fields(options)])
        _refuse_elsewhere(spec, options)
        spec = _checked(options.run_file, spec, working_dir)
        for doubt in doubts_of(spec, working_dir):
            click.secho(f"warning: {doubt}", fg="yellow", err=True)
        if spec.launch.engine == "slurm":
            _submit_to_slurm(spec, working_dir, options)
        elif spec.launch.engine == "kubernetes":
            from phalanx.cli.launch.on_kubernetes import submit_to_kubernetes

            submit_to_kubernetes(spec, dry_run=options.dry_run, out=options.out, as_json=options.as_json)
        else:
            from phalanx.cli.launch.on_hosts import submit_to_hosts

            submit_to_hosts(spec, working_dir, dry_run=options.dry_run, as_json=options.as_json)


def _read(run_file: Path, overrides: list[str]) -> RunSpec:
    """The run with its overrides; under Slurm, with what the variables of sbatch say of it. Raises ``click.UsageError`` if nothing names an engine."""
    from phalanx.model.facts.presets import PRESETS
    from phalanx.run.read import read_run

    spec = read_run(run_file, PRESETS, overrides)
    if not spec.launch.engine:
        raise click.UsageError(
            "which engine gives the nodes? --on slurm, kubernetes, ssh or local, or launch.engine in the run file"
        )
    return replace(spec, launch=_with_variables(spec.launch)) if spec.launch.engine == "slurm" else spec


def _refuse_elsewhere(spec: RunSpec, options: SubmitOptions) -> None:
    """Raises ``click.UsageError`` for options that the run's engine would ignore."""
    engine = spec.launch.engine
    if options.out is not None and engine != "kubernetes":
        raise click.UsageError("--out is for the manifests of Kubernetes")
    if options.spares and not spec.fleet.nodes and engine == "local":
        raise click.UsageError("--spares needs a fleet: add --nodes N")
    if options.lender is not None and engine != "slurm":
        raise click.UsageError("--take-from is for Slurm: elsewhere nobody else gives the nodes to others")


def _checked(run_file: Path, spec: RunSpec, working_dir: Path) -> RunSpec:
    """The run with its directory. Raises ``RunFileError`` with what is wrong with it before any engine is asked."""
    from phalanx.launch.engines.submission import problems_of, with_run_dir
    from phalanx.launch.kubernetes.request import with_pod_run_dir
    from phalanx.run.fields import RunFileError

    kubernetes = spec.launch.engine == "kubernetes"
    spec = with_pod_run_dir(spec) if kubernetes else with_run_dir(spec, working_dir)
    if problems := problems_of(spec, spec.launch.engine):
        raise RunFileError(run_file, problems)
    return spec


def _submit_to_slurm(spec: RunSpec, working_dir: Path, options: SubmitOptions) -> None:
    """Queues the run placed as is best on the nodes that are free now, or prints the script. Raises ``EngineError``."""
    from phalanx.launch.engines.slurm_script import batch_script
    from phalanx.launch.engines.submission import order_of

    order = order_of(spec, working_dir)
    if options.dry_run:
        script = batch_script(order if options.lender is None else _borrowing(order, options.lender))
        as_json = options.as_json
        click.echo(json.dumps({"script": script, "run_dir": spec.run_dir}) if as_json else script, nl=as_json)
        return
    _refuse_impossible(order)
    best, why_not = _placement(spec)
    if best is not None and not spec.launch.unit:
        spec = replace(spec, launch=replace(spec.launch, unit=best.unit, order=best.order))
    _submit(spec, working_dir, best, why_not, options)


def _with_variables(launch: LaunchSpec) -> LaunchSpec:
    """What is asked of Slurm, with what the variables of sbatch say of it, which is told."""
    from phalanx.launch.engines.slurm_options import from_environment

    launch, said = from_environment(launch, os.environ)
    for line in said:
        click.echo(line, err=True)
    return launch


def _refuse_impossible(order: LaunchOrder) -> None:
    """Raises ``EngineError`` if the run is finished, queued or running already, or could never start."""
    from phalanx.launch.engines import slurm
    from phalanx.launch.engines.order import EngineError
    from phalanx.launch.engines.submission import refuse_finished

    refuse_finished(order)
    _refuse_second(order)
    impossible = slurm.preflight(order)
    if impossible:
        raise EngineError("this job would never start:\n  " + "\n  ".join(impossible))


def _refuse_second(order: LaunchOrder) -> None:
    """Raises ``EngineError`` if the run is queued or running already, by whichever engine."""
    from phalanx.launch.engines import slurm, standing
    from phalanx.launch.engines.submission import read_record

    made = read_record(order.run_dir)
    if made is not None and made.engine != "slurm":
        standing.refuse_second(order.run_dir, made)
    slurm.refuse_second(order.run_dir, made.job if made is not None and made.engine == "slurm" else "")


def _borrowing(order: LaunchOrder, lender: Path) -> LaunchOrder:
    """The order, with as many nodes to be taken from ``lender`` as are missing now. Raises ``EngineError`` if it has none of Slurm's to give."""
    from phalanx.launch.engines import slurm
    from phalanx.launch.engines.order import EngineError
    from phalanx.launch.engines.submission import read_record

    made = read_record(lender)
    if made is None or made.engine != "slurm":
        raise EngineError(
            f"--take-from {lender}: no nodes of Slurm's to give back: name the run directory of one that phalanx submit --on slurm has started"
        )
    missing = order.all_nodes - slurm.idle_nodes(order)
    return replace(order, taken_from=lender.resolve(), taken=missing) if missing > 0 else order


def _borrowed(order: LaunchOrder, lender: Path) -> LaunchOrder:
    """The order, once ``lender`` has given back as many nodes as are missing. Raises ``EngineError``."""
    from phalanx.cli.fleet.fleet_command import asked_to_go, wait_until_gone
    from phalanx.launch.engines.slurm_script import RETURNED

    order = _borrowing(order, lender)
    if not order.taken:
        return order
    names = asked_to_go(lender, order.taken, ())
    click.echo(f"{lender} gives back {' '.join(names)}", err=True)
    wait_until_gone(lender, names)
    with suppress(FileNotFoundError):  # of an earlier loan to this run
        (order.folder / RETURNED).rmdir()
    return replace(order, taken=len(names))


def _still_lent(order: LaunchOrder) -> str:
    """What to do about nodes that were given back for a job which Slurm did not take then; empty if none were. Nobody else does it."""
    from phalanx.launch.engines.slurm_script import RETURNED

    if order.taken_from is None:
        return ""
    # Or phalanx cancel would give them back by the record of an earlier loan; it is there already, or its disk is full.
    with suppress(OSError):
        (order.folder / RETURNED).mkdir()
    return (
        f"; {order.taken_from} has given back {order.taken} nodes for it: phalanx fleet grow {quote(str(order.taken_from))} --by {order.taken} takes them "
        "again"
    )


def _submit(
    spec: RunSpec, working_dir: Path, best: PricedNodes | None, why_not: str, options: SubmitOptions
) -> None:
    from phalanx.launch.engines import slurm
    from phalanx.launch.engines.order import EngineError, private_variables
    from phalanx.launch.engines.slurm_script import batch_script
    from phalanx.launch.engines.submission import (
        forget_stopped,
        how_to_follow,
        only_submission,
        order_of,
        recorded,
        refuse_stopped,
        write_files,
    )

    order, lender = order_of(spec, working_dir), options.lender
    private = private_variables(order.launch, working_dir)
    script = batch_script(order)  # what no job can have is refused before anything is written, or borrowed
    with only_submission(order):
        _refuse_second(order)
        forget_stopped(order)
        path = write_files(order, spec, script)
        expected = slurm.test_submit(path)
        if lender is not None:
            order = _borrowed(order, lender)
        try:
            if lender is not None:
                write_files(order, spec, batch_script(order))
            # Or of a job whose submitter did not live to note it the record would be that of an earlier start, perhaps elsewhere.
            with recorded(order, "slurm", ""):
                refuse_stopped(order)
                made = _noted(order, slurm.submit(path, private))
        except EngineError as error:
            raise EngineError(f"{error}{_still_lent(order)}") from error
    if options.as_json:
        price = None if best is None else {"slowest_s": best.slowest_s, "certified": best.certified}
        click.echo(json.dumps({**asdict(made), "run_dir": str(order.run_dir), "placement": price}))
        return
    spares = f" and {order.spares} spares" if order.spares else ""
    click.echo(
        f"job {made.job}: {order.nodes} nodes{spares}, {order.nodes * spec.fleet.workers_per_node} ranks; run directory {order.run_dir}"
    )
    if expected:
        click.echo(f"  expected to start {expected}")
    click.echo(f"  placement: {_placement_line(best, why_not)}")
    click.echo(how_to_follow(order.run_dir))


def _noted(order: LaunchOrder, job: str) -> Submitted:
    """The record of a job that is queued. Raises ``EngineError`` if it cannot be written, and takes the job back, which could not write a line either."""
    from phalanx.launch.engines import slurm
    from phalanx.launch.engines.order import EngineError
    from phalanx.launch.engines.submission import record

    try:
        return record(order, "slurm", job)
    except EngineError as error:
        try:
            slurm.cancel(job)
        except EngineError as also:
            raise EngineError(
                f"job {job} can neither be noted ({error}) nor taken back ({also}): end it with scancel {job}"
            ) from error
        raise EngineError(f"job {job} is taken back: {error}") from error


def _placement(spec: RunSpec) -> tuple[PricedNodes | None, str]:
    """The best placement on the nodes that are free now; or why there is none."""
    from phalanx.hardware.cluster import HardwareError
    from phalanx.launch.placing import TopologyError
    from phalanx.launch.planner import PlannerError, installed_planner
    from phalanx.launch.topology_files import load_topology

    def free_nodes() -> Topology:
        return load_topology("slurm", spec.launch.partition, free_only=True)

    try:
        return installed_planner().best_placement(spec, free_nodes), ""
    except (TopologyError, PlannerError, HardwareError) as error:
        return None, str(error)


def _placement_line(best: PricedNodes | None, why_not: str) -> str:
    return f"not priced: {why_not}" if best is None else f"on what is free now, {best.sentence}"
