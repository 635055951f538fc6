"""``phalanx ui``: a page over run directories."""

from __future__ import annotations

from pathlib import Path

import click

from phalanx.cli.address_options import HostName
from phalanx.cli.errors import explained
from phalanx.cli.run_folder import demand_folder


@click.command("ui")
@click.argument("folders", nargs=-1, metavar="[DIR ...]", type=click.Path(path_type=Path))
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    type=HostName(),
    help="Address to listen at. Any but a loopback address demands a token, which is printed.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port to listen at (0: any). Without it 7425, or the next that is free.",
)
@click.option(
    "--token",
    is_flag=True,
    help="Demand a token on a loopback address too, as on a machine that others log in to.",
)
@click.option(
    "--open/--no-open",
    "open_page",
    default=None,
    help="Open the page in a browser, or not. Without it: where there is one.",
)
@click.option(
    "--export",
    "export",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the page of the one run DIR into FILE, which needs no server, and end.",
)
def command(
    folders: tuple[Path, ...],
    host: str,
    port: int | None,
    token: bool,
    open_page: bool | None,
    export: Path | None,
) -> None:
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
    from phalanx.watch.page.app import serve

    folders = folders or (Path("runs"),)
    for folder in folders:
        demand_folder(folder)
    if export is not None:
        from phalanx.watch.page.export import ExportError, export_run

        if len(folders) != 1:
            raise click.UsageError("--export takes one run directory")
        with explained(ExportError):
            size = export_run(folders[0], export)
        click.echo(f"{export}: {size / 1e6:.1f} MB; it opens in any browser, without a server")
        return
    with explained(ListenError):
        serve(folders, host, port, demand_token=token, open_page=open_page, tell=click.echo)
