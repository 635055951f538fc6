"""``phalanx agent``: a node's part in a fleet, on a real cluster."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import click

from phalanx.cli.errors import explained


@click.command("agent")
@click.option(
    "--run",
    "run_dir",
    required=True,
    type=click.Path(path_type=Path),
    help="The run directory, or the run.toml in it; every node must see it.",
)
@click.option(
    "--coordinator", default="", metavar="HOST:PORT", help="Where it listens; by default as fleet.json says."
)
@click.option("--node", help="This node's name in the fleet; by default its host name.")
@click.option("--host", help="This machine, as the other nodes reach it; found out by default.")
@click.option(
    "--domain", multiple=True, help="Failure domains from the widest to the narrowest; may be repeated."
)
@click.option("--spare", is_flag=True, help="Take ranks at first only if the other nodes are too few.")
@click.option("--attempt", type=click.IntRange(min=0), default=0, help="Of the run directory's attempts.")
@click.option(
    "--certificates",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with ca.pem, node.pem and node.key: everything then goes over mutual TLS.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def command(
    run_dir: Path,
    coordinator: str,
    node: str | None,
    host: str | None,
    domain: tuple[str, ...],
    spare: bool,
    attempt: int,
    certificates: Path | None,
    as_json: bool,
) -> None:
    """Take part in a run with this node: start its workers, watch them, do what the coordinator says, until the run is over.

    In torchrun's place, once on every node. The token is read from the run directory, or from PHALANX_RUN_TOKEN.

    \b
      phalanx agent --run runs/big/run.toml --coordinator head:29400
      srun --ntasks-per-node 1 phalanx agent --run runs/big --coordinator head:29400 --domain hall-2 --domain rack-17
    """
    from phalanx.fleet.agent import Post, own_host, run_agent
    from phalanx.fleet.security import SecurityError
    from phalanx.train.run_directory import RunDirectoryError

    folder = run_dir.parent if run_dir.is_file() else run_dir
    name = node or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    post = Post(
        run_dir=folder,
        node=name,
        attempt=attempt,
        coordinator=coordinator,
        host=host or (own_host(coordinator) if coordinator else "127.0.0.1"),
        domain=domain,
        spare=spare,
    )
    with explained(RunDirectoryError, SecurityError):
        run_agent(post, certificates)
    if as_json:
        click.echo(json.dumps({"node": name, "ended": True}))
