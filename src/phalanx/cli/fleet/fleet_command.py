"""``phalanx fleet``: an operator's requests to a running fleet, its size while the run trains, and its coordinator if no launcher starts one."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.errors import HostName, explained, full_disk

if TYPE_CHECKING:
    from phalanx.fleet.core.messages import OperatorRequest


@click.group("fleet")
def command() -> None:
    """Operate the fleet that trains a run.

    \b
      phalanx fleet drain runs/quickstart-1f3a9c04 node-2
      phalanx fleet add runs/quickstart-1f3a9c04 node-2
      phalanx fleet shrink runs/quickstart-1f3a9c04 --by 2
      phalanx fleet grow runs/quickstart-1f3a9c04 --by 2
      phalanx fleet stop runs/quickstart-1f3a9c04
      phalanx fleet rotate-tokens runs/quickstart-1f3a9c04
    """


# One request: sent to the coordinator, its answer printed.


def operation_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that every operation has."""
    decorators = (
        click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON object."),
        click.option(
            "--certificates",
            type=click.Path(path_type=Path, exists=True, file_okay=False),
            help="Folder with ca.pem, node.pem and node.key, if the fleet speaks TLS.",
        ),
    )
    for decorator in decorators:
        function = decorator(function)
    return function


def ask(run_dir: Path, operation: OperatorRequest, certificates: Path | None) -> str:
    """The coordinator's answer. Raises ``click.ClickException`` if there is none."""
    from phalanx.fleet.control.coordinator_link import operate
    from phalanx.fleet.control.credentials import credentials_of
    from phalanx.fleet.control.fleet_file import FleetFileError, read_fleet_file
    from phalanx.fleet.control.security import SecurityError
    from phalanx.fleet.control.transport import TransportError
    from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved

    with explained(FleetFileError, SecurityError, TransportError, RunDirectoryError):
        seen = read_fleet_file(run_dir)
        if seen.over:
            raise TransportError(f"the run in {run_dir} is over: {seen.phase}, {seen.reason}")
        directory = RunDirectory(run_dir)
        attempt = directory.newest_attempt()
        credentials = credentials_of(run_dir, read_resolved(directory), attempt, certificates, ("operate",))
        return asyncio.run(operate(seen.coordinator, credentials, operation))


def ask_and_print(
    run_dir: Path, operation: OperatorRequest, certificates: Path | None, as_json: bool
) -> None:
    """Prints the coordinator's answer; exit code 1 if it refuses."""
    answer = ask(run_dir, operation, certificates)
    done: dict[str, object] = {"accepted": answer == "accepted", "answer": answer}
    click.echo(json.dumps(done) if as_json else answer)
    if not done["accepted"]:
        raise SystemExit(1)


@command.command("drain")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("node")
@operation_options
def drain(run_dir: Path, node: str, certificates: Path | None, as_json: bool) -> None:
    """Take NODE out of the run at the next step boundary; nothing is computed twice.

    \b
      phalanx fleet drain runs/quickstart-1f3a9c04 node-2
    """
    from phalanx.fleet.core.messages import Drain

    ask_and_print(run_dir, Drain(node), certificates, as_json)


@command.command("add")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("node")
@operation_options
def add(run_dir: Path, node: str, certificates: Path | None, as_json: bool) -> None:
    """Let NODE take part again after it was drained or quarantined. (A new node joins by starting its agent.)

    \b
      phalanx fleet add runs/quickstart-1f3a9c04 node-2
    """
    from phalanx.fleet.core.messages import Admit

    ask_and_print(run_dir, Admit(node), certificates, as_json)


@command.command("stop")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--for-now",
    is_flag=True,
    help="A submitted run: let its job queue itself again. Asked twice, it still saves.",
)
@operation_options
def stop(run_dir: Path, for_now: bool, certificates: Path | None, as_json: bool) -> None:
    """Save and end the run; asked twice, end it at once. The job of a submitted run does not queue itself again.

    \b
      phalanx fleet stop runs/quickstart-1f3a9c04
    """
    from phalanx.fleet.core.messages import StopRun
    from phalanx.launch.engines.engine import mark_as_stopped
    from phalanx.launch.engines.order import EngineError

    if not for_now:
        with explained(EngineError):
            if unnoted := mark_as_stopped(run_dir):
                click.echo(unnoted, err=True)
    if full := full_disk(run_dir):
        click.echo(full, err=True)
    ask_and_print(run_dir, StopRun(never_at_once=for_now), certificates, as_json)


@command.command("rotate-tokens")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--grace-s",
    type=click.FloatRange(0, 7 * 86_400),
    default=300.0,
    show_default=True,
    help="How long the tokens of now are still accepted.",
)
@operation_options
def rotate_tokens(run_dir: Path, grace_s: float, certificates: Path | None, as_json: bool) -> None:
    """Change the tokens of agents and operators while the run trains; no step is lost.

    The coordinator writes new ones into RUN_DIR, and agents take them over from there, also those that were cut off meanwhile. A node that
    does not see RUN_DIR is sent away after the grace.

    \b
      phalanx fleet rotate-tokens runs/quickstart-1f3a9c04
      phalanx fleet rotate-tokens runs/quickstart-1f3a9c04 --grace-s 30
    """
    from phalanx.fleet.core.messages import RotateTokens

    ask_and_print(run_dir, RotateTokens(grace_s), certificates, as_json)


@command.command("serve")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    type=HostName(for_others=True),
    help="On which it listens and agents find it.",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=29400, show_default=True, help="0: any free one."
)
@operation_options
def serve(run_dir: Path, host: str, port: int, certificates: Path | None, as_json: bool) -> None:
    """Coordinate the run in RUN_DIR for agents on other machines, until it is over. May be killed and started again.

    Refused while another process trains or coordinates the run.

    \b
      phalanx fleet serve runs/big --host head --port 29400
    """
    from phalanx.fleet.control.coordinator import run_coordinator
    from phalanx.fleet.control.fleet_file import ClaimError, read_fleet_file
    from phalanx.fleet.control.security import TOKEN_VARIABLES, SecurityError, make_token
    from phalanx.fleet.control.succession.reign import CoordinatorArgs, SupersededError
    from phalanx.fleet.control.transport import DescriptorLimitError, TransportError
    from phalanx.fleet.core.invariants import JournalError
    from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
    from phalanx.train.start.open_run import take_lock

    refusals = (ClaimError, DescriptorLimitError, JournalError, RunDirectoryError, SecurityError)
    with explained(*refusals, SupersededError, TransportError, ValueError):
        directory = RunDirectory(run_dir)
        attempt = directory.newest_attempt()
        lock_fd = take_lock(directory.lock)
        if not directory.journal(attempt).exists():
            # With this the fleet begins; where it has begun, it cannot go on with others.
            for role in TOKEN_VARIABLES:
                make_token(run_dir, role)
        code = run_coordinator(CoordinatorArgs(run_dir, attempt, host, port), certificates)
        ended = read_fleet_file(run_dir)
        os.close(lock_fd)
    if as_json:
        click.echo(json.dumps({"phase": ended.phase, "reason": ended.reason, "result": ended.result_json}))
    raise SystemExit(code)


_POLL_S, _TELL_S = 0.2, 10.0


# ``phalanx fleet shrink`` and ``grow``: nodes are given back to the cluster in seconds, and others join.


@command.command("shrink")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--by", type=click.IntRange(min=1), help="Number of nodes; the coordinator chooses them.")
@click.option("--node", "nodes", multiple=True, help="Name of a node; may be repeated.")
@click.option("--no-wait", is_flag=True, help="Ask, and do not wait until they have gone.")
@operation_options
def shrink(
    run_dir: Path,
    by: int | None,
    nodes: tuple[str, ...],
    no_wait: bool,
    certificates: Path | None,
    as_json: bool,
) -> None:
    """Give nodes back: the run goes on without them from the next step boundary, and no step is computed twice.

    Without names, unfit nodes go first, then those of the last ranks, and spares at the end; the node that leads stays. A node goes when the others
    have newer snapshots than its own, usually after two steps. Nodes of a Slurm job are taken out of it, so that other jobs can have them.
    The weights at the end are the same.

    \b
      phalanx fleet shrink runs/big-1f3a9c04 --by 2
      phalanx fleet shrink runs/big-1f3a9c04 --node n17 --node n18
    """
    from phalanx.launch.engines.engine import recorded_run
    from phalanx.launch.engines.order import EngineError

    if (by is None) == (not nodes):
        raise click.UsageError("which nodes? --by N, or --node NAME")
    with explained(EngineError):
        run = recorded_run(run_dir) if no_wait else None
    if run is not None and run.holds_nodes:
        raise click.UsageError(
            f"--no-wait: nodes of {run.title} are taken out of it once they have left the run, which this command waits for; without it they would stay "
            "in the job, idle"
        )
    began_s = time.monotonic()
    names = asked_to_go(run_dir, by or 0, nodes, certificates)
    if no_wait:
        _say({"leaving": names}, f"leaving: {' '.join(names)}", as_json)
        return
    with explained(EngineError):
        given = wait_until_gone(run_dir, names)
    took_s = time.monotonic() - began_s
    jobs = "; ".join(f"job {job} has {len(gone)} fewer" for job, gone in given.items())
    text = f"given back after {took_s:.1f} s: {' '.join(names)}" + (f" ({jobs})" if jobs else "")
    _say({"given_back": names, "seconds": took_s, "jobs": given}, text, as_json)


def asked_to_go(
    run_dir: Path, by: int, nodes: tuple[str, ...], certificates: Path | None = None
) -> list[str]:
    """Names of the nodes that the coordinator lets go. Raises ``click.ClickException`` with its words if it refuses."""
    from phalanx.fleet.core.messages import Shrink
    from phalanx.launch.engines.engine import recorded_run
    from phalanx.launch.engines.order import EngineError

    with explained(EngineError):
        run = recorded_run(run_dir)
        if run is not None:
            run.demand_resizable()
    accepted, *names = ask(run_dir, Shrink(by, nodes), certificates).split(" ")
    if accepted != "accepted":
        raise click.ClickException(" ".join((accepted, *names)))
    return names


def wait_until_gone(run_dir: Path, names: list[str]) -> dict[str, tuple[str, ...]]:
    """Waits until nodes have left a fleet, and takes them out of the run's Slurm jobs; job -> its nodes. Raises ``EngineError``."""
    from phalanx.fleet.control.fleet_file import FleetFileError, read_fleet_file
    from phalanx.launch.engines.engine import recorded_run

    told_s, leaving = time.monotonic() + _TELL_S, set[str]()
    with explained(FleetFileError):
        while True:
            seen = read_fleet_file(run_dir)
            roles = {member.name: member.role for member in seen.members}
            there = [name for name in names if roles.get(name) not in ("given back", "lost")]
            if seen.over or not there:
                break
            leaving |= {name for name in there if roles.get(name) == "leaving"}
            kept = [name for name in there if name in leaving and roles.get(name) != "leaving"]
            if kept:
                raise click.ClickException(
                    f"{' '.join(kept)}: kept in the fleet by another request, or started again"
                )
            if time.monotonic() > told_s:
                told_s = time.monotonic() + _TELL_S
                click.echo(f"{seen.phase}, step {seen.step}: waiting for {' '.join(there)}", err=True)
            time.sleep(_POLL_S)
    run = recorded_run(run_dir)
    return {} if run is None else run.release(set(names))


@command.command("grow")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--by", type=click.IntRange(min=1), required=True, help="Number of nodes.")
@click.option(
    "--hosts",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="For a run on hosts: a file as for phalanx submit, whose first hosts that are not in the fleet join it.",
)
@operation_options
def grow(run_dir: Path, by: int, hosts: Path | None, certificates: Path | None, as_json: bool) -> None:
    """Let more nodes take part, as many as fleet.nodes says or more; the run goes on meanwhile, and its weights at the end are the same.

    For a run under Slurm a second job is submitted, whose nodes join the fleet when it starts; they leave it again at the end of its time. For a run
    on hosts, --hosts names those that join: they are checked as at its start, and agents started on all of them or none. The nodes of
    a fleet that `phalanx train --nodes` has started come by themselves; elsewhere start `phalanx agent --run RUN_DIR` on each.

    \b
      phalanx fleet grow runs/big-1f3a9c04 --by 2
      phalanx fleet grow runs/big-1f3a9c04 --by 2 --hosts more-hosts.txt
    """
    from phalanx.launch.engines.order import EngineError

    if hosts is not None:
        _grow_on_hosts(run_dir, by, hosts, certificates, as_json)
        return
    with explained(EngineError):
        job = grown(run_dir, by, certificates)
    if job:
        _say({"wanted": by, "job": job}, f"job {job}: {by} nodes, which join the run when it starts", as_json)
        return
    how = "they come by themselves to a fleet that phalanx train --nodes has started"
    _say({"wanted": by}, f"{by} more nodes are wanted: {how}; else phalanx agent --run {run_dir}", as_json)


def grown(run_dir: Path, by: int, certificates: Path | None = None) -> str:
    """Asks the coordinator for ``by`` more nodes; the job that brings them, empty if they come without one.

    Raises ``EngineError`` or ``click.ClickException``.
    """
    from phalanx.fleet.core.messages import Grow
    from phalanx.launch.engines.engine import recorded_run

    run = recorded_run(run_dir)
    queue_joining = None if run is None else run.prepare_joining(by, partial(click.echo, err=True))
    answer = ask(run_dir, Grow(by), certificates)
    if answer != "accepted":
        raise click.ClickException(answer)
    return queue_joining() if queue_joining is not None else ""


def _grow_on_hosts(
    run_dir: Path,
    by: int,
    path: Path,
    certificates: Path | None,
    as_json: bool,
) -> None:
    from phalanx.cli.launch.joining_hosts import verified_hosts
    from phalanx.fleet.control.fleet_file import FleetFileError
    from phalanx.fleet.core.messages import Grow
    from phalanx.launch.engines import bare
    from phalanx.launch.engines.engine import recorded_run
    from phalanx.launch.engines.order import EngineError
    from phalanx.run.directory.paths import RunDirectoryError

    with explained(EngineError, FleetFileError, RunDirectoryError):
        run = recorded_run(run_dir)
        if run is None or not run.has_hosts:
            raise click.UsageError("--hosts is for a run that phalanx submit --on ssh has started")
        order, hosts = verified_hosts(run_dir, run.made, path, by)
        answer = ask(run_dir, Grow(by), certificates)
        if answer != "accepted":
            raise click.ClickException(answer)
        bare.start(order, hosts, joins=True)
    names = [host.name for host in hosts]
    _say({"wanted": by, "hosts": names}, f"started on {' '.join(names)}, which join the run", as_json)


def _say(values: dict[str, object], text: str, as_json: bool) -> None:
    click.echo(json.dumps(values) if as_json else text)
