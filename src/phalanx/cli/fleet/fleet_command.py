"""``phalanx fleet``: an operator's requests to a running fleet, its size while the run trains, and its coordinator if no launcher starts one."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import msgspec

from phalanx.cli.errors import HostName, explained, full_disk
from phalanx.cli.launch.joining_hosts import verified_hosts
from phalanx.command import FiniteRange
from phalanx.command_help import CommandGroup
from phalanx.fleet.control.coordinator_link import operate
from phalanx.fleet.control.credentials import credentials_of
from phalanx.fleet.control.fleet_file import ClaimError, FleetFileError, read_fleet_file
from phalanx.fleet.control.security import TOKEN_VARIABLES, SecurityError, make_token
from phalanx.fleet.control.succession.reign import CoordinatorArgs, SupersededError
from phalanx.fleet.control.transport import DescriptorLimitError, TransportError
from phalanx.fleet.core.invariants import JournalError
from phalanx.fleet.core.messages import Admit, Drain, Grow, OperatorRequest, RotateTokens, Shrink, StopRun
from phalanx.launch.engines import bare
from phalanx.launch.engines.engine import prevent_restart, recorded_run
from phalanx.launch.engines.order import EngineError
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved


@click.group("fleet", cls=CommandGroup)
def command() -> None:
    """Operate the fleet that trains a run.

    \b
      phalanx fleet stop runs/quickstart-1f3a9c04
      phalanx fleet drain runs/quickstart-1f3a9c04 node-2
      phalanx fleet add runs/quickstart-1f3a9c04 node-2
      phalanx fleet shrink runs/quickstart-1f3a9c04 --by 2
      phalanx fleet grow runs/quickstart-1f3a9c04 --by 2
      phalanx fleet rotate-tokens runs/quickstart-1f3a9c04
    """


# One request: sent to the coordinator, its answer printed.


def operation_options(function: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command with the options that every operation has: --json and --certificates."""
    decorators = (
        click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON object."),
        click.option(
            "--certificates",
            type=click.Path(path_type=Path, exists=True, file_okay=False),
            help="Folder with ca.pem, node.pem and node.key, if the fleet uses TLS.",
        ),
    )
    for decorator in decorators:
        function = decorator(function)
    return function


def send_request(run_dir: Path, operation: OperatorRequest, certificates: Path | None) -> str:
    """Send a request to the fleet's coordinator and return its answer; a refusal is such a text too.

    Raises ``click.ClickException`` if it cannot be reached or authenticated, there is no fleet, or the run is over, and
    ``click.BadParameter`` for a name or number that no message may have.
    """
    try:
        msgspec.convert(msgspec.to_builtins(operation), type(operation))
    except msgspec.ValidationError as error:
        raise click.BadParameter(f"the coordinator would refuse the request: {error}") from error
    with explained(FleetFileError, SecurityError, TransportError, RunDirectoryError):
        fleet = read_fleet_file(run_dir)
        if fleet.over:
            raise TransportError(f"the run in {run_dir} is over: {fleet.phase}, {fleet.reason}")
        directory = RunDirectory(run_dir)
        attempt = directory.newest_attempt()
        credentials = credentials_of(run_dir, read_resolved(directory), attempt, certificates, ("operate",))
        return asyncio.run(operate(fleet.coordinator, credentials, operation))


def send_and_print(
    run_dir: Path, operation: OperatorRequest, certificates: Path | None, as_json: bool
) -> None:
    """Send a request and print the coordinator's answer; exit code 1 if it refuses. Raises as ``send_request``
    does.
    """
    answer = send_request(run_dir, operation, certificates)
    values: dict[str, object] = {"accepted": answer == "accepted", "answer": answer}
    click.echo(json.dumps(values) if as_json else answer)
    if not values["accepted"]:
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
    send_and_print(run_dir, Drain(node), certificates, as_json)


@command.command("add")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("node")
@operation_options
def add(run_dir: Path, node: str, certificates: Path | None, as_json: bool) -> None:
    """Let NODE take part again after it was drained or quarantined. (A new node joins by starting its agent.)

    \b
      phalanx fleet add runs/quickstart-1f3a9c04 node-2
    """
    send_and_print(run_dir, Admit(node), certificates, as_json)


@command.command("stop")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--for-now",
    is_flag=True,
    help="A submitted run: let its job queue itself again. A second request still saves.",
)
@operation_options
def stop(run_dir: Path, for_now: bool, certificates: Path | None, as_json: bool) -> None:
    """Save and end the run; a second request ends it at once.

    The job of a submitted run does not queue itself again.

    \b
      phalanx fleet stop runs/quickstart-1f3a9c04
    """
    if not for_now:
        with explained(EngineError):
            if unnoted := prevent_restart(run_dir):
                click.echo(unnoted, err=True)
    if full := full_disk(run_dir):
        click.echo(full, err=True)
    send_and_print(run_dir, StopRun(never_at_once=for_now), certificates, as_json)


@command.command("rotate-tokens")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--grace-s",
    type=FiniteRange(0, 7 * 86_400),
    default=300.0,
    show_default=True,
    help="Time for which the present tokens are still accepted.",
)
@operation_options
def rotate_tokens(run_dir: Path, grace_s: float, certificates: Path | None, as_json: bool) -> None:
    """Change the tokens of agents and operators while the run trains; no step is lost.

    The coordinator writes new ones into RUN_DIR, and agents read them there, also agents that were cut off
    meanwhile. A node that does not see RUN_DIR is refused after the grace.

    \b
      phalanx fleet rotate-tokens runs/quickstart-1f3a9c04
      phalanx fleet rotate-tokens runs/quickstart-1f3a9c04 --grace-s 30
    """
    send_and_print(run_dir, RotateTokens(grace_s), certificates, as_json)


@command.command("serve")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    type=HostName(for_others=True),
    help="Address on which it listens and agents find it.",
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
    from phalanx.train.start.open_run import take_lock

    refusals = (ClaimError, DescriptorLimitError, JournalError, RunDirectoryError, SecurityError)
    with explained(*refusals, SupersededError, TransportError, ValueError):
        directory = RunDirectory(run_dir)
        attempt = directory.newest_attempt()
        lock_fd = take_lock(directory.lock)
        if not directory.journal(attempt).exists():
            # The fleet begins with these tokens; a fleet that has begun cannot continue with others.
            for role in TOKEN_VARIABLES:
                make_token(run_dir, role)
        code = run_coordinator(CoordinatorArgs(run_dir, attempt, host, port, certificates=certificates))
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
@click.option("--no-wait", is_flag=True, help="Do not wait until they have left.")
@operation_options
def shrink(
    run_dir: Path,
    by: int | None,
    nodes: tuple[str, ...],
    no_wait: bool,
    certificates: Path | None,
    as_json: bool,
) -> None:
    """Give nodes back: the run continues without them from the next step boundary, and no step is computed
    twice.

    Without names, unfit nodes leave first, then those of the last ranks, and spares at the end; the node that
    leads stays. A node leaves when the others have newer snapshots than its own, usually after two steps.
    Nodes of a Slurm job are taken out of it, so that other jobs can have them. The weights at the end are the
    same.

    \b
      phalanx fleet shrink runs/big-1f3a9c04 --by 2
      phalanx fleet shrink runs/big-1f3a9c04 --node n17 --node n18
    """
    if (by is None) == (not nodes):
        raise click.UsageError("which nodes? --by N, or --node NAME")
    with explained(EngineError):
        run = recorded_run(run_dir) if no_wait else None
    if run is not None and run.holds_nodes:
        raise click.UsageError(
            f"--no-wait: nodes of {run.title} are taken out of it once they have left the run, and this command waits for that; without the wait they would stay "
            "in the job, idle"
        )
    began_s = time.monotonic()
    names = request_release(run_dir, by or 0, nodes, certificates)
    if no_wait:
        _print_result({"leaving": names}, f"leaving: {' '.join(names)}", as_json)
        return
    with explained(EngineError):
        released = wait_until_released(run_dir, names)
    took_s = time.monotonic() - began_s
    jobs = "; ".join(f"job {job} has {len(removed)} fewer" for job, removed in released.items())
    text = f"given back after {took_s:.1f} s: {' '.join(names)}" + (f" ({jobs})" if jobs else "")
    _print_result({"given_back": names, "seconds": took_s, "jobs": released}, text, as_json)


def request_release(
    run_dir: Path, by: int, nodes: tuple[str, ...], certificates: Path | None = None
) -> list[str]:
    """Have the coordinator release ``by`` nodes, or the named ones. Return their names; they have not left yet.

    Raises ``click.ClickException`` with its text if it refuses, or if the run's Slurm job cannot be made smaller.
    """
    with explained(EngineError):
        run = recorded_run(run_dir)
        if run is not None:
            run.demand_resizable()
    accepted, *names = send_request(run_dir, Shrink(by, nodes), certificates).split(" ")
    if accepted != "accepted":
        raise click.ClickException(" ".join((accepted, *names)))
    return names


def wait_until_released(run_dir: Path, names: list[str]) -> dict[str, tuple[str, ...]]:
    """Wait until nodes have left a fleet, or the run is over, and give them back to the run's engine. Return job
    -> its nodes.

    Prints every 10 s what it waits for. Raises ``EngineError``, and ``click.ClickException`` if a node stays
    after all or there is no fleet.
    """
    notice_s, leaving = time.monotonic() + _TELL_S, set[str]()
    with explained(FleetFileError):
        while True:
            fleet = read_fleet_file(run_dir)
            roles = {member.name: member.role for member in fleet.members}
            remaining = [name for name in names if roles.get(name) not in ("given back", "lost")]
            if fleet.over or not remaining:
                break
            leaving |= {name for name in remaining if roles.get(name) == "leaving"}
            kept = [name for name in remaining if name in leaving and roles.get(name) != "leaving"]
            if kept:
                raise click.ClickException(
                    f"{' '.join(kept)}: kept in the fleet by another request, or started again"
                )
            if time.monotonic() > notice_s:
                notice_s = time.monotonic() + _TELL_S
                click.echo(f"{fleet.phase}, step {fleet.step}: waiting for {' '.join(remaining)}", err=True)
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
    """Let more nodes take part, fleet.nodes or more. The run continues meanwhile, and its weights at the end
    are the same.

    For a run under Slurm a second job is submitted. Its nodes join the fleet when it starts, and leave it
    again at the end of its time. For a run on hosts, --hosts names the hosts that join. They are checked as
    at the run's start, and agents are started on all of them or none. The nodes of a fleet that `phalanx
    train --nodes` has started join by themselves; elsewhere start `phalanx agent --run RUN_DIR` on each.

    \b
      phalanx fleet grow runs/big-1f3a9c04 --by 2
      phalanx fleet grow runs/big-1f3a9c04 --by 2 --hosts more-hosts.txt
    """
    if hosts is not None:
        _grow_on_hosts(run_dir, by, hosts, certificates, as_json)
        return
    with explained(EngineError):
        job = request_nodes(run_dir, by, certificates)
    if job:
        _print_result(
            {"wanted": by, "job": job}, f"job {job}: {by} nodes, which join the run when it starts", as_json
        )
        return
    how = "they join a fleet by themselves if phalanx train --nodes has started it"
    _print_result(
        {"wanted": by}, f"requested {by} more nodes: {how}; else phalanx agent --run {run_dir}", as_json
    )


def request_nodes(run_dir: Path, by: int, certificates: Path | None = None) -> str:
    """Have the coordinator expect ``by`` more nodes, and queue a job that brings them. Return the job, empty if
    there is none.

    The job's script is checked first. Raises ``EngineError``, or ``click.ClickException`` if the coordinator
    refuses.
    """
    run = recorded_run(run_dir)
    queue_joining = None if run is None else run.prepare_joining(by, partial(click.echo, err=True))
    answer = send_request(run_dir, Grow(by), certificates)
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
    """Verify ``by`` further hosts of a file, have the coordinator expect them, start them, and print the result.

    Raises ``click.ClickException`` if the run has no hosts, the hosts do not fit, or the coordinator refuses.
    """
    with explained(EngineError, FleetFileError, RunDirectoryError):
        run = recorded_run(run_dir)
        if run is None or not run.has_hosts:
            raise click.UsageError("--hosts is for a run that phalanx submit --on ssh has started")
        order, hosts = verified_hosts(run_dir, run.made, path, by)
        answer = send_request(run_dir, Grow(by), certificates)
        if answer != "accepted":
            raise click.ClickException(answer)
        bare.start(order, hosts, joins=True)
    names = [host.name for host in hosts]
    _print_result(
        {"wanted": by, "hosts": names}, f"started on {' '.join(names)}, which join the run", as_json
    )


def _print_result(values: dict[str, object], text: str, as_json: bool) -> None:
    click.echo(json.dumps(values) if as_json else text)
