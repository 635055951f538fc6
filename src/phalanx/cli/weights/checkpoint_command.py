"""``phalanx checkpoint``: lists, verifies, copies and exports checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier
from phalanx.cli.errors import explained
from phalanx.cli.run_places import is_store, open_checkpoints, open_object_tier
from phalanx.cli.weights.export_command import export_to
from phalanx.command_help import CommandGroup
from phalanx.observe.throughput import format_bytes

if TYPE_CHECKING:
    from phalanx.run.fields import JsonObject


@click.group("checkpoint", cls=CommandGroup)
def command() -> None:
    """List, verify, copy and export checkpoints.

    \b
      phalanx checkpoint list runs/quickstart-1f3a9c04
      phalanx checkpoint verify runs/quickstart-1f3a9c04
      phalanx checkpoint copy runs/quickstart-1f3a9c04 s3://bucket/kept
    """


@command.command("list")
@click.argument("place")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_command(place: str, as_json: bool) -> None:
    """List the committed checkpoints in PLACE, a run directory or the URL of an object store.

    \b
      phalanx checkpoint list runs/quickstart-1f3a9c04
      phalanx checkpoint list s3://bucket/quickstart
    """
    with explained(CheckpointError):
        tier = open_checkpoints(place).tier
        rows = [_row(tier, step) for step in tier.steps()]
    if as_json:
        click.echo(json.dumps({"checkpoints": rows}))
        return
    for row in rows:
        size = format_bytes(row["bytes"])
        click.echo(
            f"step {row['step']:>8}  {row['ranks']:>4} ranks  {size:>10}  {row['problem'] or row['path']}"
        )


def _row(tier: DiskTier | ObjectTier, step: int) -> JsonObject:
    """Return the row of a checkpoint: step, ranks, bytes, path, and its problem if it cannot be read."""
    place = str(tier.folder(step)) if isinstance(tier, DiskTier) else tier.place(step, "")
    try:
        size, ranks, problem = tier.data_bytes(step), tier.record(step).world_size, None
    except CheckpointError as error:
        size, ranks, problem = 0, 0, str(error)
    return {"step": step, "ranks": ranks, "bytes": size, "path": place, "problem": problem}


@command.command("verify")
@click.argument("place")
@click.option("--step", type=int, help="Only this step.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify_command(place: str, step: int | None, as_json: bool) -> None:
    """Read every byte of the checkpoints in PLACE, a run directory or a URL, and compare it with its checksum. Exit code 1 if any is bad.

    \b
      phalanx checkpoint verify runs/quickstart-1f3a9c04
      phalanx checkpoint verify s3://bucket/quickstart --step 100
    """
    from phalanx.checkpoint.committed.copying import verify_tier

    with explained(CheckpointError):
        checkpoints = open_checkpoints(place, step)
        findings = verify_tier(checkpoints.tier, checkpoints.name, checkpoints.step)
    bad = [{"step": f.step, "path": f.place, "problem": str(f.error)} for f in findings]
    if as_json:
        click.echo(json.dumps({"good": not bad, "findings": bad}))
    elif not bad:
        click.echo("every byte is as it was written")
    for finding in bad if not as_json else ():
        click.echo(f"step {finding['step']}: {finding['problem']}")
    sys.exit(1 if bad else 0)


@command.command("copy")
@click.argument("source")
@click.argument("target")
@click.option("--step", type=int, help="A step other than the newest.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def copy_command(source: str, target: str, step: int | None, as_json: bool) -> None:
    """Copy a checkpoint from SOURCE to TARGET, each a run directory, a folder or the URL of an object store.

    Every byte is compared with its checksum on the way. A step that TARGET has already stays as it is.

    \b
      phalanx checkpoint copy s3://bucket/quickstart restored/checkpoints
      phalanx checkpoint copy runs/quickstart-1f3a9c04 s3://bucket/kept --step 100
    """
    from phalanx.checkpoint.committed.copying import copy_step
    from phalanx.checkpoint.tiers.object_tier import require_conditional_store
    from phalanx.run.directory.paths import locate_checkpoints

    with explained(CheckpointError):
        checkpoints = open_checkpoints(source, step)
        chosen = checkpoints.newest()
        if is_store(target):
            remote = open_object_tier(target)
            require_conditional_store(remote.store)
            tier: DiskTier | ObjectTier = remote
        else:
            folder = Path(target)
            folder.mkdir(parents=True, exist_ok=True)
            tier = DiskTier(locate_checkpoints(folder)[0])
        copied, nbytes = copy_step(checkpoints.tier, chosen, tier)
    if as_json:
        click.echo(json.dumps({"step": chosen, "copied": copied, "bytes": nbytes, "target": target}))
    else:
        outcome = f"copied, {format_bytes(nbytes)}" if copied else "was there already"
        click.echo(f"step {chosen}: {outcome}: {target}")


@command.command("export")
@click.argument("place", type=click.Path(path_type=Path))
@click.option("--to", "kind", type=click.Choice(["dcp", "hf"]), required=True, help="The format.")
@click.option("--step", type=int, help="A step other than the newest.")
@click.argument("out", type=click.Path(path_type=Path))
def export_command(place: Path, kind: str, step: int | None, out: Path) -> None:
    """Write a checkpoint in PLACE to the folder OUT in another format.

    \b
      phalanx checkpoint export runs/quickstart-1f3a9c04 --to dcp exported/
    """
    export_to(place, kind, step, out, "float32")
