"""``phalanx fleet``: an operator's requests to a running fleet, and its coordinator if no launcher starts one."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.errors import explained

if TYPE_CHECKING:
    from phalanx.fleet.core.messages import OperatorRequest


def _common(function: Callable[..., None]) -> Callable[..., None]:
    """The options that every operation has."""
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


@click.group("fleet")
def command() -> None:
    """Operate the fleet that trains a run.

    \b
      phalanx fleet drain runs/quickstart-1f3a9c04 node-2
      phalanx fleet add runs/quickstart-1f3a9c04 node-2
      phalanx fleet stop runs/quickstart-1f3a9c04
      phalanx fleet rotate-tokens runs/quickstart-1f3a9c04
    """


@command.command("drain")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("node")
@_common
def drain(run_dir: Path, node: str, certificates: Path | None, as_json: bool) -> None:
    """Take NODE out of the run at the next step boundary; nothing is computed twice.

    \b
      phalanx fleet drain runs/quickstart-1f3a9c04 node-2
    """
    from phalanx.fleet.core.messages import Drain

    _ask(run_dir, Drain(node), certificates, as_json)


@command.command("add")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("node")
@_common
def add(run_dir: Path, node: str, certificates: Path | None, as_json: bool) -> None:
    """Let NODE take part again after it was drained or quarantined. (A new node joins by starting its agent.)

    \b
      phalanx fleet add runs/quickstart-1f3a9c04 node-2
    """
    from phalanx.fleet.core.messages import Admit

    _ask(run_dir, Admit(node), certificates, as_json)


@command.command("stop")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--for-now", is_flag=True, help="A submitted run: let its job queue itself again.")
@_common
def stop(run_dir: Path, for_now: bool, certificates: Path | None, as_json: bool) -> None:
    """Save and end the run; asked twice, end it at once. The job of a submitted run does not queue itself again.

    \b
      phalanx fleet stop runs/quickstart-1f3a9c04
    """
    from phalanx.fleet.core.messages import StopRun
    from phalanx.launch.engines.submission import mark_stopped

    if not for_now:
        mark_stopped(run_dir)
    _ask(run_dir, StopRun(), certificates, as_json)


@command.command("rotate-tokens")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--grace-s",
    type=click.FloatRange(0, 7 * 86_400),
    default=300.0,
    show_default=True,
    help="How long the tokens of now are still accepted.",
)
@_common
def rotate_tokens(run_dir: Path, grace_s: float, certificates: Path | None, as_json: bool) -> None:
    """Change the tokens of agents and operators while the run trains; no step is lost.

    The coordinator writes new ones into RUN_DIR, and agents take them over from there, also those that were cut off meanwhile. A node that
    does not see RUN_DIR is sent away after the grace.

    \b
      phalanx fleet rotate-tokens runs/quickstart-1f3a9c04
      phalanx fleet rotate-tokens runs/quickstart-1f3a9c04 --grace-s 30
    """
    from phalanx.fleet.core.messages import RotateTokens

    _ask(run_dir, RotateTokens(grace_s), certificates, as_json)


@command.command("serve")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="On which it listens and agents find it."
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=29400, show_default=True, help="0: any free one."
)
@_common
def serve(run_dir: Path, host: str, port: int, certificates: Path | None, as_json: bool) -> None:
    """Coordinate the run in RUN_DIR for agents on other machines, until it is over. May be killed and started again.

    Refused while another process trains or coordinates the run.

    \b
      phalanx fleet serve runs/big --host head --port 29400
    """
    from phalanx.fleet.control.coordinator import CoordinatorArgs, run_coordinator
    from phalanx.fleet.control.descriptors import DescriptorLimitError
    from phalanx.fleet.control.fleet_file import read_fleet_file
    from phalanx.fleet.control.security import TOKEN_VARIABLES, SecurityError, make_token
    from phalanx.fleet.control.transport import TransportError
    from phalanx.fleet.core.replay import JournalError
    from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
    from phalanx.train.start.open_run import take_lock

    with explained(
        DescriptorLimitError, JournalError, RunDirectoryError, SecurityError, TransportError, ValueError
    ):
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


def _ask(run_dir: Path, operation: OperatorRequest, certificates: Path | None, as_json: bool) -> None:
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
        answer = asyncio.run(operate(seen.coordinator, credentials, operation))
    _print(answer, as_json)


def _print(answer: str, as_json: bool) -> None:
    done: dict[str, object] = {"accepted": answer == "accepted", "answer": answer}
    click.echo(json.dumps(done) if as_json else answer)
    if not done["accepted"]:
        raise SystemExit(1)
