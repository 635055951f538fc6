"""``phalanx pod``: the agent of one node as a pod of a Kubernetes job; its manifest calls it."""

from __future__ import annotations

import os
from pathlib import Path

import click

from phalanx.cli.address_options import HostAndPort, HostName


@click.command("pod")
@click.argument("run_file", type=click.Path(path_type=Path))
@click.option(
    "--index",
    required=True,
    type=click.IntRange(min=0),
    help="The pod's index in its job, which a replacement keeps: its node is node-INDEX, and 0 leads.",
)
@click.option(
    "--coordinator",
    required=True,
    type=HostAndPort(),
    help="The stable DNS name of the pod that leads.",
)
@click.option("--host", required=True, type=HostName(for_others=True), help="This pod's own address.")
@click.option("--submission", required=True, help="A word that tells this start of the run from others.")
@click.option(
    "--alive", type=click.Path(path_type=Path), help="A file to touch for as long as this process lives."
)
@click.option(
    "--domain-label",
    "labels",
    multiple=True,
    help="A label of the node that names its domain in the network, the widest first; may be repeated.",
)
def command(
    run_file: Path,
    index: int,
    coordinator: str,
    host: str,
    submission: str,
    alive: Path | None,
    labels: tuple[str, ...],
) -> None:
    """Train with this pod as one node of the run of RUN_FILE; phalanx submit --on kubernetes writes the manifest that calls this.

    Exit codes tell the job what to do with the pod: 0: the run is finished. 75: it was saved and goes on, start the pod again. 76: the run was
    stopped for good or has failed, end the job. Any other: the pod has failed, try again.

    \b
      phalanx pod /etc/phalanx/run.toml --index 3 --coordinator big-1f3a9c04-node-0-0.big-1f3a9c04:29400 --host 10.0.0.7 --submission word
    """
    from phalanx.cli.errors import explained
    from phalanx.cli.fleet.agent_command import NodePart, take_part
    from phalanx.fleet.node.agent import leave
    from phalanx.hardware.local.network import join_address, split_address
    from phalanx.launch.engines.tools import EngineError
    from phalanx.launch.kubernetes.in_pod import (
        begin_submission,
        exit_code,
        is_over,
        made_directory,
        node_domains,
        show_life,
    )
    from phalanx.launch.kubernetes.request import TASK
    from phalanx.model.facts.presets import PRESETS
    from phalanx.run.directory.paths import RunDirectoryError
    from phalanx.run.read import read_run

    if alive is not None:
        show_life(alive)
    leads = index == 0
    with explained(EngineError):
        run_dir = made_directory(Path(read_run(run_file, PRESETS, []).run_dir))
        code = exit_code(run_dir, 1, leads=False)
        if code == 0:
            click.echo(f"the run in {run_dir} is finished")
            leave(0)
        if leads:
            begin_submission(run_dir, submission)
        domains = node_domains(labels, os.environ)
    # The leading pod listens at its own address: its name may not be known yet, or still be that of the pod before it.
    where = join_address(host, split_address(coordinator)[1]) if leads else coordinator
    part = NodePart(run_file, where, (), leads, f"{TASK}-{index}", host, domains)
    try:
        code, led = take_part(part, as_json=False)
        # Another may lead by now, and this pod have been its member; then fleet.json says whether the run is over.
        leads = leads and (led or is_over(run_dir))
    except click.ClickException as error:
        error.show()
        # What is wrong with a directory or a file system may be right in a moment; what is wrong with the run file stays so.
        leads = leads and not isinstance(error.__cause__, (RunDirectoryError, OSError))
        code = error.exit_code
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    leave(exit_code(run_dir, code, leads=leads))
