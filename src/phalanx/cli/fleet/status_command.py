"""``phalanx status``: who is a member of a run's fleet, who a spare, and what happened when."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from phalanx.cli.errors import explained, refuse_unused
from phalanx.cli.fleet.run_summary import RunSummary, summarize
from phalanx.cli.numbers import moment
from phalanx.cli.run_folder import demand_folder, full_disk
from phalanx.cli.text_console import text_console
from phalanx.fleet.control.fleet_file import FleetFile, FleetFileError, path_in, read_fleet_file
from phalanx.observe.event_log import EventLogError, newest_event
from phalanx.observe.events import Step
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.directory.regular_file import read_small

if TYPE_CHECKING:
    from rich.text import Text

_STALE_S = 10.0
_WORTH_A_LINE = 0.01


@click.command("status")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--last", type=click.IntRange(min=0), default=10, show_default=True, help="Show so many happenings."
)
@click.option(
    "--on",
    "engine",
    type=click.Choice(["kubernetes"]),
    help="RUN_DIR is the name of a job there, as phalanx submit has printed it.",
)
@click.option("--namespace", default="", help="With --on kubernetes: not that of kubectl's context.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: fleet.json as it is.")
def command(run_dir: Path, last: int, engine: str | None, namespace: str, as_json: bool) -> None:
    """Show how far the run in RUN_DIR is, which run it goes on from, and its fleet if it has one: members, spares, epoch,
    pace, and what happened when.

    \b
      phalanx status runs/quickstart-1f3a9c04
      phalanx status runs/quickstart-1f3a9c04 --json
      phalanx status big-1f3a9c04 --on kubernetes
    """
    if engine is not None:
        from phalanx.cli.launch.on_kubernetes import tell_status
        from phalanx.launch.engines.order import EngineError

        with explained(EngineError):
            tell_status(str(run_dir), namespace, last, as_json=as_json)
        return
    refuse_unused(["--namespace"] * bool(namespace), "is for --on kubernetes")
    demand_folder(run_dir)
    job = None if as_json else _job_line(run_dir)
    if job is not None:
        click.echo(job)
        if not RunDirectory(run_dir).run_file.exists():
            return
    with explained(FleetFileError, RunDirectoryError):
        summary = summarize(run_dir) if RunDirectory(run_dir).run_file.exists() else None
        # Of a run without a fleet there is no fleet's JSON, which reading it explains.
        fleet = as_json or summary is None or path_in(run_dir).exists()
        seen = read_fleet_file(run_dir) if fleet else None
    if as_json:
        click.echo(msgspec.json.encode(seen).decode())
        return
    if summary is not None:
        click.echo(f"{summary.name}: {_progress(summary, RunDirectory(run_dir))}")
        for origin in summary.lineage:
            click.echo(f"  goes on from {origin}")
        if summary.store:
            click.echo(f"  {summary.store}")
        if (line := _data_bound(RunDirectory(run_dir))) is not None:
            click.echo(line)
    if seen is not None:
        if not seen.over and (full := full_disk(run_dir)):
            click.echo(f"  {full}")
        _print(seen, last)


def _progress(summary: RunSummary, directory: RunDirectory) -> str:
    """How far the run is: the newest logged step, if it is not finished, and what is saved of it."""
    events = directory.events
    newest = newest_event(events, lambda event: isinstance(event.body, Step)) if events.exists() else None
    if summary.finished or newest is None or not isinstance(newest.body, Step):
        return summary.state
    saved = f"saved step {summary.saved_step:,}" if summary.saved_step else "no checkpoint yet"
    return f"step {newest.body.step:,} of {summary.steps:,}, {saved}"


def _job_line(run_dir: Path) -> str | None:
    """A line on the job of a submitted run: why it waits, or that it has ended; ``None`` if no engine has the run."""
    from phalanx.cli.launch.formed_fleet import leading_log
    from phalanx.launch.engines.order import EngineError
    from phalanx.launch.engines.standing import sentence, submission_of, title

    try:
        made = submission_of(run_dir)
    except EngineError as error:
        return f"whether Slurm has a job of it is not known here ({error})"
    if made is None:
        return None
    try:
        doing = sentence(run_dir, made)
    except EngineError as error:
        return f"{title(made)}: not known here ({error})"
    log = leading_log(run_dir, made)
    ended = f"ended; its log is {log}" if log.exists() else "ended without a word, or before it began"
    return f"{title(made)}: {doing or ended}{_given(run_dir)}"


def _given(run_dir: Path) -> str:
    """Lines on what the nodes cost a step that an engine gave, or that joined later; empty if nobody has said that."""
    from phalanx.launch.engines.order import FOLDER

    verdicts: dict[str, list[str]] = {}
    for path in (run_dir / FOLDER / "given", *sorted((run_dir / FOLDER).glob("given-*"))):
        try:
            lines = read_small(path).decode(errors="replace").strip().splitlines()
        except OSError:
            continue
        whose = "the nodes that it got" if path.name == "given" else f"with those of {path.name[6:]}"
        if lines:
            verdicts.setdefault(lines[-1].removeprefix("Error: "), []).append(whose)
    return "".join(f"\n  {', '.join(whose)}: {verdict}" for verdict, whose in verdicts.items())


def _data_bound(directory: RunDirectory) -> str | None:
    """A line on how much of the newest logged steps was waiting for samples, and how many come and are needed, if that is worth one."""
    events = directory.events
    newest = None
    with suppress(EventLogError):
        newest = newest_event(events, lambda event: isinstance(event.body, Step)) if events.exists() else None
    if newest is None or not isinstance(newest.body, Step) or not newest.body.logged_s:
        return None
    waiting = newest.body.data_wait_s / newest.body.logged_s
    if waiting < _WORTH_A_LINE:
        return None
    come = newest.body.tokens_per_s / read_resolved(directory).train.seq_len
    needed = f"{come / (1 - waiting):.3g}" if waiting < 1 else "more"
    return (
        f"  data-bound: {waiting:.0%} of the newest logged steps, up to {newest.body.step:,}, waited for samples: {come:.3g} sequences/s come, "
        f"and {needed} could be trained on (phalanx goodput shows all)"
    )


def _print(seen: FleetFile, last: int) -> None:
    from rich.table import Table
    from rich.text import Text

    console = text_console()
    console.print(_headline(seen))
    table = Table("node", "role", "ranks", "host", "last heard", "", box=None, pad_edge=False)
    for member in sorted(seen.members, key=lambda one: (one.ranks or (10**9,), one.name)):
        heard = (
            "over"
            if seen.over
            else f"{member.silent_s:.1f} s ago" + ("" if member.attached else ", not attached")
        )
        table.add_row(member.name, member.role, _ranks(member.ranks), member.host, heard, member.why)
    console.print(table)
    for one in seen.happenings[len(seen.happenings) - last :] if last else ():
        when = (moment(one.unix_s), "dim")
        console.print(Text.assemble(when, f"  epoch {one.epoch}  {one.node}  {one.what}"))
    if seen.refused:
        refused = ", ".join(f"{kind}: {count}" for kind, count in seen.refused.items())
        console.print(Text.assemble(("refused", "yellow"), f" {refused}"))


def _headline(seen: FleetFile) -> Text:
    from rich.text import Text

    # By the last heartbeats, which a run that is over has outlived.
    pace = f", {seen.step_s:.3g} s a step" if seen.step_s and not seen.over else ""
    step = f", step {seen.step}" if seen.step >= 0 and not seen.over else ""
    line = f" epoch {seen.epoch}, {seen.ranks} ranks{step}{pace}; {seen.recoveries} {'recovery' if seen.recoveries == 1 else 'recoveries'}"
    if seen.reason:
        line += f"; {seen.reason}" if seen.over else f" (last: {seen.reason})"
    if seen.reign > 1:
        line += (
            f"\nled by {seen.leader}, reign {seen.reign}: the coordinator that the run began with was lost"
        )
    age_s = time.time() - seen.written_unix_s
    stale = (
        f"\nas of {age_s:.0f} s ago: the coordinator at {seen.coordinator} does not answer or is gone"
        if not seen.over and age_s > _STALE_S
        else ""
    )
    return Text.assemble((str(seen.phase), "bold"), line, (stale, "yellow"))


def _ranks(ranks: tuple[int, ...]) -> str:
    return "" if not ranks else str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
