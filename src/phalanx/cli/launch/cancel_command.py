"""``phalanx cancel``: ends a submitted run, saved if it trains."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from phalanx.cli.errors import demand_folder, explained, full_disk, refuse_unused
from phalanx.command_help import Command

if TYPE_CHECKING:
    from phalanx.launch.engines.engine import SubmittedRun
    from phalanx.launch.engines.submission import Submitted

_POLL_S = 1.0


@click.command("cancel", cls=Command)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--now", is_flag=True, help="End it at once: what is not saved is lost.")
@click.option("--no-wait", is_flag=True, help="Do not wait until it has ended.")
@click.option(
    "--on",
    "engine",
    type=click.Choice(["kubernetes"]),
    help="RUN_DIR is the name of a job there, as phalanx submit has printed it.",
)
@click.option("--namespace", default="", help="With --on kubernetes: not that of kubectl's context.")
def command(run_dir: Path, now: bool, no_wait: bool, engine: str | None, namespace: str) -> None:
    """Cancel the job of the run in RUN_DIR: one that trains saves first; it is not queued again.

    The run can be submitted again later to continue. A submission that is in progress does not start the run.

    \b
      phalanx cancel runs/big-1f3a9c04
      phalanx cancel runs/big-1f3a9c04 --now
      phalanx cancel big-1f3a9c04 --on kubernetes
    """
    from phalanx.launch.engines.engine import prevent_restart, submission_of, wait_until_ended
    from phalanx.launch.engines.order import EngineError
    from phalanx.launch.engines.submission import read_record, submitter_of, wait_for_submitter

    if engine is not None:
        from phalanx.cli.launch.on_kubernetes import cancel_job

        with explained(EngineError):
            cancel_job(str(run_dir), namespace, now=now, wait=not no_wait)
        return
    refuse_unused(["--namespace"] * bool(namespace), "is for --on kubernetes")
    demand_folder(run_dir)
    with explained(EngineError):
        submitter = submitter_of(run_dir)
        if not submitter and submission_of(run_dir) is None:
            raise EngineError(
                f"{run_dir} holds no run that phalanx submit has started; `phalanx runs --on slurm` lists them"
            )
        unnoted = prevent_restart(run_dir, at_once=now)
        # Recorded first: a submission that misses the record has already published what it starts.
        submitter = wait_for_submitter(run_dir, partial(click.echo, err=True)) or submitter
        run = None if submitter and read_record(run_dir) is None else submission_of(run_dir)
        if run is None:
            click.echo(f"{submitter} has started nothing: the run is cancelled")
            return
        # Recorded again if a submission has begun or a job has started since: both clear earlier records.
        if (unnoted or submitter) and (unnoted := prevent_restart(run_dir, at_once=now)):
            click.echo(unnoted, err=True)
        run.cancel_joining(waiting_only=True)  # They would get nodes for a run that ends.
        job = run.standing()
        if job is None:
            click.echo(
                f"nothing that {submitter} started is running: the run is cancelled"
                if submitter
                else f"{run.title} has ended already"
            )
            run.cancel_joining()
            _give_back(run_dir, run.made)
            return
        if now or job.is_waiting:
            run.end_now()
        else:
            _request_stop(run)
            click.echo(f"{run.title} saves and ends (phalanx cancel --now ends it at once)")
            if full := full_disk(run_dir):
                click.echo(full, err=True)
        if not no_wait:
            wait_until_ended(run, _POLL_S)
            run.cancel_joining()
        if not no_wait or job.is_waiting:
            _give_back(run_dir, run.made)
    click.echo(f"{run.title} is cancelled" if not no_wait else f"{run.title} gets a request to end")


def _give_back(run_dir: Path, made: Submitted) -> None:
    """Let the run that has lent nodes to this one get as many again, if the job's own script has not done so.

    Prints the outcome; a failure is not raised.
    """
    from phalanx.cli.fleet.fleet_command import request_nodes
    from phalanx.launch.engines.order import FOLDER, EngineError
    from phalanx.launch.engines.slurm_script import RETURNED

    if not made.taken_from:
        return
    lender = Path(made.taken_from)
    try:
        (run_dir / FOLDER / RETURNED).mkdir()
        job = request_nodes(lender, made.taken)
    except FileExistsError:
        return
    except (EngineError, click.ClickException, OSError) as error:  # The folder's disk may be full.
        message = error.message if isinstance(error, click.ClickException) else str(error)
        again = f"phalanx fleet grow {quote(str(lender))} --by {made.taken} repeats the request"
        click.echo(f"{lender} does not take its {made.taken} nodes again: {message}; {again}", err=True)
        return
    click.echo(f"{lender} takes {made.taken} nodes again: job {job}")


def _request_stop(run: SubmittedRun) -> None:
    """Have a run save and end: by its engine, or by the coordinator of its fleet.

    Repeated requests only save.
    """
    from phalanx.cli.fleet.fleet_command import send_request
    from phalanx.cli.launch.formed_fleet import formed_fleet
    from phalanx.fleet.core.messages import StopRun

    fleet = formed_fleet(run)
    fleet = None if fleet is None or fleet.over else fleet
    if fleet is not None and fleet.stopping:
        return
    if not run.request_stop(None if fleet is None else fleet.reign) and fleet is not None:
        send_request(run.run_dir, StopRun(never_at_once=True), None)
