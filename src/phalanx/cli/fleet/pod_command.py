"""``phalanx pod``: the agent of one node as a pod of a Kubernetes job; its manifest calls it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click

from phalanx.cli.errors import HostAndPort, HostName
from phalanx.command import Argument, Option, command_options
from phalanx.command_help import Command
from phalanx.run.fields import NOT_NEGATIVE


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
def command(options: PodOptions) -> None:
    """Train with this pod as one node of the run of RUN_FILE; phalanx submit --on kubernetes writes the
    manifest that calls this.

    Exit codes determine the job's reaction. 0: the run is finished. 75: it was saved and is not finished,
    start the pod again. 76: the run was stopped for good or has failed, end the job. Any other: the pod has
    failed, try again.

    \b
      phalanx pod /etc/phalanx/run.toml --index 3 --coordinator big-1f3a9c04-node-0-0.big-1f3a9c04:29400 --host 10.0.0.7 --submission word
    """
    from phalanx.cli.errors import explained
    from phalanx.cli.fleet.agent_command import AgentOptions, take_part
    from phalanx.fleet.node.agent import leave
    from phalanx.hardware.local.network import join_address, split_address
    from phalanx.launch.engines.order import EngineError
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
