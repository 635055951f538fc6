"""``phalanx hash``: prints the SHA-256 of the weights on disk."""

from __future__ import annotations

import json
from pathlib import Path

import click

from phalanx.checkpoint.committed.digest import digest_checkpoint
from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.cli.errors import explained
from phalanx.cli.run_places import checkpoint_place
from phalanx.command_help import Command
from phalanx.run.directory.lineage import lineage_table, read_lineage
from phalanx.run.directory.paths import RunDirectory, is_published, read_small_json


@click.command("hash", cls=Command)
@click.argument("place", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="A step other than the newest.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(place: Path, step: int | None, as_json: bool) -> None:
    """Print the SHA-256 of all weights in PLACE: a run directory, a checkpoint, or a Hugging Face folder.

    It is computed from the bytes on disk and equals the hash that training prints, however many ranks wrote
    them. For a run that continues another one's checkpoint, its lineage is printed too (on stderr).

    \b
      phalanx hash runs/quickstart-1f3a9c04
      phalanx hash runs/quickstart-1f3a9c04/checkpoints/step-00000100
    """
    with explained(CheckpointError):
        if is_published(place):
            from phalanx.checkpoint.interop.huggingface.stored_folder import FolderTier

            chosen, path, run_dir = step or 0, place, place
            digest = digest_checkpoint(FolderTier(place), chosen)
        else:
            checkpoints = checkpoint_place(place, step)
            tier = DiskTier(checkpoints.root)
            chosen = checkpoints.newest(tier.steps())
            path, run_dir = tier.folder(chosen), checkpoints.root.parent
            digest = digest_checkpoint(tier, chosen)
    lineage = read_lineage(read_small_json(RunDirectory(run_dir).record))
    if as_json:
        report = {"checkpoint": str(path), "step": chosen, "weights_sha256": digest}
        click.echo(json.dumps({**report, "lineage": lineage_table(lineage)}))
        return
    click.echo(f"{digest}  {path}")
    for origin in lineage:
        click.echo(f"continues from {origin}", err=True)
