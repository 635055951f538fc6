"""``phalanx logs``: what the processes of a run have said; of a submitted run also what its job has printed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.errors import explained, refuse_unused
from phalanx.cli.run_folder import demand_folder

if TYPE_CHECKING:
    from phalanx.launch.engines.submission import Submitted

_POLL_S = 0.5
_ASK_S = 5.0
_LAST = 50


@click.command("logs")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--rank", "ranks", multiple=True, metavar="N|N-M", help="Only these ranks; may be given again.")
@click.option("--node", "nodes", multiple=True, help="Only this node; may be given again.")
@click.option(
    "--level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Only lines as serious as this, or more.",
)
@click.option("--since", metavar="AGO|TIME", help="Only later lines: 90s, 10m, 2h, 1d ago, or an ISO time.")
@click.option("--until", metavar="AGO|TIME", help="Only earlier lines.")
@click.option("--grep", metavar="REGEX", help="Only lines in which this is found, in upper or lower case.")
@click.option("--attempt", type=click.IntRange(min=0), help="Only of this start of the run.")
@click.option(
    "--grouped", is_flag=True, help="The same said by many ranks and nodes is one line with a count."
)
@click.option("--json", "as_json", is_flag=True, help="Lines of JSON, for programs.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the run is complete, or the job has ended.")
@click.option(
    "--last",
    type=click.IntRange(min=0),
    default=_LAST,
    show_default=True,
    help="Begin with so many lines; 0: all.",
)
@click.option(
    "--job/--lines",
    "job",
    default=None,
    help="What the job has printed, or the lines of its processes. By default the job's, of a submitted run for which no other option is given.",
)
@click.option(
    "--on",
    "engine",
    type=click.Choice(["kubernetes"]),
    help="RUN_DIR is the name of a job there, as phalanx submit has printed it.",
)
@click.option("--namespace", default="", help="With --on kubernetes: not that of kubectl's context.")
@click.option(
    "--index",
    type=click.IntRange(min=0),
    help="With --on kubernetes: the pod of this index; by default that which leads.",
)
def command(
    run_dir: Path,
    ranks: tuple[str, ...],
    nodes: tuple[str, ...],
    level: str | None,
    since: str | None,
    until: str | None,
    grep: str | None,
    attempt: int | None,
    grouped: bool,
    as_json: bool,
    follow: bool,
    last: int,
    job: bool | None,
    engine: str | None,
    namespace: str,
    index: int | None,
) -> None:
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
    from phalanx.launch.engines.submission import read_record
    from phalanx.launch.engines.tools import EngineError

    choice: dict[str, object] = {
        "--rank": ranks,
        "--node": nodes,
        "--level": level,
        "--since": since,
        "--until": until,
        "--grep": grep,
        "--attempt": attempt,
        "--grouped": grouped,
        "--json": as_json,
    }
    if engine is not None:
        from phalanx.cli.launch.on_kubernetes import print_log

        refuse_unused(
            {**choice, "--job": job is True, "--lines": job is False},
            "kubectl prints the log of a pod as it is: leave it out, or kubectl exec POD -- python -m phalanx logs RUN_DIR",
        )
        with explained(EngineError):
            code = print_log(str(run_dir), namespace, index=index or 0, follow=follow, last=last)
        raise SystemExit(code)
    refuse_unused({"--index": index, "--namespace": namespace}, "is for --on kubernetes")
    demand_folder(run_dir)
    if job:
        refuse_unused(
            choice, "chooses lines, and the log of a job is printed as it is: --lines instead of --job"
        )
    chooses = any((ranks, nodes, level, since, until, grep, attempt is not None, grouped, as_json))
    if job is None:
        job = not chooses and (run_dir / "launch").is_dir() and read_record(run_dir) is not None
    if job:
        _print_job(run_dir, last, follow=follow)
        return
    from phalanx.cli.launch.log_lines import LineOptions, print_lines

    options = LineOptions(
        ranks, nodes, level or "debug", since, until, grep or "", attempt, last, grouped, as_json, follow
    )
    try:
        print_lines(run_dir, options)
    except BrokenPipeError:  # its reader has seen enough
        sys.stderr.close()


def _print_job(run_dir: Path, last: int, *, follow: bool) -> None:
    from phalanx.cli.launch.formed_fleet import leading_log
    from phalanx.launch.engines.standing import sentence, submission_of, title
    from phalanx.launch.engines.tools import EngineError

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
