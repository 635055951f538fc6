"""``phalanx runs``: the runs in a folder, how far each is, and which goes on from which."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from phalanx.cli.errors import explained
from phalanx.cli.watch.run_summary import RunSummary, summarize
from phalanx.run.directory.paths import RunDirectoryError

_ANY_WIDTH = 10_000


@click.command("runs")
@click.argument("folder", type=click.Path(path_type=Path), default=Path("runs"))
@click.option(
    "--on",
    "engine",
    type=click.Choice(["slurm", "kubernetes"]),
    help="List the runs that are queued or running there instead.",
)
@click.option("--namespace", default="", help="With --on kubernetes: not that of kubectl's context.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def command(folder: Path, engine: str | None, namespace: str, as_json: bool) -> None:
    """List the runs in FOLDER (runs/ if none is given), or the one whose directory it is.

    Each has a line: state, losses, weights, and the checkpoint that it goes on from. With --on: what the cluster does with your runs, and why
    one waits.

    \b
      phalanx runs
      phalanx runs /data/runs --json
      phalanx runs --on slurm
      phalanx runs --on kubernetes --namespace research
    """
    if engine == "kubernetes":
        from phalanx.cli.launch.on_kubernetes import list_jobs
        from phalanx.launch.engines.tools import EngineError

        with explained(EngineError):
            list_jobs(namespace, as_json=as_json)
        return
    if engine is not None:
        _list_jobs(as_json)
        return
    if not folder.is_dir():
        raise click.ClickException(
            f"there is no folder {folder}; give the one that holds the run directories"
        )
    found = list(_found(folder))
    if as_json:
        click.echo(json.dumps([run.to_json() for run in found]))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _ANY_WIDTH  # what is piped is searched and cut by other programs
    table = Table(box=None, pad_edge=False)
    for name in ("run", "state", "loss", "held out", "weights", "goes on from"):
        table.add_column(name, overflow="fold")
    for run in found:
        row = (
            *(run.path, run.state, _loss(run.loss), _loss(run.held_out_loss)),
            *(run.weights_sha256[:12], _origin(run)),
        )
        table.add_row(*map(Text, row))  # a folder's name may look like markup
    console.print(table)


def _list_jobs(as_json: bool) -> None:
    from phalanx.launch.engines import slurm
    from phalanx.launch.engines.tools import EngineError

    with explained(EngineError):
        found = slurm.jobs()
    if as_json:
        click.echo(json.dumps([asdict(job) for job in found]))
        return
    for job in found:
        click.echo(f"job {job.id}  {job.name}: {job.sentence}\n  {job.run_dir}")
    if not found:
        click.echo("no run is queued or running")


def _origin(run: RunSummary) -> str:
    """The checkpoint that a run goes on from; of a parent beside it, the name suffices."""
    if not run.lineage:
        return ""
    parent = Path(run.lineage[-1].run_dir)
    near = parent.resolve().parent == Path(run.path).resolve().parent
    return f"step {run.lineage[-1].step} of {parent.name if near else parent}"


def _found(folder: Path) -> Iterator[RunSummary]:
    """The runs in the folder, by name, or the run that it is; what cannot be read is named on stderr."""
    inside = sorted(entry for entry in folder.iterdir() if (entry / "record.json").exists())
    for path in [folder] if (folder / "record.json").exists() else inside:
        try:
            yield summarize(path)
        except (RunDirectoryError, OSError) as error:
            click.echo(f"left out: {error}", err=True)


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
