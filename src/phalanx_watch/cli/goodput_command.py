"""``phalanx goodput``: time account of a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from phalanx.cli.errors import demand_folder, explained
from phalanx.command_help import Command
from phalanx.observe.event_log import EventLogError, read_events
from phalanx.observe.goodput import format_goodput, goodput
from phalanx.run.directory.paths import RunDirectory


@click.command("goodput", cls=Command)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; times in nanoseconds.")
def command(run_dir: Path, as_json: bool) -> None:
    """Show where the time of the run in RUN_DIR went, over all its attempts. The buckets sum to wall time.

    \b
      phalanx goodput runs/quickstart-1f3a9c04
    """
    demand_folder(run_dir)
    with explained(EventLogError):
        result = goodput(read_events(RunDirectory(run_dir).events))
    if as_json:
        click.echo(
            json.dumps({**dataclasses.asdict(result), "goodput": result.goodput, "held_ns": result.held_ns})
        )
    else:
        click.echo(format_goodput(result))
