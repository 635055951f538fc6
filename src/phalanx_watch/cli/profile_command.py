"""``phalanx profile``: record and analyze the next steps of a running run, and print the verdict in a sentence, with the tables behind it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from phalanx.cli.errors import demand_folder, explained, refuse_given
from phalanx.cli.output import moment, text_console
from phalanx.command import Argument, AsJson, Option, command_options
from phalanx.command_help import Command
from phalanx.observe.profile_request import MOST_STEPS
from phalanx.observe.throughput import format_bytes
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.run.fields import ValueRange
from phalanx_watch.profile.partition import duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from phalanx.run.directory.paths import RunDirectory
    from phalanx_watch.profile.read import ProfileSummary


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    run_dir: Annotated[Path, Argument()]
    steps: Annotated[int, ValueRange(at_least=1, at_most=MOST_STEPS)] = 2
    """Record so many steps."""
    ranks: str = "auto"
    """auto (one for each place in the mesh, and the slowest known; all of up to 8), all, or numbers: 0,3."""
    wait_s: Annotated[float, ValueRange(at_least=1, at_most=3600), Option("--wait")] = 60
    """Seconds within which the run must receive the request."""
    show: Annotated[str | None, Option(metavar="[NAME]", is_flag=False, flag_value="")] = None
    """Record nothing: list the recorded profiles, or show one."""
    cluster: str | None = None
    """The cluster of the plan; by default this one (phalanx calibrate), or cpu."""
    as_json: AsJson = False
    """Print the summary as one JSON object."""


@click.command("profile", cls=Command)
@command_options(ProfileOptions)
def command(options: ProfileOptions) -> None:
    """Record the next steps of the run in RUN_DIR, which must be training, and print where their time goes: compute, waits
    between ranks, comparison with the plan, and possible gains. Training continues, with the same bits.

    \b
      phalanx profile runs/quickstart-1f3a9c04
      phalanx profile runs/big-1f3a9c04 --steps 4 --ranks 0,17
      phalanx profile runs/quickstart-1f3a9c04 --show
    """
    show, cluster = options.show, options.cluster
    if show is not None:
        refuse_given(("steps", "ranks", "wait_s"), "--show records nothing")
    if show == "":
        refuse_given(
            ("cluster",), "is for one profile: --show NAME --cluster CLUSTER compares it with that plan"
        )
    demand_folder(options.run_dir)
    from phalanx_watch.profile.read import ProfileError, make_summary, profiles, read_summary, request_profile

    directory = RunDirectory(options.run_dir)
    console, errors = text_console(), text_console(stderr=True)
    with explained(ProfileError, RunDirectoryError):
        if not directory.run_file.exists():
            raise RunDirectoryError(
                f"{options.run_dir} is no run directory: it has no {directory.run_file.name}"
            )
        if show == "":
            summaries = profiles(directory)
            if options.as_json:
                click.echo(json.dumps([vars(profile) for profile in summaries]))
            else:
                print_list(console, options.run_dir, summaries)
            return
        if show is not None:
            made_anew = cluster is not None
            summary = make_summary(directory, show, cluster) if made_anew else read_summary(directory, show)
        else:
            name = request_profile(
                *(directory, options.steps, _ranks(options.ranks), options.wait_s),
                lambda line: errors.print(line, style="dim"),
            )
            summary = make_summary(directory, name, cluster)
    if options.as_json:
        click.echo(json.dumps(summary))
    else:
        print_report(console, directory, summary)


def _ranks(text: str) -> tuple[int, ...] | str:
    """Return "auto", "all", or the ascending distinct ranks in ``text``. Raises ``click.BadParameter`` for another text."""
    if text in ("auto", "all"):
        return text
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise click.BadParameter("write auto, all, or numbers of ranks such as 0,3", param_hint="--ranks")
    return tuple(sorted({int(part) for part in parts}))


# The report.


_MOST_RANKS = 6
_LEAST_SHARE = 0.001
"""Columns below this share of a step on every rank are summed into one."""


def print_list(console: Console, run_dir: Path, summaries: Sequence[ProfileSummary]) -> None:
    """Print a table of the profiles of a run, or how to record one if there is none."""
    from rich.table import Table

    if not summaries:
        console.print(f"nothing was recorded of {run_dir} yet: phalanx profile {run_dir}")
        return
    table = Table("profile", "steps", "ranks", "a step", "verdict", box=None, pad_edge=False)
    for profile in summaries:
        last = profile.step + profile.steps - 1
        table.add_row(
            profile.name,
            f"{profile.step}-{last}",
            str(len(profile.ranks)),
            duration(profile.step_s),
            profile.verdict,
        )
    console.print(table)


def print_report(console: Console, directory: RunDirectory, summary: Mapping[str, Any]) -> None:
    """Print a profile's summary. Raises ``ProfileError`` if it is damaged or of another version."""
    from phalanx_watch.profile.read import ProfileError

    try:
        _report(console, directory, summary)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ProfileError(f"the summary was written by another version, or damaged: {error!r}") from error


def _report(console: Console, directory: RunDirectory, summary: Mapping[str, Any]) -> None:
    """Print the verdict, up to four findings, notes and tables of a summary, and the path of its trace."""
    from rich.text import Text

    step_s = float(summary["step_s"])
    verdict, *further = summary["findings"]
    console.print(f"{verdict['text'][:1].upper() + verdict['text'][1:]}.", style="bold")
    for finding in further[:4]:
        console.print(f"  also: {finding['text']}")
    for note in summary["notes"]:
        console.print(Text.assemble(("note:", "yellow"), f" {note}"))
    steps, error_s = summary["steps"], summary["clock_error_s"]
    clocks = "clocks not bound together" if error_s is None else f"clocks within {duration(error_s)}"
    when = moment(summary["asked_unix_s"] or 0)
    console.print(
        f"steps {steps[0]}-{steps[-1]}, {duration(step_s)} each while recorded; {len(summary['ranks'])} of {summary['of_ranks']} ranks; "
        f"{clocks}; {when}\n",
        style="dim",
    )
    _where(console, summary["table"], step_s)
    _who(console, summary, step_s)
    _operations(console, summary)
    _plan(console, summary["plan"])
    _memory(console, summary["memory"])
    folder = directory.profiles / summary["name"]
    console.print(
        f"all of it on a time line: {folder / 'trace.json.gz'} (open it in ui.perfetto.dev)",
        style="dim",
        soft_wrap=True,  # a path is copied, and read by programs
    )


def _where(console: Console, table: Mapping[str, Any], step_s: float) -> None:
    """Print where a step goes in ms, a column for each rank; those with the shortest waits if there are over
    ``_MOST_RANKS``.

    Rows below ``_LEAST_SHARE`` of a step on all ranks are added up.
    """
    words, rows = table["columns"], table["rows"]
    chosen = sorted(rows, key=lambda row: float(row["waited_s"]))[:_MOST_RANKS]
    chosen.sort(key=lambda row: int(row["rank"]))
    grid = _grid("where a step of each rank goes, ms", "", *(f"rank {row['rank']}" for row in chosen))
    small_columns = [0.0] * len(chosen)
    for number, word in enumerate(words):
        seconds = [float(row["seconds"][number]) for row in chosen]
        if max(seconds) < _LEAST_SHARE * step_s:
            small_columns = [before + more for before, more in zip(small_columns, seconds, strict=True)]
            continue
        grid.add_row(word.replace("communication: ", "exposed communication, "), *map(_cell, seconds))
    if any(small_columns):
        grid.add_row("the rest", *map(_cell, small_columns))
    grid.add_row("= step", *(_cell(row["step_s"]) for row in chosen), style="bold")
    grid.add_row("of it waiting for other ranks", *(_cell(row["waited_s"]) for row in chosen), style="dim")
    console.print(grid)
    if len(rows) > len(chosen):
        console.print(f"and {len(rows) - len(chosen)} ranks that wait longer (--json has all)", style="dim")
    console.print()


def _grid(title: str, *heads: str) -> Table:
    """Return a table under a title, whose first column has names and whose others have numbers."""
    from rich.table import Table

    grid = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, head in enumerate(heads):
        grid.add_column(head, justify="right" if number else "left")
    return grid


def _cell(seconds: float) -> str:
    """Format seconds as milliseconds with one digit."""
    return f"{1e3 * seconds:.1f}"


def _who(console: Console, summary: Mapping[str, Any], step_s: float) -> None:
    """Print up to six pairs of who waits for whom over 0.5 % of a step, and the five largest shares of the critical path."""
    pairs = [pair for pair in summary["waits"] if pair["seconds"] > 0.005 * step_s][:6]
    if pairs:
        console.print("who waits for whom, a step:")
        for pair in pairs:
            console.print(
                f"  rank {pair['waiting']} waits {duration(pair['seconds'])} for rank {pair['late']}"
            )
    parts = sorted(
        (
            (seconds, rank, word)
            for rank, words in summary["critical_path"].items()
            for word, seconds in words.items()
        ),
        reverse=True,
    )
    total = sum(part[0] for part in parts)
    if total:
        parts_text = ", ".join(
            f"{seconds / total:.0%} {word} on rank {rank}" for seconds, rank, word in parts[:5]
        )
        console.print(f"what decided the length of a step (the critical path): {parts_text}")
    console.print()


def _operations(console: Console, summary: Mapping[str, Any]) -> None:
    """Print operations by kind for a mean rank (ms, calls, GFLOP/s, GB/s, roofline), and the five longest layers."""
    ranks = max(len(summary["ranks"]), 1)
    heads = ("kind", "ms", "calls", "GFLOP/s", "GB/s", "of the roofline")
    table = _grid("operations, a step of one rank", *heads)
    for row in summary["operations"]:
        roof = "" if row["roofline"] is None else f"{row['roofline']:.0%}"
        rates = [f"{row[name] / 1e9:.1f}" if row[name] else "" for name in ("flops_per_s", "bytes_per_s")]
        table.add_row(
            row["kind"], f"{1e3 * row['seconds'] / ranks:.1f}", f"{row['calls'] / ranks:.0f}", *rates, roof
        )
    console.print(table)
    layers = sorted(summary["layers"], key=lambda row: -row["forward_s"] - row["backward_s"])[:5]
    layers_text = ", ".join(
        f"{row['layer']} {duration(row['forward_s'])} + {duration(row['backward_s'])}" for row in layers
    )
    console.print(f"longest layers, forward + backward: {layers_text}\n")


def _plan(console: Console, plan: Mapping[str, Any]) -> None:
    """Print planned and measured milliseconds by term, and what would pay most; nothing without a plan."""
    if plan["step_s"] is None:
        return
    title = f"the plan's step on {plan['cluster']} against the measured one, ms"
    table = _grid(title, "term", "plan", "measured", "more")
    rows = [(row["term"], row["predicted_s"], row["measured_s"]) for row in plan["terms"]]
    rows.append(("step", plan["step_s"], sum(row[2] for row in rows)))
    for term, planned, measured in rows:
        table.add_row(
            term, f"{1e3 * planned:.1f}", f"{1e3 * measured:.1f}", f"{1e3 * (measured - planned):+.1f}"
        )
    console.print(table)
    if plan["would_pay"]:
        console.print("what would pay most:")
    for line in plan["would_pay"]:
        console.print(f"  {line}")
    console.print()


def _memory(console: Console, lines: Sequence[Mapping[str, Any]]) -> None:
    """Print the memory at the peak of the rank with most; nothing without measurements."""
    if not lines:
        return
    line = max(lines, key=lambda entry: int(entry["peak_bytes"]))
    resident = ", ".join(f"{format_bytes(size)} {kind}" for kind, size in line["held_bytes"].items() if size)
    live = ", ".join(
        f"{format_bytes(entry['bytes'])} {entry['kind']}{' of ' + entry['layer'] if entry['layer'] else ''} ({entry['made_by']})"
        for entry in line["at_peak"][:4]
    )
    console.print(
        f"memory: {format_bytes(line['peak_bytes'])} at the peak, on rank {line['rank']}, {duration(line['peak_s'])} after the first step began: {resident}; {live}\n"
    )
