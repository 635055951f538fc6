"""``phalanx logs``: what the job of a submitted run has printed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.errors import explained

if TYPE_CHECKING:
    from phalanx.launch.engines.submission import Submitted

_POLL_S = 0.5
_ASK_S = 5.0


@click.command("logs")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--follow", "-f", is_flag=True, help="Go on until the job has ended.")
@click.option(
    "--last",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    help="Begin with so many lines; 0: all.",
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
    default=0,
    help="With --on kubernetes: the pod of this index; by default that which leads.",
)
def command(run_dir: Path, follow: bool, last: int, engine: str | None, namespace: str, index: int) -> None:
    """Print the log of the job that trains the run in RUN_DIR; under Slurm each line begins with the number of its node in the job.

    Of a run that was started by ssh it is the log of the host that leads; those of the others lie beside it.

    \b
      phalanx logs runs/big-1f3a9c04 --follow
      phalanx logs runs/big-1f3a9c04 --last 0 | grep '^3:'
      phalanx logs big-1f3a9c04 --on kubernetes --index 3
    """
    from phalanx.launch.engines.standing import log_of, sentence, title
    from phalanx.launch.engines.submission import read_record
    from phalanx.launch.engines.tools import EngineError

    if engine is not None:
        from phalanx.cli.launch.on_kubernetes import print_log

        with explained(EngineError):
            code = print_log(str(run_dir), namespace, index=index, follow=follow, last=last)
        raise SystemExit(code)
    with explained(EngineError):
        made = read_record(run_dir)
        if made is None:
            raise EngineError(
                f"{run_dir} holds no run that phalanx submit has started; the logs of its ranks are in {run_dir}/logs"
            )
        path = log_of(run_dir, made)
        if not path.exists():
            doing = sentence(run_dir, made)
            if doing is None:
                raise EngineError(f"{title(made)} has ended without a word: there is no {path}")
            if not follow:
                click.echo(f"{title(made)}: {doing}")
                return
        _print(path, run_dir, made, last, follow=follow)


def _print(path: Path, run_dir: Path, made: Submitted, last: int, *, follow: bool) -> None:
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
        if time.monotonic() - asked_s > _ASK_S:
            asked_s, ended = time.monotonic(), sentence(run_dir, made) is None
        else:
            time.sleep(_POLL_S)
