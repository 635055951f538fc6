"""``phalanx ui``: a page over run directories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click

from phalanx.cli.errors import HostName, demand_folder, explained
from phalanx.command import Argument, Option, command_options
from phalanx.command_help import Command
from phalanx.run.fields import ValueRange


@dataclass(frozen=True, kw_only=True)
class UiOptions:
    folders: Annotated[tuple[Path, ...], Argument(metavar="[DIR ...]")] = ()
    host: Annotated[str, HostName()] = "127.0.0.1"
    """Address to listen at. Any but a loopback address requires a token, which is printed."""
    port: Annotated[int | None, ValueRange(at_least=0, at_most=65535)] = None
    """Port to listen at (0: any). Without it 7425, or the next free one."""
    token: bool = False
    """Require a token on a loopback address too, for machines with several users."""
    open_page: Annotated[bool | None, Option("--open/--no-open")] = None
    """Open the page in a browser, or not. Without it: where there is one."""
    export: Annotated[Path | None, Option(metavar="FILE")] = None
    """Write the page of the one run DIR into FILE, which needs no server, and end."""


@click.command("ui", cls=Command)
@command_options(UiOptions)
def command(options: UiOptions) -> None:
    """Show the runs below DIR (runs/ if none is given) in a browser: curves, comparisons, where the time went, ranks, fleet, logs.

    The page reads run directories, also while runs write them, and changes nothing. Ctrl-C ends the page, never a run.

    \b
      phalanx ui
      phalanx ui runs /data/more-runs
      phalanx ui --export run.html runs/quickstart-1f3a9c04
      phalanx ui --host 0.0.0.0 --port 8000

    Behind SSH: ssh -L 7425:127.0.0.1:7425 MACHINE, and open the address that is printed there.
    """
    from phalanx.hardware.local.network import ListenError
    from phalanx_watch.page.app import serve

    folders = options.folders or (Path("runs"),)
    for folder in folders:
        demand_folder(folder)
    if options.export is not None:
        from phalanx_watch.page.export import ExportError, export_run

        if len(folders) != 1:
            raise click.UsageError("--export takes one run directory")
        with explained(ExportError):
            size = export_run(folders[0], options.export)
        click.echo(f"{options.export}: {size / 1e6:.1f} MB; it opens in any browser, without a server")
        return
    with explained(ListenError):
        serve(
            *(folders, options.host, options.port),
            demand_token=options.token,
            open_page=options.open_page,
            tell=click.echo,
        )
