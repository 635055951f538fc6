"""``phalanx fleet``: an operator's requests to a running fleet, and its coordinator if no launcher starts one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from phalanx.cli.errors import explained, full_disk
from phalanx.cli.fleet.resize_command import ask_and_print, grow, operation_options, shrink
from phalanx.cli.shared_options import HostName


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


command.add_command(shrink)
command.add_command(grow)


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
    from phalanx.launch.engines.order import EngineError
    from phalanx.launch.engines.submission import noted_as_stopped, read_record

    if not for_now:
        with explained(EngineError):
            if unnoted := noted_as_stopped(run_dir, read_record(run_dir)):
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
