"""``phalanx runs tag``, ``note`` and ``rm``: labels of a run, and its removal."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from phalanx.cli.errors import demand_folder, explained
from phalanx.cli.output import size
from phalanx.run.directory.paths import RunDirectoryError
from phalanx_watch.runs.index import is_run
from phalanx_watch.runs.remove import Removal, removal, remove
from phalanx_watch.runs.row import LabelError, Labels, read_labels, write_labels

# ``phalanx runs rm``: runs are removed with all that they hold, after a list of it.

_MOST = 5


@click.command("rm", short_help="Remove runs, after saying what would be lost.")
@click.argument("run_dirs", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--force",
    is_flag=True,
    help="Even if other runs go on from its checkpoints, or it may run on another machine.",
)
@click.option(
    "--beside",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Look for runs that go on from it in this folder too; may be repeated. The run's own folder is always looked at.",
)
def remove_command(run_dirs: tuple[Path, ...], yes: bool, force: bool, beside: tuple[Path, ...]) -> None:
    """Remove the runs in RUN_DIRS: their checkpoints, events, logs and records.

    What would be lost is said first, and asked. A run that is being trained is never removed; one whose checkpoints others go on from only
    with --force. Copies of its checkpoints in an object store stay.

    \b
      phalanx runs rm runs/quickstart-1f3a9c04-2
    """
    for path in run_dirs:
        demand_folder(path)
    with explained(RunDirectoryError):
        found = [removal(path, beside, run_dirs) for path in dict.fromkeys(run_dirs)]
    for one in found:
        _tell(one)
    refused = [one for one in found if one.obstacles and not force]
    for one in refused:
        for obstacle in one.obstacles:
            click.echo(f"{one.row.path}: {obstacle}", err=True)
    if refused:
        raise click.ClickException("nothing was removed; --force removes it all the same")
    total = sum(one.size_bytes for one in found)
    if not yes:
        if not sys.stdin.isatty():
            raise click.ClickException("nothing was removed: say --yes where nobody can be asked")
        click.confirm(f"remove {len(found)} run{'s' * (len(found) > 1)}, {size(total)}?", abort=True)
    with explained(RunDirectoryError):
        for one in found:
            remove(Path(one.row.path))
            click.echo(f"removed {one.row.path}")


def _tell(one: Removal) -> None:
    row = one.row
    click.echo(
        f"{row.path}: {row.state}, step {row.step:,} of {row.steps:,}, {one.files:,} files, {size(one.size_bytes)}"
    )
    listed = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in one.largest[:_MOST])
    click.echo(f"  {listed}" + (", ..." if len(one.largest) > _MOST else ""))
    if row.weights_sha256:
        click.echo(f"  the weights {row.weights_sha256[:12]}, if no copy is elsewhere")
    if row.tags or row.note:
        click.echo(f"  labels: {' '.join(row.tags)} {row.note[:200]}".rstrip())


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
