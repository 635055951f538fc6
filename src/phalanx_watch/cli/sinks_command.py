"""``phalanx sinks``: send a run's missing events to its trackers."""

from __future__ import annotations

import os
from pathlib import Path

import click

from phalanx.cli.errors import explained
from phalanx.command import PluginName
from phalanx.command_help import CommandGroup
from phalanx.observe.event_log import EventLogError, read_events
from phalanx.observe.sink_registry import SinkError, fill_sink
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.train.start.open_run import take_lock


@click.group("sinks", cls=CommandGroup)
def command() -> None:
    """Experiment trackers of a run: send missing events.

    \b
      phalanx sinks fill runs/quickstart-1f3a9c04
    """


@command.command("fill")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--sink",
    "names",
    multiple=True,
    type=PluginName("phalanx.sinks"),
    help="Which; may be repeated.",
)
def fill_command(run_dir: Path, names: tuple[str, ...]) -> None:
    """Send missing events of the run in RUN_DIR to its trackers (observe.sinks), or to those of --sink.

    Each start of a run sends the events that a killed one did not. This command also fills gaps in the middle, after a full queue or an
    outage of the tracker.
    TensorBoard's folder and the offline files of W&B are written from scratch; MLflow gets the points that it does not hold.

    \b
      phalanx sinks fill runs/quickstart-1f3a9c04
      phalanx sinks fill runs/quickstart-1f3a9c04 --sink mlflow
    """
    directory = RunDirectory(run_dir)
    with explained(RunDirectoryError, SinkError, EventLogError):
        described = read_resolved(
            directory
        ).observe.sinks  # a folder that is no run is refused, and keeps what it has
        sink_names = names or described
        if not sink_names:
            raise click.UsageError(
                f"the run file of {run_dir} names no sink (observe.sinks); give one: --sink NAME"
            )
        lock = take_lock(directory.lock)  # a running run sends its events itself
        try:
            for name in sink_names:
                sent = fill_sink(name, run_dir, run_dir.name, read_events(directory.events))
                click.echo(f"{name}: {sent:,} events sent")
        finally:
            os.close(lock)
