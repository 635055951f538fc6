"""``phalanx runs tag`` and ``phalanx runs note``: what people say of a run."""

from __future__ import annotations

from pathlib import Path

import click

from phalanx.cli.errors import explained
from phalanx.cli.run_folder import demand_folder
from phalanx.run.directory.paths import RunDirectoryError
from phalanx.watch.runs.index import is_run
from phalanx.watch.runs.row import LabelError, Labels, read_labels, write_labels


@click.command("tag", short_help="Give a run tags, take them away, or print them.")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("tags", nargs=-1)
@click.option(
    "--remove", "removed", multiple=True, metavar="TAG", help="Take this tag away; may be repeated."
)
def tag_command(run_dir: Path, tags: tuple[str, ...], removed: tuple[str, ...]) -> None:
    """Give the run in RUN_DIR the TAGS besides those that it has; without any, print them.

    \b
      phalanx runs tag runs/quickstart-1f3a9c04 good baseline
      phalanx runs tag runs/quickstart-1f3a9c04 --remove baseline
    """
    with explained(LabelError, RunDirectoryError):
        labels = _labels(run_dir)
        if tags or removed:
            labels = labels.untagged(*removed).tagged(*tags)
            write_labels(run_dir, labels)
    click.echo(" ".join(labels.tags))


@click.command("note", short_help="Write a note on a run, or print it.")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("text", required=False)
def note_command(run_dir: Path, text: str | None) -> None:
    """Write a note on the run in RUN_DIR, in place of the one that it has; an empty TEXT removes it, and without one it is printed.

    \b
      phalanx runs note runs/quickstart-1f3a9c04 "the learning rate of the paper"
    """
    with explained(LabelError, RunDirectoryError):
        labels = _labels(run_dir)
        if text is not None:
            write_labels(run_dir, labels.noted(text))
            return
    click.echo(labels.note)


def _labels(run_dir: Path) -> Labels:
    demand_folder(run_dir)
    if not is_run(run_dir):
        raise RunDirectoryError(f"{run_dir} is no run directory")
    return read_labels(run_dir)
