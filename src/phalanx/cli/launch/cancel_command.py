"""``phalanx cancel``: ends a submitted run, saved if it trains."""

from __future__ import annotations

import time
from pathlib import Path

import click

from phalanx.cli.errors import explained

_POLL_S = 1.0


@click.command("cancel")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--now", is_flag=True, help="End it at once: what is not saved is lost.")
@click.option("--no-wait", is_flag=True, help="Ask, and do not wait until it has ended.")
def command(run_dir: Path, now: bool, no_wait: bool) -> None:
    """Cancel the job of the run in RUN_DIR: one that trains saves first; it is not queued again.

    The run can be submitted again later and goes on from there.

    \b
      phalanx cancel runs/big-1f3a9c04
      phalanx cancel runs/big-1f3a9c04 --now
    """
    from phalanx.launch.engines import slurm
    from phalanx.launch.engines.submission import mark_stopped, read_record
    from phalanx.launch.engines.tools import EngineError, run_tool

    with explained(EngineError):
        made = read_record(run_dir)
        if made is None:
            raise EngineError(
                f"{run_dir} holds no run that phalanx submit has started; `phalanx runs --on slurm` lists them"
            )
        mark_stopped(run_dir)
        job = slurm.job_of(run_dir)
        if job is None:
            click.echo(f"job {made.job} has ended already")
            return
        if now or job.state == "PENDING":
            slurm.cancel(job.id)
        else:
            run_tool(["scancel", "--batch", "--signal=TERM", job.id])
            click.echo(f"job {job.id} saves and ends (phalanx cancel --now ends it at once)")
        while not no_wait and slurm.job_of(run_dir) is not None:
            time.sleep(_POLL_S)
    click.echo(f"job {job.id} is cancelled" if not no_wait else f"job {job.id} is asked to end")
