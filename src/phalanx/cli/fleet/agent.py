"""``phalanx agent`` and ``phalanx pod``: start the agent of one node of a cluster; the manifest of a Kubernetes job calls ``pod``."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import click

from phalanx.cli.errors import HostAndPort, HostName, explained
from phalanx.cli.launch.joining_hosts import join_refusal
from phalanx.command import Argument, AsJson, ExistingFolder, Heading, Option, Overrides, command_options
from phalanx.command_help import Command
from phalanx.fleet.control.coordinator_link import answers
from phalanx.fleet.control.credentials import credentials_of
from phalanx.fleet.control.fleet_file import FleetFileError, read_fleet_file
from phalanx.fleet.control.security import SecurityError
from phalanx.fleet.control.succession.reign import successor_in
from phalanx.hardware.local.network import dial, family_of, join_address, split_address
from phalanx.launch.engines.order import EngineError, in_slurm_step, slurm_domains
from phalanx.launch.kubernetes.engine import (
    begin_submission,
    exit_code,
    is_over,
    made_directory,
    node_domains,
    show_life,
)
from phalanx.launch.kubernetes.request import TASK
from phalanx.model.facts.presets import PRESETS
from phalanx.observe.logs.capture import also_log
from phalanx.observe.logs.log_file import order_for
from phalanx.process.this_process import host_name
from phalanx.run.directory.paths import DamagedRecordError, RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.fields import NOT_NEGATIVE
from phalanx.run.read import read_run
from phalanx.run.spec import RunSpec

_LOOK_AGAIN_S, _SAY_AGAIN_S = 0.5, 30.0


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    run: Annotated[Path, Heading("Run")]
    """The run file, the same on every node, with run_dir on storage that all nodes share; or a run directory."""
    coordinator: Annotated[str, HostAndPort(), Heading("Coordinator")] = ""
    """Address of the coordinator: HOST is the node that leads. By default, for a run directory, that in its
    fleet.json."""
    overrides: Annotated[Overrides, Heading("Run")] = ()
    """Override a field; the same on every node."""
    lead: Annotated[bool | None, Option("--lead/--no-lead"), Heading("Coordinator")] = None
    """Start the coordinator on this node, or not; by default on the first node of a Slurm step, else if HOST is its own."""
    node: Annotated[str | None, Heading("Node")] = None
    """This node's name in the fleet; by default its Slurm name or host name."""
    host: Annotated[str | None, HostName(for_others=True)] = None
    """Address at which the other nodes reach this machine; detected by default."""
    domain: tuple[str, ...] = ()
    """Domains of the network from the widest to the narrowest; may be repeated. Under Slurm those of SLURM_TOPOLOGY_ADDR."""
    spare: bool = False
    """Take ranks at first only in place of missing nodes."""
    certificates: Annotated[ExistingFolder | None, Heading("Coordinator")] = None
    """Folder with ca.pem, node.pem and node.key: all connections then use mutual TLS."""
    as_json: AsJson = False
    """Print one JSON object at the end."""


@click.command("agent", cls=Command)
@command_options(AgentOptions)
def agent_command(options: AgentOptions) -> None:
    """Train with this node as part of a fleet: once on every node, in torchrun's place.

    The node that is HOST leads: it prepares the data and the run directory, coordinates, and shows the run's
    progress. The others wait for it. If its machine is lost, another node leads (fleet.succession_s), and the
    same command on HOST joins as a member. After a crash, run the same command again to continue.

    The token that all nodes need is in the run directory, or in PHALANX_RUN_TOKEN. At Ctrl-C or SIGTERM the
    node leaves at the next step boundary, and nothing is computed twice; a second one ends the agent at once.
    Without a coordinator for fleet.coordinator_lease_s the agent ends with exit code 1.

    \b
      phalanx agent --run runs/big                          # into a fleet that runs, by its fleet.json
      srun --ntasks-per-node 1 phalanx agent --run run.toml --coordinator head:29400
      phalanx agent --run run.toml --coordinator head:29400 --domain hall-2 --domain rack-17 --spare
    """
    from phalanx.fleet.node.agent import leave

    name = options.node or os.environ.get("SLURMD_NODENAME") or host_name()
    if not re.fullmatch(r"[^*\s/][^\s/]{0,127}", name):
        rule = "no spaces or slashes, no star first, at most 128 characters"
        raise click.BadParameter(f"{name!r} is no name of a node: {rule}", param_hint="--node")

    options = replace(options, domain=options.domain or slurm_domains(os.environ))
    code, led = take_part(name, options)
    if led:
        raise SystemExit(code)
    if options.as_json and not code:
        click.echo(json.dumps({"node": name, "ended": True}))
    leave(code)


def take_part(node: str, options: AgentOptions) -> tuple[int, bool]:
    """Take part in a run to its end, or to that of this node's part. Return the exit code, and whether this node
    led.

    With a run file, lead or wait for the coordinator and join; if another node leads by now, join that. With a
    run directory, join its fleet from outside; except in a Slurm step, refuse that if the node's place would
    slow the fleet beyond the limit. Raises ``click.ClickException``.
    """
    run = options.run
    folder = run.parent if run.name == "run.toml" and (run.parent / "record.json").exists() else run
    # The batch script of a job names the run file. An agent with the run directory joins a fleet from outside
    # its job.
    joins = folder.is_dir()
    if not joins:
        spec = _read(run, options.overrides, options.coordinator)
        folder = Path(spec.run_dir)
        succeeded = _is_succeeded(folder, options.certificates)
        if _leads(options.lead, options.coordinator) and not succeeded:
            from phalanx.cli.train.train_fleet import train_fleet
            from phalanx.fleet.node.launcher import LeadNode

            here, port = split_address(options.coordinator)
            lead = LeadNode(
                node, options.host or here, int(port), options.domain, options.spare, options.certificates
            )
            return train_fleet(spec, run, (), options.as_json, lead), True
        if not succeeded:
            with explained(TimeoutError):
                patience_s = spec.fleet.coordinator_lease_s
                _wait_for(
                    options.coordinator,
                    folder,
                    patience_s,
                    lambda: _is_succeeded(folder, options.certificates),
                )
    if joins and not in_slurm_step(os.environ):
        with explained(RunDirectoryError):
            # It would slow the fleet's step down more than allowed.
            reason = join_refusal(folder, node, options.domain)
        if reason:
            raise click.ClickException(f"node {node} does not join: {reason}")
    from phalanx.fleet.node.agent import AgentError, run_agent
    from phalanx.fleet.node.launcher import AgentArgs, own_host

    with explained(RunDirectoryError, SecurityError):
        args = AgentArgs(
            run_dir=folder,
            node=node,
            attempt=RunDirectory(folder).newest_attempt(),
            coordinator=options.coordinator,
            host=options.host or own_host(options.coordinator or _coordinator_of(folder) or "127.0.0.1:0"),
            domain=options.domain,
            started_as_spare=options.spare,
            at_signal="leave" if joins or not in_slurm_step(os.environ) else "wait",
            may_lead=True,
            certificates=options.certificates,
        )
        log = RunDirectory(folder).named_log(args.attempt, args.node)
        also_log(
            order_for(log, args.node, args.attempt, read_resolved(RunDirectory(folder)).observe, args.node)
        )
        try:
            run_agent(args)
        except AgentError as error:
            click.echo(f"error: {error}", err=True)
            return 1, False
    return 0, False


def _read(run: Path, overrides: tuple[str, ...], coordinator: str) -> RunSpec:
    """Read a run file, and check that it can run on a cluster. Raises ``click.UsageError`` without ``run_dir``,
    nodes or coordinator, and ``click.ClickException`` for mistakes in the file.
    """
    with explained():
        spec = read_run(run, PRESETS, list(overrides))
    if not spec.run_dir:
        raise click.UsageError(
            f"{run} has no run_dir, and all nodes must find the same one: add it, or --set 'run_dir=\"/shared/runs/big\"'"
        )
    if not spec.fleet.nodes:
        raise click.UsageError(f"{run} does not set the number of nodes that hold ranks: --set fleet.nodes=N")
    if not coordinator:
        raise click.UsageError(
            "where do the nodes find each other? --coordinator HOST:PORT, HOST one of them"
        )
    return spec


def _leads(lead: bool | None, coordinator: str) -> bool:
    """Return True if this node runs the coordinator: by the option ``lead``, or in a Slurm step if it is the first
    task.

    Elsewhere, if the coordinator's host is an address of this machine.
    """
    if lead is not None:
        return lead

    if in_slurm_step(os.environ):
        # Nodes of a test cluster share a host; the batch script runs on the first node and passes its name.
        return os.environ.get("SLURM_NODEID") == "0" and os.environ.get("SLURM_LOCALID") == "0"
    try:
        host = split_address(coordinator)[0]
        with socket.socket(family_of(host)) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def _is_succeeded(folder: Path, certificates: Path | None) -> bool:
    """Return True if another node leads this run by now, because its coordinator was lost, and answers; that is
    printed.

    False also if that cannot be determined.
    """
    import asyncio

    directory = RunDirectory(folder)
    claim = successor_in(directory)
    if claim is None:
        return False
    try:
        fleet, attempt = read_fleet_file(folder), directory.newest_attempt()
        credentials = credentials_of(folder, read_resolved(directory), attempt, certificates, ("operate",))
    except (FleetFileError, RunDirectoryError, SecurityError):
        return False
    if not asyncio.run(answers(fleet.coordinator, credentials)):
        return False
    click.echo(
        f"{claim.node} leads this run now, in reign {claim.reign}, and this node joins it as a member; to start the run again, end it first: "
        f"phalanx fleet stop {folder}",
        err=True,
    )
    return True


def _coordinator_of(folder: Path) -> str:
    """Return the address of the coordinator by fleet.json; empty if that cannot be read."""
    with suppress(FleetFileError):
        return read_fleet_file(folder).coordinator
    return ""


def _wait_for(coordinator: str, folder: Path, patience_s: float, is_succeeded: Callable[[], bool]) -> None:
    """Block until the coordinator listens and the run directory is ready, or ``is_succeeded()``; print every 30 s
    what is missing.

    A different program on that port does not count. Raises TimeoutError after ``patience_s``.
    """
    host, port = split_address(coordinator)
    printed_s, began_s = -_SAY_AGAIN_S, time.monotonic()
    looked_s = began_s
    while True:
        try:
            dial(host, int(port), 5.0).close()
            if _has_begun(folder):
                return
            raise ConnectionError(
                f"another program listens there, and nobody has started the run in {folder} yet"
            )
        except OSError as error:
            if time.monotonic() - began_s > patience_s:
                raise TimeoutError(
                    f"no coordinator at {coordinator} for {patience_s:.0f} s (fleet.coordinator_lease_s): {error}. Start the node that "
                    "leads, then this one again"
                ) from error
            if time.monotonic() - printed_s >= _SAY_AGAIN_S:
                printed_s = time.monotonic()
                click.echo(f"waiting for the coordinator at {coordinator} ({error})", err=True)
            if time.monotonic() - looked_s >= _SAY_AGAIN_S / 6:
                looked_s = time.monotonic()
                if is_succeeded():
                    return
            time.sleep(_LOOK_AGAIN_S)


def _has_begun(folder: Path) -> bool:
    """Return True if a start of the run is recorded in its directory, also by a damaged record."""
    try:
        return RunDirectory(folder).newest_attempt() >= 0
    except DamagedRecordError:
        return True  # Its next reader reports the error.
    except RunDirectoryError:
        return False


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    run_file: Annotated[Path, Argument()]
    index: Annotated[int, NOT_NEGATIVE]
    """The pod's index in its job, which a replacement keeps: its node is node-INDEX, and 0 leads."""
    coordinator: Annotated[str, HostAndPort()]
    """The stable DNS name of the pod that leads."""
    host: Annotated[str, HostName(for_others=True)]
    """This pod's own address."""
    submission: str
    """Name of this start of the run, different from all others."""
    alive: Path | None = None
    """A file to touch for as long as this process lives."""
    labels: Annotated[tuple[str, ...], Option("--domain-label")] = ()
    """A label of the node that names its domain in the network, the widest first; may be repeated."""


@click.command("pod", cls=Command)
@command_options(PodOptions)
def pod_command(options: PodOptions) -> None:
    """Train with this pod as one node of the run of RUN_FILE; phalanx submit --on kubernetes writes the
    manifest that calls this.

    Exit codes determine the job's reaction. 0: the run is finished. 75: it was saved and is not finished,
    start the pod again. 76: the run was stopped for good or has failed, end the job. Any other: the pod has
    failed, try again.

    \b
      phalanx pod /etc/phalanx/run.toml --index 3 --coordinator big-1f3a9c04-node-0-0.big-1f3a9c04:29400 --host 10.0.0.7 --submission word
    """
    from phalanx.fleet.node.agent import leave

    if options.alive is not None:
        show_life(options.alive)
    leads = options.index == 0
    with explained(EngineError):
        run_dir = made_directory(Path(read_run(options.run_file, PRESETS, []).run_dir))
        code = exit_code(run_dir, 1, leads=False)
        if code == 0:
            click.echo(f"the run in {run_dir} is finished")
            leave(0)
        if leads:
            begin_submission(run_dir, options.submission)
        domains = node_domains(options.labels, os.environ)
    # The leading pod listens at its own address: its DNS name may not exist yet, or still be that of the
    # previous pod.
    where = (
        join_address(options.host, split_address(options.coordinator)[1]) if leads else options.coordinator
    )
    part = AgentOptions(
        run=options.run_file, coordinator=where, lead=leads, host=options.host, domain=domains
    )
    try:
        code, led = take_part(f"{TASK}-{options.index}", part)
        # Another pod may lead by now, with this one as its member; then fleet.json shows whether the run is
        # over.
        leads = leads and (led or is_over(run_dir))
    except click.ClickException as error:
        error.show()
        # An error of a directory or file system may be gone in a moment; an error in the run file stays.
        leads = leads and not isinstance(error.__cause__, (RunDirectoryError, OSError))
        code = error.exit_code
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    leave(exit_code(run_dir, code, leads=leads))
