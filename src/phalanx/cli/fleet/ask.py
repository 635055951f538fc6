"""Asks the coordinator of a running fleet for an operation, and prints its answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.errors import explained

if TYPE_CHECKING:
    from phalanx.fleet.core.messages import OperatorRequest


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
