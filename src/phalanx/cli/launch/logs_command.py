"""``phalanx logs``: what the processes of a run have said; of a submitted run also what its job has printed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.errors import explained, refuse_unused
from phalanx.cli.launch.log_options import LogsOptions
from phalanx.cli.run_folder import demand_folder
from phalanx.command.options import command_options, written_options

if TYPE_CHECKING:
    from phalanx.launch.engines.submission import Submitted

_POLL_S = 0.5
_ASK_S = 5.0
_OF_LINES = ("ranks", "nodes", "level", "since", "until", "grep", "attempt", "grouped", "as_json")
"""Options that choose lines, or their form."""


@click.command("logs")
@command_options(LogsOptions)
def command(options: LogsOptions) -> None:
    """Print what the processes of the run in RUN_DIR have said, merged in time: ranks, agents, coordinator, and libraries in them.

    If processes failed, the one that failed first is told from those that failed because of it.

    Of a run that phalanx submit has started, it is the job's own log that is printed, unless --lines or one of the options that choose lines
    is given. Under Slurm each line of it begins with the number of its node in the job; of a run that was started by ssh it is the log of the
    host that leads, and those of the others lie beside it.

    \b
      phalanx logs runs/quickstart-1f3a9c04 --level warning --since 10m
      phalanx logs runs/big-1f3a9c04 --rank 3 --rank 8-15 --grep nccl --follow
      phalanx logs runs/big-1f3a9c04 --level error --grouped
      phalanx logs runs/big-1f3a9c04 --job --last 0 | grep '^3:'
      phalanx logs big-1f3a9c04 --on kubernetes --index 3
    """
    from phalanx.launch.engines.order import EngineError
    from phalanx.launch.engines.submission import read_record

    run_dir, job = options.run_dir, options.job
    line_options = written_options(options, *_OF_LINES)
    if options.engine is not None:
        from phalanx.cli.launch.on_kubernetes import print_log

        refuse_unused(
            [*line_options, *written_options(options, "job")],
            "kubectl prints the log of a pod as it is: leave it out, or kubectl exec POD -- python -m phalanx logs RUN_DIR",
        )
        index, follow = options.index or 0, options.follow
        with explained(EngineError):
            code = print_log(str(run_dir), options.namespace, index=index, follow=follow, last=options.last)
        raise SystemExit(code)
    refuse_unused(written_options(options, "index", "namespace"), "is for --on kubernetes")
    demand_folder(run_dir)
    if job:
        refuse_unused(
            line_options, "chooses lines, and the log of a job is printed as it is: --lines instead of --job"
        )
    if job is None:
        job = not line_options and (run_dir / "launch").is_dir() and read_record(run_dir) is not None
    if job:
        _print_job(run_dir, options.last, follow=options.follow)
        return
    from phalanx.cli.launch.log_lines import print_lines

    try:
        print_lines(options)
    except BrokenPipeError:  # its reader has seen enough
        sys.stderr.close()


def _print_job(run_dir: Path, last: int, *, follow: bool) -> None:
    from phalanx.cli.launch.formed_fleet import leading_log
    from phalanx.launch.engines.order import EngineError
    from phalanx.launch.engines.standing import sentence, submission_of, title

    with explained(EngineError):
        made = submission_of(run_dir)
        if made is None:
            raise EngineError(
                f"{run_dir} holds no run that phalanx submit has started; leave --job out to see what its processes said"
            )
        path = leading_log(run_dir, made)
        if not path.exists():
            doing = sentence(run_dir, made)
            if doing is None:
                raise EngineError(f"{title(made)} has ended without a word: there is no {path}")
            if not follow:
                click.echo(f"{title(made)}: {doing}")
                return
        _print(path, run_dir, made, last, follow=follow)


def _print(path: Path, run_dir: Path, made: Submitted, last: int, *, follow: bool) -> None:
    from phalanx.cli.launch.formed_fleet import leading_log
    from phalanx.launch.engines.standing import sentence

    place, asked_s, ended = 0, 0.0, not follow
    first = True
    while True:
        if path.exists():
            with path.open("rb") as log:
                log.seek(place)
                text = log.read()
            place += len(text)
            lines = text.decode(errors="replace").splitlines(keepends=True)
            click.echo("".join(lines[-last:] if first and last else lines), nl=False)
            first = False
        if ended:
            return
        if (now := leading_log(run_dir, made)) != path:
            click.echo(f"{now.stem} leads from now on: {now}", err=True)
            path, place, first = now, 0, True
        if time.monotonic() - asked_s > _ASK_S:
            asked_s, ended = time.monotonic(), sentence(run_dir, made) is None
        else:
            time.sleep(_POLL_S)
