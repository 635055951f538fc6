"""``phalanx checkpoint``: lists, verifies and exports checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.cli.errors import explained
from phalanx.cli.run_places import checkpoint_place
from phalanx.cli.weights.export_command import export_to
from phalanx.observe.throughput import format_bytes

if TYPE_CHECKING:
    from phalanx.run.section_reader import JsonObject


@click.group("checkpoint")
def command() -> None:
    """List, verify and export checkpoints."""


@command.command("list")
@click.argument("place", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_command(place: Path, as_json: bool) -> None:
    """List the committed checkpoints in PLACE.

    \b
      phalanx checkpoint list runs/quickstart-1f3a9c04
    """
    tier = DiskTier(checkpoint_place(place).root)
    rows = [_row(tier, step) for step in tier.steps()]
    if as_json:
        click.echo(json.dumps({"checkpoints": rows}))
        return
    for row in rows:
        size = format_bytes(row["bytes"])
        click.echo(
            f"step {row['step']:>8}  {row['ranks']:>4} ranks  {size:>10}  {row['problem'] or row['path']}"
        )


def _row(tier: DiskTier, step: int) -> JsonObject:
    folder = tier.folder(step)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    try:
        ranks, problem = tier.record(step).world_size, None
    except CheckpointError as error:
        ranks, problem = 0, str(error)
    return {"step": step, "ranks": ranks, "bytes": size, "path": str(folder), "problem": problem}


@command.command("verify")
@click.argument("place", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Only this step.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify_command(place: Path, step: int | None, as_json: bool) -> None:
    """Read every byte of the checkpoints in PLACE and compare it with its checksum. Exit code 1 if any is bad.

    \b
      phalanx checkpoint verify runs/quickstart-1f3a9c04 --step 100
    """
    from phalanx.checkpoint.tiers.verify import verify

    where = checkpoint_place(place, step)
    with explained(CheckpointError):
        findings = verify(where.root, where.step)
    bad = [{"step": f.step, "path": str(f.path), "problem": str(f.error)} for f in findings]
    if as_json:
        click.echo(json.dumps({"good": not bad, "findings": bad}))
    elif not bad:
        click.echo("every byte is as it was written")
    for finding in bad if not as_json else ():
        click.echo(f"step {finding['step']}: {finding['problem']}")
    sys.exit(1 if bad else 0)


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
