"""``phalanx watch``, ``goodput``, ``ranks``, ``ui`` and ``sinks``: a run in the terminal, where its time went, its ranks side by side; a page
over all runs; and what a run's trackers missed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import click
import numpy as np
from numpy.typing import NDArray

from phalanx.cli.errors import HostName, demand_folder, explained, refuse_given
from phalanx.cli.output import text_console
from phalanx.command import Argument, AsJson, Option, PluginName, command_options
from phalanx.command_help import Command, CommandGroup
from phalanx.observe.display.terminal import show_events
from phalanx.observe.event_log import EventLogError, follow, read_events
from phalanx.observe.goodput import format_goodput, goodput
from phalanx.observe.rank_stream import RANK_COLUMNS, HeatMap, RankStream, RankStreamError
from phalanx.observe.sink_registry import SinkError, fill_sink
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.fields import POSITIVE, ValueRange
from phalanx.run.layout import Layout, rank_place
from phalanx.train.start.open_run import take_lock
from phalanx_watch import ranks as comparison


@click.command("watch", cls=Command)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Show what there is and end, instead of following the run.")
def watch_command(run_dir: Path, once: bool) -> None:
    """Show the progress of the run in RUN_DIR, live or afterwards. Ctrl-C ends the display, never the run.

    \b
      phalanx watch runs/quickstart-1f3a9c04
    """
    demand_folder(run_dir)
    directory, console = RunDirectory(run_dir), text_console()
    with explained(EventLogError):
        events = follow(directory.events, lambda: once or directory.result.exists())
        show_events(events, console, live=console.is_terminal)


_MEANING = {
    "compute_s": ("own computing of a slot", "ms", 1e-3),
    "data_wait_s": ("waiting for samples, a step", "ms", 1e-3),
    "memory_bytes": ("memory", "GiB", 2.0**30),
    "temperature_c": ("temperature", "C", 1.0),
}
"""Title, unit and scale of each column."""
_ROWS = 10
_MOST_SLOW = 1000
_MAP_ROWS = 24


@dataclass(frozen=True, kw_only=True)
class RanksOptions:
    run_dir: Annotated[Path, Argument()]
    slow: bool = False
    """Only the ranks that are slower than their peers in most windows."""
    column: Annotated[str, click.Choice(RANK_COLUMNS), Option(text="What is compared.")] = "compute_s"
    last: Annotated[int, POSITIVE] = 20
    """Look at so many windows, the newest."""
    attempt: Annotated[int | None, ValueRange(at_least=0)] = None
    """Look at this attempt, not at the newest one."""
    as_json: AsJson = False
    """Print one JSON object; seconds, bytes and degrees Celsius."""


@click.command("ranks", cls=Command)
@command_options(RanksOptions)
def ranks_command(options: RanksOptions) -> None:
    """Show which ranks of the run in RUN_DIR are slower than their peers, and by how much.

    Each rank is listed with its place in the mesh and its node, above a map of all ranks over time.
    A rank is compared with those of its pipeline stage. It is slow if it was slower by 5 % in most windows, and by four standard deviations of
    its peers over all of them: the thresholds by which a fleet replaces stragglers.

    \b
      phalanx ranks runs/quickstart-1f3a9c04
      phalanx ranks runs/quickstart-1f3a9c04 --slow
      phalanx ranks runs/quickstart-1f3a9c04 --column memory_bytes --last 100
    """
    demand_folder(options.run_dir)
    directory, column = RunDirectory(options.run_dir), options.column
    with (
        explained(RankStreamError, RunDirectoryError, EventLogError),
        RankStream(directory.ranks) as stream,
    ):
        windows = comparison.newest_windows(stream, options.last, options.attempt)
        if not windows:
            scope = "" if options.attempt is None else f" of attempt {options.attempt}"
            raise RunDirectoryError(
                f"{directory.ranks} has no numbers{scope} yet: ranks write there every observe.ranks_every_steps steps, and never if that is 0"
            )
        head = stream.head(windows[-1])
        layout = comparison.layout_of_attempt(directory, head.attempt, head.ranks)
        values, most = comparison.values_of(stream, column, windows), _MOST_SLOW if options.slow else _ROWS
        slow_ranks = comparison.slowest(column, values, layout, most)
        slow_ranks = [rank for rank in slow_ranks if rank.slow or not options.slow]
        newest = head.attempt == stream.head(-1).attempt
        nodes = comparison.nodes_of_ranks(directory, head.ranks) if newest else {}
        if options.as_json:
            click.echo(json.dumps(_as_json(stream, column, windows, layout, slow_ranks, nodes)))
            return
        click.echo(_headline(stream, column, windows))
        _print_table(column, layout, slow_ranks, nodes)
        if not options.slow:
            _print_map(stream, column, windows)


def _headline(stream: RankStream, column: str, windows: range) -> str:
    """Describe a column's windows: meaning, ranks, steps and attempt."""
    first, last = stream.head(windows[0]), stream.head(windows[-1])
    meaning, _, _ = _MEANING[column]
    ranks = f"{last.ranks:,} rank{'s' * (last.ranks > 1)}"
    return f"{meaning} ({column}): {ranks}, steps {first.step - first.steps + 1:,} to {last.step:,} of attempt {last.attempt}, in {len(windows)} window{'s' * (len(windows) > 1)}"


def _print_table(
    column: str, layout: Layout, latenesses: Sequence[comparison.RankLateness], nodes: dict[int, str]
) -> None:
    """Print a table of ``latenesses``: each rank beside its peers, with its place in the mesh. Without any, print
    that no rank is slow.

    Ranks whose ``slow`` is true are marked: "slow" by computing time, "stands out" by other columns. ``nodes`` maps ranks to nodes;
    empty leaves the column out.
    """
    from rich.table import Table
    from rich.text import Text

    console = text_console()
    if not latenesses:
        console.print("no rank is slow" if column == "compute_s" else "no rank stands out")
        return
    _, unit, scale = _MEANING[column]
    axes = [axis for axis, degree in {**layout.degrees, "expert": layout.expert}.items() if degree > 1]
    table = Table("rank", *(["node"] if nodes else []), *axes, box=None, pad_edge=False)
    for title in (unit, "peers", "more", "deviations", "windows"):
        table.add_column(title, justify="right")
    table.add_column("")
    for lateness in latenesses:
        place = rank_place(layout, lateness.rank)
        table.add_row(
            str(lateness.rank),
            *([nodes.get(lateness.rank, "")] if nodes else []),
            *(str(place[axis]) for axis in axes),
            *(f"{value / scale:.4g}" for value in (lateness.value, lateness.typical)),
            f"{lateness.slowdown:+.1%}",
            f"{lateness.deviations:.1f}",
            f"{lateness.slower} of {lateness.windows}",
            Text("slow", style="bold yellow")
            if lateness.slow and column == "compute_s"
            else "stands out"
            if lateness.slow
            else "",
        )
    console.print(table)


def _print_map(stream: RankStream, column: str, windows: range) -> None:
    """Print a heat map of the windows, as wide as the terminal."""
    width = max(20, shutil.get_terminal_size().columns - 16)
    steps = stream.steps[windows.start : windows.stop]
    picture = stream.heat_map(column, int(steps.min()), int(steps.max()), width, _MAP_ROWS)
    click.echo()
    for line in text_map(picture, _MEANING[column][2], width):
        click.echo(line)


def _as_json(
    stream: RankStream,
    column: str,
    windows: range,
    layout: Layout,
    latenesses: Sequence[comparison.RankLateness],
    nodes: dict[int, str],
) -> dict[str, object]:
    """Return the windows and the ranks of ``latenesses`` for JSON, with node (empty if unknown) and place in the mesh."""
    first, last = stream.head(windows[0]), stream.head(windows[-1])
    return {
        "column": column,
        "attempt": last.attempt,
        "ranks": last.ranks,
        "first_step": first.step - first.steps + 1,
        "last_step": last.step,
        "windows": len(windows),
        "found": [
            {
                **asdict(lateness),
                "node": nodes.get(lateness.rank, ""),
                "place": rank_place(layout, lateness.rank),
            }
            for lateness in latenesses
        ],
    }


# Heat map of ranks in plain text: one line for each group of ranks, time to the right, a taller bar for a larger number.


_BARS = "▁▂▃▄▅▆▇█"
_UNKNOWN = "·"
_MOST_WIDE = 4
"""Characters of one bar, where there are few."""
_LEAST_RANGE = 0.1
"""Smallest drawn range, as a fraction of the median, so that noise does not look like a difference."""


def text_map(picture: HeatMap, unit: float, width: int) -> Iterator[str]:
    """Yield the lines of ``picture``: the legend, a row of bars for each group of ranks, and the steps.

    At most ``width`` wide if possible; numbers are divided by ``unit``. One line if nothing is known.
    """
    values_seen = picture.values[~np.isnan(picture.values)]
    if not values_seen.size:
        yield "nothing is known"
        return
    low, high = _range(values_seen)
    yield f"{_BARS[0]} {low / unit:.3g}   {_BARS[-1]} {high / unit:.3g}   {_UNKNOWN} not known"
    labels = [_label(picture, row) for row in range(len(picture.row_ranks))]
    margin, columns = max(map(len, labels)), len(picture.column_steps)
    wide = max(1, min(_MOST_WIDE, width // columns))
    for label, values in zip(labels, picture.values, strict=True):
        yield f"{label:>{margin}} {''.join(wide * _bar(value, low, high) for value in values.tolist())}"
    first, last = (f"{picture.column_steps[end]:,}" for end in (0, -1))
    padding = wide * columns - len(last)
    yield f"{'step':>{margin}} {first if padding > len(first) else '':<{max(0, padding)}}{last}"


def _range(numbers: NDArray[np.float32]) -> tuple[float, float]:
    """Return the least and largest number, at least ``_LEAST_RANGE`` of the median apart."""
    low, middle, high = (float(np.quantile(numbers, share)) for share in (0.0, 0.5, 1.0))
    return low, max(high, low + _LEAST_RANGE * middle)


def _label(picture: HeatMap, row: int) -> str:
    """Return the ranks of a row of the heat map, as in ``0-7``."""
    first = int(picture.row_ranks[row])
    after = int(picture.row_ranks[row + 1]) if row + 1 < len(picture.row_ranks) else picture.ranks
    return f"{first}" if after == first + 1 else f"{first}-{after - 1}"


def _bar(value: float, low: float, high: float) -> str:
    """Return the block that shows a value between ``low`` and ``high``; ``_UNKNOWN`` for NaN."""
    if np.isnan(value):
        return _UNKNOWN
    share = (value - low) / (high - low) if high > low else 0.0
    return _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]


@click.command("goodput", cls=Command)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; times in nanoseconds.")
def goodput_command(run_dir: Path, as_json: bool) -> None:
    """Show where the time of the run in RUN_DIR went, over all its attempts. The buckets sum to wall time.

    \b
      phalanx goodput runs/quickstart-1f3a9c04
    """
    demand_folder(run_dir)
    with explained(EventLogError):
        result = goodput(read_events(RunDirectory(run_dir).events))
    if as_json:
        click.echo(
            json.dumps({**dataclasses.asdict(result), "goodput": result.goodput, "held_ns": result.total_ns})
        )
    else:
        click.echo(format_goodput(result))


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
def ui_command(options: UiOptions) -> None:
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

    if options.export is not None:
        refuse_given(("host", "port", "token", "open_page"), "--export writes a file, and starts no server")
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


@click.group("sinks", cls=CommandGroup)
def sinks_command() -> None:
    """Experiment trackers of a run: send missing events.

    \b
      phalanx sinks fill runs/quickstart-1f3a9c04
    """


@sinks_command.command("fill")
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
        ).observe.sinks  # raises for a folder that is no run, and changes nothing
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
