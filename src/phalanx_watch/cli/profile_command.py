"""``phalanx profile``: record and analyze the next steps of a running run."""

from __future__ import annotations

import json
from pathlib import Path

import click

from phalanx.cli.errors import demand_folder, explained
from phalanx.cli.output import text_console
from phalanx.command_help import Command
from phalanx.observe.profile_request import MOST_STEPS
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError


@click.command("profile", cls=Command)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--steps", type=click.IntRange(1, MOST_STEPS), default=2, show_default=True, help="Record so many steps."
)
@click.option(
    "--ranks",
    default="auto",
    show_default=True,
    help="auto (one for each place in the mesh, and the slowest known; all of up to 8), all, or numbers: 0,3.",
)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(1, 3600),
    default=60,
    show_default=True,
    help="Seconds within which the run must receive the request.",
)
@click.option(
    "--show",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[NAME]",
    help="Record nothing: list the recorded profiles, or show one.",
)
@click.option("--cluster", help="The cluster of the plan; by default this one (phalanx calibrate), or cpu.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
def command(
    run_dir: Path, steps: int, ranks: str, wait_s: float, show: str | None, cluster: str | None, as_json: bool
) -> None:
    """Record the next steps of the run in RUN_DIR, which must be training, and print where their time goes: compute, waits
    between ranks, comparison with the plan, and possible gains. Training continues, with the same bits.

    \b
      phalanx profile runs/quickstart-1f3a9c04
      phalanx profile runs/big-1f3a9c04 --steps 4 --ranks 0,17
      phalanx profile runs/quickstart-1f3a9c04 --show
    """
    demand_folder(run_dir)
    from phalanx_watch.cli.profile_report import print_list, print_report
    from phalanx_watch.profile.read import ProfileError, make_summary, profiles, read_summary, request_profile

    directory = RunDirectory(run_dir)
    console, errors = text_console(), text_console(stderr=True)
    with explained(ProfileError, RunDirectoryError):
        if not directory.run_file.exists():
            raise RunDirectoryError(f"{run_dir} is no run directory: it has no {directory.run_file.name}")
        if show == "":
            summaries = profiles(directory)
            if as_json:
                click.echo(json.dumps([vars(profile) for profile in summaries]))
            else:
                print_list(console, run_dir, summaries)
            return
        if show is not None:
            made_anew = cluster is not None
            summary = make_summary(directory, show, cluster) if made_anew else read_summary(directory, show)
        else:
            name = request_profile(
                directory, steps, _ranks(ranks), wait_s, lambda line: errors.print(line, style="dim")
            )
            summary = make_summary(directory, name, cluster)
    if as_json:
        click.echo(json.dumps(summary))
    else:
        print_report(console, directory, summary)


def _ranks(text: str) -> tuple[int, ...] | str:
    """Return "auto", "all", or the ascending ranks in ``text``. Raises ``click.BadParameter``."""
    if text in ("auto", "all"):
        return text
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise click.BadParameter("write auto, all, or numbers of ranks such as 0,3", param_hint="--ranks")
    return tuple(sorted({int(part) for part in parts}))
