"""``phalanx runs``: the runs in a folder, listed, labeled and removed; ``show`` and ``compare`` are in ``runs_show.py``."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import click
import msgspec

from phalanx.cli.errors import demand_folder, explained, refuse_unused
from phalanx.cli.output import ABOVE_PEAK, age, share, size, text_console, utilization
from phalanx.command import Argument, AsJson, Option, PluginName, command_options, written_options
from phalanx.command_help import Command, DefaultGroup
from phalanx.run.directory.paths import RunDirectoryError
from phalanx.run.fields import POSITIVE
from phalanx_watch.cli.runs_show import compare_command, show_command
from phalanx_watch.runs import index
from phalanx_watch.runs.row import LabelError, RunLabels, RunRow, read_labels, write_labels

# ``phalanx runs list``: the runs in folders, their progress, and the runs that they continue.

_ANY_WIDTH = 10_000
_SHOWN = (
    "state",
    "step",
    "loss",
    "bits_per_byte",
    "tokens_per_s",
    "mfu",
    "updated",
    "weights_sha256",
    "tags",
)


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    folders: Annotated[tuple[Path, ...], Argument()] = ()
    conditions: Annotated[tuple[str, ...], Option("--where", metavar="CONDITION")] = ()
    """Only runs that satisfy the condition; may be repeated."""
    tags: Annotated[tuple[str, ...], Option("--tag")] = ()
    """Only runs with this tag; may be repeated."""
    sort: Annotated[str, Option(metavar="COLUMN")] = ""
    """Order by a column; with - before it, the largest first."""
    columns: Annotated[str, Option(metavar="A,B,...")] = ""
    """Show these columns instead."""
    last: Annotated[int | None, POSITIVE] = None
    """Show only the last N."""
    engine: Annotated[str | None, PluginName("phalanx.engines", "has_queue"), Option("--on")] = None
    """List the runs that are queued or running in this engine instead."""
    namespace: str = ""
    """With --on kubernetes: a namespace other than that of kubectl's context."""
    as_json: AsJson = False
    """Print one JSON array."""


@click.command("list", short_help="The runs in folders: state, losses, speed, weights, tags.", cls=Command)
@command_options(ListOptions)
def list_command(options: ListOptions) -> None:
    """List the runs in FOLDERS (runs/ if none is given); a folder may be a run directory itself.

    Each has a line: state, losses, speed, weights, tags, and the checkpoint that it continues from. A condition is NAME OPERATOR VALUE, with
    < <= > >= = != or ~ (contains); a name is a column or its heading, or a field of the run file such as optimizer.lr. With --on: what the cluster does
    with your runs, and why one waits.

    \b
      phalanx runs list
      phalanx runs list /data/runs --where "loss<2" --where "optimizer.lr=0.001" --tag good --sort -tokens_per_s
      phalanx runs --columns state,loss,layout,optimizer.lr
      phalanx runs --on slurm
      phalanx runs --on kubernetes --namespace research

    A state is running, finished, stopped (by request, and saved), failed (its process is gone), silent or waiting (for nodes, or to
    begin). A run is silent if it has no event for 20 usual steps or two minutes, while a process holds it or on another machine.
    """
    if options.engine is None:
        refuse_unused(written_options(options, "namespace"), "is for --on kubernetes")
    else:
        refuse_unused(
            written_options(options, "folders", "conditions", "tags", "sort", "columns", "last"),
            "is about runs in folders, and --on lists the jobs of a cluster: one or the other",
        )
        _list_jobs(options.engine, options.namespace, as_json=options.as_json)
        return
    places = options.folders or (Path("runs"),)
    for folder in places:
        demand_folder(folder)
    with explained(index.SelectionError):
        demands = [demand for text in options.conditions for demand in index.read_conditions(text)]
        columns = [index.checked_name(name.strip()) for name in options.columns.split(",") if name.strip()]
        rows = index.selected(index.RunIndex(places).rows(), demands, options.tags)
        if options.sort:
            rows = index.ordered(rows, options.sort.lstrip("-"), falling=options.sort.startswith("-"))
    rows = rows[-options.last :] if options.last else rows
    if options.as_json:
        tables = [{**asdict(row), "finished": row.state == "finished"} for row in rows]
        click.echo(msgspec.json.encode(tables).decode())
        return
    if rows:
        _print(rows, columns or list(_SHOWN))
    else:
        reason = "no run fits" if demands or options.tags else "no run"
        click.echo(f"{reason} in {', '.join(map(str, places))}")
    for row in rows:
        for problem in row.problems:
            click.echo(f"note: {problem}", err=True)


def _print(rows: list[RunRow], shown: list[str]) -> None:
    """Print the runs as a table; as wide as it needs if the output is no terminal."""
    from rich.table import Table

    console = text_console()
    if not console.is_terminal:
        console.width = _ANY_WIDTH  # other programs search and cut piped output
    table = Table(box=None, pad_edge=False)
    for name in ("path", *shown, "goes on from"):
        table.add_column(index.HEADINGS.get(name, name), overflow="fold")
    now = time.time()
    for row in rows:
        cells = (row.path, *(_cell(row, name, now) for name in shown), origin(row))
        table.add_row(*cells)
    console.print(table)
    if "mfu" in shown and any(row.mfu is not None and row.mfu > 1 for row in rows):
        console.print(ABOVE_PEAK)


def _cell(row: RunRow, name: str, now: float) -> str:
    """Format a column of a run; empty if it has no value. Times are ages, hashes have 12 digits, MFU and goodput are per cent."""
    value = index.value_of(row, name)
    if value is None:
        return ""
    match name:
        case "step":
            return f"{row.step:,}/{row.steps:,}"
        case "updated" | "started":
            return age(now - float(str(value)))
        case "weights_sha256" | "data_fingerprint" | "commit":
            return str(value)[:12]
        case "mfu":
            return utilization(float(str(value)))
        case "goodput":
            return share(float(str(value)))
        case "tokens_per_s":
            return f"{float(str(value)):,.0f}"
        case "layout":
            return " ".join(f"{axis}={degree}" for axis, degree in row.layout.items())
        case "lineage":
            return origin(row)
    if isinstance(value, float):
        return f"{value:.4f}" if "." not in name else f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def origin(row: RunRow) -> str:
    """Return the checkpoint that a run continues from; empty if it continues none. The name suffices for a parent in the same folder."""
    if not row.lineage:
        return ""
    parent = Path(row.lineage[-1].run_dir)
    near = parent.resolve().parent == Path(row.path).resolve().parent
    return f"step {row.lineage[-1].step} of {parent.name if near else parent}"


def _list_jobs(name: str, namespace: str, *, as_json: bool) -> None:
    """Print the runs in an engine's queue as text or JSON, or that there are none.

    Raises ``click.ClickException`` for an unknown or failing engine, or a namespace that it does not take.
    """
    from phalanx.launch.engines.engine import engine_named
    from phalanx.launch.engines.order import EngineError

    with explained(EngineError):
        engine = engine_named(name)
        if "namespace" not in engine.options:
            refuse_unused(["--namespace"] * bool(namespace), "is for --on kubernetes")
        jobs = engine.jobs(namespace)
    if as_json:
        click.echo(json.dumps([asdict(job) for job in jobs]))
        return
    for job in jobs:
        click.echo(job.listing)
    if not jobs:
        click.echo("no run of Phalanx is queued or running there")


# Labels and removal: ``phalanx runs tag``, ``note``, and ``rm``, which lists runs with all their files before it removes them.

_MOST = 5


@dataclass(frozen=True, kw_only=True)
class RemoveOptions:
    run_dirs: Annotated[tuple[Path, ...], Argument()]
    yes: bool = False
    """Remove without confirmation."""
    force: bool = False
    """Even if other runs continue from its checkpoints, or it may run on another machine."""
    beside: tuple[Path, ...] = ()
    """Search this folder too for runs that continue from it; may be repeated. The run's own folder is always searched."""


@click.command("rm", short_help="Remove runs, after listing what would be lost.", cls=Command)
@command_options(RemoveOptions)
def remove_command(options: RemoveOptions) -> None:
    """Remove the runs in RUN_DIRS: their checkpoints, events, logs and records.

    The command lists what would be lost, and waits for confirmation. A run in training is never removed. A run whose checkpoints other
    runs continue from is removed only with --force. Copies of its checkpoints in an object store stay.

    \b
      phalanx runs rm runs/quickstart-1f3a9c04-2
    """
    for path in options.run_dirs:
        demand_folder(path)
    with explained(RunDirectoryError):
        removals = [
            index.removal(path, options.beside, options.run_dirs) for path in dict.fromkeys(options.run_dirs)
        ]
    for removal_plan in removals:
        _print_removal(removal_plan)
    refused = [removal_plan for removal_plan in removals if removal_plan.obstacles and not options.force]
    for removal_plan in refused:
        for obstacle in removal_plan.obstacles:
            click.echo(f"{removal_plan.row.path}: {obstacle}", err=True)
    if refused:
        raise click.ClickException("nothing was removed; --force removes it all the same")
    total = sum(removal_plan.size_bytes for removal_plan in removals)
    if not options.yes:
        if not sys.stdin.isatty():
            raise click.ClickException("nothing was removed: give --yes without a terminal")
        click.confirm(f"remove {len(removals)} run{'s' * (len(removals) > 1)}, {size(total)}?", abort=True)
    with explained(RunDirectoryError):
        for removal_plan in removals:
            index.remove(Path(removal_plan.row.path))
            click.echo(f"removed {removal_plan.row.path}")


def _print_removal(removal_plan: index.Removal) -> None:
    """Print what the removal of a run would delete: its state, size, the largest ``_MOST`` entries, weights and labels."""
    row = removal_plan.row
    click.echo(
        f"{row.path}: {row.state}, step {row.step:,} of {row.steps:,}, {removal_plan.files:,} files, {size(removal_plan.size_bytes)}"
    )
    listed = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in removal_plan.largest[:_MOST])
    click.echo(f"  {listed}" + (", ..." if len(removal_plan.largest) > _MOST else ""))
    if row.weights_sha256:
        click.echo(f"  the weights {row.weights_sha256[:12]}, if no copy is elsewhere")
    if row.tags or row.note:
        click.echo(f"  labels: {' '.join(row.tags)} {row.note[:200]}".rstrip())


@click.command("tag", short_help="Give a run tags, take them away, or print them.", cls=Command)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("tags", nargs=-1)
@click.option(
    "--remove", "removed", multiple=True, metavar="TAG", help="Take this tag away; may be repeated."
)
def tag_command(run_dir: Path, tags: tuple[str, ...], removed: tuple[str, ...]) -> None:
    """Give the run in RUN_DIR the TAGS besides those that it has; without any, print them.

    \b
      phalanx runs tag runs/quickstart-1f3a9c04 good baseline
      phalanx runs tag runs/quickstart-1f3a9c04 --remove baseline
    """
    with explained(LabelError, RunDirectoryError):
        labels = _labels(run_dir)
        if tags or removed:
            labels = labels.untagged(*removed).tagged(*tags, at_s=time.time())
            write_labels(run_dir, labels)
    click.echo(" ".join(labels.tags))


@click.command("note", short_help="Write a note on a run, or print it.", cls=Command)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("text", required=False)
def note_command(run_dir: Path, text: str | None) -> None:
    """Write a note on the run in RUN_DIR, in place of the one that it has; an empty TEXT removes it, and without one it is printed.

    \b
      phalanx runs note runs/quickstart-1f3a9c04 "the learning rate of the paper"
    """
    with explained(LabelError, RunDirectoryError):
        labels = _labels(run_dir)
        if text is not None:
            write_labels(run_dir, labels.noted(text))
            return
    click.echo(labels.note)


def _labels(run_dir: Path) -> RunLabels:
    """Return the labels of a run. Raises ``RunDirectoryError`` if it is no run directory."""
    demand_folder(run_dir)
    if not index.is_run(run_dir):
        raise RunDirectoryError(f"{run_dir} is no run directory")
    return read_labels(run_dir)


@click.group("runs", cls=DefaultGroup, unnamed=list_command)
def command() -> None:
    """The runs in a folder: list, show, compare, label and remove them.

    Without a further word: phalanx runs list.

    \b
      phalanx runs
      phalanx runs list /data/runs --where "loss<2" --tag good --sort -bits_per_byte
      phalanx runs show runs/quickstart-1f3a9c04
      phalanx runs compare runs/a runs/b runs/c
      phalanx runs tag runs/a good baseline
      phalanx runs note runs/a "the one for the paper"
      phalanx runs rm runs/b
    """


for _subcommand in (list_command, show_command, compare_command, tag_command, note_command, remove_command):
    command.add_command(_subcommand)
