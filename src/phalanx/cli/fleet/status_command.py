"""``phalanx status``: a run's progress, the members and spares of its fleet, and the incidents so far."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from phalanx.checkpoint.tiers.store_standing import store_standing
from phalanx.cli.errors import demand_folder, explained, full_disk, refuse_unused
from phalanx.cli.launch.submit import leading_log, print_status
from phalanx.cli.output import moment, text_console
from phalanx.command_help import Command
from phalanx.fleet.control.fleet_file import FleetFile, FleetFileError, path_in, read_fleet_file
from phalanx.launch.engines.engine import submission_of
from phalanx.launch.engines.order import FOLDER, EngineError
from phalanx.observe.event_log import EventLogError, newest_event
from phalanx.observe.events import Step
from phalanx.run.directory.files import read_small
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved, read_small_json
from phalanx.run.identity import Origin, read_lineage, recorded_steps

if TYPE_CHECKING:
    from rich.text import Text


# Summary of a run directory in one line: steps, losses, and the run that it continues.


@dataclass(frozen=True)
class RunSummary:
    """A run directory, as ``phalanx runs`` lists it."""

    path: str
    name: str
    steps: int
    """Steps after which the run is complete."""
    saved_step: int
    """Step of the newest checkpoint; 0 if there is none."""
    finished: bool
    loss: float | None
    """Training loss of the last step, in nats a token, once the run is complete."""
    held_out_loss: float | None
    weights_sha256: str
    """Hash of the final weights; empty while the run is not complete."""
    lineage: tuple[Origin, ...]
    """The checkpoints that the run descends from, the oldest first."""
    store: str = ""
    """State of the copies in the run's store; empty if it has none."""

    @property
    def state(self) -> str:
        """The run's progress, for people: finished, the saved step, or nothing saved yet."""
        if self.finished:
            return "finished"
        return (
            f"saved step {self.saved_step} of {self.steps}"
            if self.saved_step
            else f"nothing saved yet of {self.steps} steps"
        )

    def to_json(self) -> dict[str, object]:
        """Return the fields as a JSON object."""
        return asdict(self)


def summarize(path: Path) -> RunSummary:
    """Return the summary of the run in the directory ``path``.

    Raises ``RunDirectoryError`` if there is none, and ``OSError``.
    """
    directory = RunDirectory(path)
    spec, result = read_resolved(directory), directory.finished_result()
    record, standing = read_small_json(directory.record), store_standing(spec, directory)
    return RunSummary(
        path=str(path),
        name=spec.name,
        steps=recorded_steps(record) or spec.train.steps,
        saved_step=max(directory.committed_steps(), default=0),
        finished=result is not None,
        loss=result.loss if result else None,
        held_out_loss=result.held_out_loss if result else None,
        weights_sha256=result.weights_sha256 if result else "",
        lineage=tuple(read_lineage(record)),
        store="" if standing is None else str(standing),
    )


_STALE_S = 10.0
_WORTH_A_LINE = 0.01


@click.command("status", cls=Command)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--last", type=click.IntRange(min=0), default=10, show_default=True, help="Number of incidents to show."
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
    """Show the progress of the run in RUN_DIR, the run that it continues, and its fleet if it has one:
    members, spares, epoch, pace, and incidents.

    \b
      phalanx status runs/quickstart-1f3a9c04
      phalanx status runs/quickstart-1f3a9c04 --json
      phalanx status big-1f3a9c04 --on kubernetes
    """
    if engine is not None:
        with explained(EngineError):
            print_status(str(run_dir), namespace, last, as_json=as_json)
        return
    refuse_unused(["--namespace"] * bool(namespace), "is for --on kubernetes")
    demand_folder(run_dir)
    job = None if as_json else _job_line(run_dir)
    if job is not None:
        click.echo(job)
        if not RunDirectory(run_dir).run_file.exists():
            return
    with explained(EventLogError, FleetFileError, RunDirectoryError):
        summary = summarize(run_dir) if RunDirectory(run_dir).run_file.exists() else None
        # A run without a fleet has no fleet.json; reading it raises the error that explains this.
        has_fleet = as_json or summary is None or path_in(run_dir).exists()
        fleet = read_fleet_file(run_dir) if has_fleet else None
        if as_json:
            click.echo(msgspec.json.encode(fleet).decode())
            return
        if summary is not None:
            click.echo(f"{summary.name}: {_progress(summary, RunDirectory(run_dir))}")
            for origin in summary.lineage:
                click.echo(f"  continues from {origin}")
            if summary.store:
                click.echo(f"  {summary.store}")
            if (line := _data_bound(RunDirectory(run_dir))) is not None:
                click.echo(line)
    if fleet is not None:
        if not fleet.over and (full := full_disk(run_dir)):
            click.echo(f"  {full}")
        _print(fleet, last)


def _progress(summary: RunSummary, directory: RunDirectory) -> str:
    """Return the run's progress: newest logged step and newest saved step; the summary's state if it is finished
    or logged none.

    Raises ``EventLogError`` if the events cannot be read.
    """
    events = directory.events
    newest = newest_event(events, lambda event: isinstance(event.body, Step)) if events.exists() else None
    if summary.finished or newest is None or not isinstance(newest.body, Step):
        return summary.state
    saved = f"saved step {summary.saved_step:,}" if summary.saved_step else "no checkpoint yet"
    return f"step {newest.body.step:,} of {summary.steps:,}, {saved}"


def _job_line(run_dir: Path) -> str | None:
    """Return a line on the job of a submitted run: its state, or that it has ended, with its log. The verdict on
    its nodes follows, if there is one.

    ``None`` if no engine has the run; a line that it is not known if the engine does not answer.
    """
    try:
        run = submission_of(run_dir)
    except EngineError as error:
        return f"whether a job of it is queued is not known here ({error})"
    if run is None:
        return None
    try:
        job = run.standing()
    except EngineError as error:
        return f"{run.title}: not known here ({error})"
    log = leading_log(run)
    ended = f"ended; its log is {log}" if log.exists() else "ended without output, or before it began"
    return f"{run.title}: {ended if job is None else job.doing}{_placement_lines(run_dir)}"


def _placement_lines(run_dir: Path) -> str:
    """Return the verdicts on the step cost of nodes that an engine gave or that joined, a line each, which begin
    with a newline.

    Nodes with the same verdict share a line. Empty if none is recorded.
    """
    verdicts: dict[str, list[str]] = {}
    for path in (run_dir / FOLDER / "given", *sorted((run_dir / FOLDER).glob("given-*"))):
        try:
            lines = read_small(path).decode(errors="replace").strip().splitlines()
        except OSError:
            continue
        nodes = "the nodes that it got" if path.name == "given" else f"with those of {path.name[6:]}"
        if lines:
            verdicts.setdefault(lines[-1].removeprefix("Error: "), []).append(nodes)
    return "".join(f"\n  {', '.join(nodes)}: {verdict}" for verdict, nodes in verdicts.items())


def _data_bound(directory: RunDirectory) -> str | None:
    """Return a line on the share of the newest logged steps that was spent waiting for samples, with the actual
    and needed rate in sequences a second.

    None if it is below 1 %, or no step is logged. Raises ``RunDirectoryError`` if the run file cannot be read.
    """
    events = directory.events
    newest = None
    with suppress(EventLogError):
        newest = newest_event(events, lambda event: isinstance(event.body, Step)) if events.exists() else None
    if newest is None or not isinstance(newest.body, Step) or not newest.body.logged_s:
        return None
    waiting = newest.body.data_wait_s / newest.body.logged_s
    if waiting < _WORTH_A_LINE:
        return None
    rate = newest.body.tokens_per_s / read_resolved(directory).train.seq_len
    needed = f"{rate / (1 - waiting):.3g}" if waiting < 1 else "more"
    return (
        f"  data-bound: {waiting:.0%} of the newest logged steps, up to {newest.body.step:,}, waited for samples: {rate:.3g} sequences/s come, "
        f"and {needed} could be trained on (phalanx goodput shows all)"
    )


def _print(fleet: FleetFile, last: int) -> None:
    """Print the fleet's state, a table of its members by rank, its ``last`` incidents (0: none), and counts of
    refused messages.
    """
    from rich.table import Table
    from rich.text import Text

    console = text_console()
    console.print(_headline(fleet))
    table = Table("node", "role", "ranks", "host", "last heartbeat", "", box=None, pad_edge=False)
    for member in sorted(fleet.members, key=lambda item: (item.ranks or (10**9,), item.name)):
        last_heartbeat = (
            "over"
            if fleet.over
            else f"{member.silent_s:.1f} s ago" + ("" if member.attached else ", not attached")
        )
        table.add_row(
            member.name, member.role, _ranks(member.ranks), member.host, last_heartbeat, member.reason
        )
    console.print(table)
    for item in fleet.happenings[len(fleet.happenings) - last :] if last else ():
        when = (moment(item.unix_s), "dim")
        console.print(Text.assemble(when, f"  epoch {item.epoch}  {item.node}  {item.text}"))
    if fleet.refused:
        refused = ", ".join(f"{kind}: {count}" for kind, count in fleet.refused.items())
        console.print(Text.assemble(("refused", "yellow"), f" {refused}"))


def _headline(fleet: FleetFile) -> Text:
    """Return the fleet's phase, epoch, ranks, step and recoveries, with a warning if its file is older than
    ``_STALE_S``.
    """
    from rich.text import Text

    # By the last heartbeats, which are outdated once the run is over.
    pace = f", {fleet.step_s:.3g} s a step" if fleet.step_s and not fleet.over else ""
    step = f", step {fleet.step}" if fleet.step >= 0 and not fleet.over else ""
    line = f" epoch {fleet.epoch}, {fleet.ranks} ranks{step}{pace}; {fleet.recoveries} {'recovery' if fleet.recoveries == 1 else 'recoveries'}"
    if fleet.reason:
        line += f"; {fleet.reason}" if fleet.over else f" (last: {fleet.reason})"
    if fleet.reign > 1:
        line += (
            f"\nled by {fleet.leader}, reign {fleet.reign}: the coordinator that the run began with was lost"
        )
    age_s = time.time() - fleet.written_unix_s
    stale = (
        f"\nas of {age_s:.0f} s ago: the coordinator at {fleet.coordinator} does not answer"
        if not fleet.over and age_s > _STALE_S
        else ""
    )
    return Text.assemble((str(fleet.phase), "bold"), line, (stale, "yellow"))


def _ranks(ranks: tuple[int, ...]) -> str:
    return "" if not ranks else str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
