"""``phalanx train --nodes``: a fleet of nodes on this machine, with faults on demand."""

from __future__ import annotations

import dataclasses
import os
from contextlib import suppress
from pathlib import Path

import click
from rich.console import Console

from phalanx.cli.errors import explained
from phalanx.cli.train import session
from phalanx.data.errors import DataError
from phalanx.fleet.control.security import SecurityError
from phalanx.fleet.fault import FaultError, FleetShape, fault_marker, read_faults
from phalanx.fleet.node.launcher import LeadNode, LocalFleet
from phalanx.fleet.node.processes import run_fleet
from phalanx.hardware.catalog import cluster
from phalanx.hardware.local.detect import system_here
from phalanx.launch.planner import installed_planner
from phalanx.observe.event_log import EventLogError, read_events
from phalanx.observe.events import Event
from phalanx.observe.goodput import goodput
from phalanx.observe.ledger import NS_PER_S, recoveries
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.run.fields import Problem, RunFileError
from phalanx.run.kinds.whole_model import resolve as resolve_model
from phalanx.run.smaller_degrees import halves, problems_on
from phalanx.run.spec import RunSpec
from phalanx.train.start.open_run import OpenRun
from phalanx.train.start.prepare import prepare_run


def train_fleet(
    spec: RunSpec, run_file: Path, faults: tuple[str, ...], as_json: bool, lead: LeadNode | None = None
) -> int:
    """Train as a local fleet, or with ``lead`` as the node that leads one on a cluster. Return the exit code.

    A run that is complete is only reported. Raises ``click.ClickException`` for impossible runs or faults.
    """
    console = session.console_for(as_json)
    ranks = spec.fleet.nodes * spec.fleet.workers_per_node
    spec = dataclasses.replace(spec, parallel=dataclasses.replace(spec.parallel, ranks=ranks))
    problems, most_nodes = [*problems_on(spec, ranks)], spec.fleet.nodes + spec.fleet.spares
    if spec.fleet.min_nodes > most_nodes:  # It would wait for ever.
        problem = (
            f"{spec.fleet.min_nodes} nodes are never there: fleet.nodes and fleet.spares make {most_nodes}"
        )
        remedy = f"at most {most_nodes}, or more nodes"
        problems.append(Problem("fleet.min_nodes", problem, remedy, ("fleet.nodes", "fleet.spares")))
    with explained():
        if problems:
            raise RunFileError(run_file, problems)
    planned = _faults(spec, faults)
    spec = _with_planned_halving(spec, console)
    with explained(DataError, RunDirectoryError):
        if spec.run_dir and (result := RunDirectory(Path(spec.run_dir)).complete_result(spec)) is not None:
            return session.report_finished(spec, run_file, result, console, as_json)
        run = prepare_run(spec, run_file, session.progress_on(console))
    nodes, spares = spec.fleet.nodes, spec.fleet.spares
    console.print(
        f"run directory {run.directory.path}, a fleet of {nodes} {'node' if nodes == 1 else 'nodes'} and {spares} "
        f"{'spare' if spares == 1 else 'spares'}, {ranks} {'rank' if ranks == 1 else 'ranks'}",
        soft_wrap=True,  # A job's log puts a label before each line.
    )
    session.print_beginning(spec, run, console)
    console.print(f"watch it with phalanx status {run.directory.path}", style="dim", soft_wrap=True)
    fleet = LocalFleet(nodes, spares, planned, lead=lead)
    with explained(SecurityError):
        ending = run_fleet(run, fleet, session.event_display(run, console), session.print_on(console))
    os.close(run.lock_fd)
    return session.conclude(run, ending, console, as_json, fleet_story(run, planned))


def _with_planned_halving(spec: RunSpec, console: Console) -> RunSpec:
    """Return the run with ``fleet.halve_first`` set to the planner's answer, which is printed, if it is "planned".

    Unchanged if fewer than two degrees can be halved, or there is no plan for this machine's accelerators.
    """
    if spec.fleet.halve_first != "planned" or len(halves(spec)) < 2:
        return spec
    system = system_here()
    try:
        vocabulary = spec.model.vocab_size or spec.data.vocab_size
        resolved = dataclasses.replace(spec, model=resolve_model(spec.model, vocabulary))
        accelerators = cluster(f"{system}:{spec.parallel.ranks}") if system else None
        answer = installed_planner().first_halved(resolved, accelerators) if accelerators else None
    except ValueError as error:
        console.print(f"with too few ranks the tensor degree falls first: no plan, {error}")
        answer = None
    if answer is None:
        return spec
    seconds = ", ".join(f"{axis} {step_s:.3g} s" for axis, step_s in answer.step_s.items())
    console.print(
        f"with too few ranks the {answer.axis} degree falls first: a planned step on {answer.ranks} "
        f"{'rank' if answer.ranks == 1 else 'ranks'} with half of a degree takes, by degree, {seconds}",
        style="dim",
    )
    return dataclasses.replace(spec, fleet=dataclasses.replace(spec.fleet, halve_first=answer.axis))


def _faults(spec: RunSpec, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return the faults of the --fault arguments as text; those of ``random:SEED:COUNT`` are drawn with that seed.

    Raises ``click.BadParameter`` for impossible ones.
    """
    fleet = spec.fleet
    shape = FleetShape(
        nodes=fleet.nodes + fleet.spares,
        workers_per_node=fleet.workers_per_node,
        ranks=fleet.nodes * fleet.workers_per_node,
        steps=spec.train.steps,
        losable_nodes=max(0, fleet.nodes + fleet.spares - fleet.min_nodes),
    )
    try:
        return tuple(map(str, read_faults(arguments, shape)))
    except (FaultError, ValueError, OSError) as error:
        raise click.BadParameter(str(error), param_hint="--fault") from error


def fleet_story(run: OpenRun, faults: tuple[str, ...]) -> session.FleetStory:
    """Return the story of the fleet by the events of this start: faults that happened or not, recoveries, and
    seconds by bucket.

    Without its events, only the faults.
    """
    events: list[Event] = []
    with suppress(EventLogError):  # The file was removed: no reason to end with a traceback.
        events += (event for event in read_events(run.directory.events) if event.attempt >= run.attempt)
    account = goodput(events)
    ledger_s = {bucket: ns / NS_PER_S for bucket, ns in account.buckets_ns.items()}
    marked = {number for number in range(len(faults)) if fault_marker(run.directory.path, number).exists()}
    happened = tuple(fault for number, fault in enumerate(faults) if number in marked)
    missed = tuple(fault for number, fault in enumerate(faults) if number not in marked)
    return session.FleetStory(happened, missed, tuple(recoveries(events, run.attempt)), ledger_s)
