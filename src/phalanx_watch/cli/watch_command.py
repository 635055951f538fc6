"""``phalanx watch``: a run's display, from its event stream, on any machine that can read its directory."""

from __future__ import annotations

from pathlib import Path

import click

from phalanx.cli.errors import demand_folder, explained
from phalanx.cli.output import text_console
from phalanx.command_help import Command
from phalanx.observe.display.terminal import show_events
from phalanx.observe.event_log import EventLogError, follow
from phalanx.run.directory.paths import RunDirectory


@click.command("watch", cls=Command)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Show what there is and end, instead of following the run.")
def command(run_dir: Path, once: bool) -> None:
    """Show the progress of the run in RUN_DIR, live or afterwards. Ctrl-C ends the display, never the run.

    \b
      phalanx watch runs/quickstart-1f3a9c04
    """
    demand_folder(run_dir)
    directory, console = RunDirectory(run_dir), text_console()
    with explained(EventLogError):
        events = follow(directory.events, lambda: once or directory.result.exists())
        show_events(events, console, live=console.is_terminal)
