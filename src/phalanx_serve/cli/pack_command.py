"""``phalanx pack``: a run's weights as one file for serving."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.cli.errors import explained, refuse_given
from phalanx.cli.run_places import weights_place
from phalanx.command_help import Command
from phalanx.run.directory.paths import RunDirectoryError


@click.command("pack", cls=Command)
@click.argument("place", required=False, type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["fp32", "bf16", "fp8", "int8"]),
    default="bf16",
    show_default=True,
    help="Of the weights.",
)
@click.option("--step", type=int, help="A step other than the newest.")
@click.option("--out", type=click.Path(path_type=Path), help="The new file (RUN_DIR/packs/step-...).")
@click.option(
    "--verify", type=click.Path(path_type=Path), help="Read this pack and check every byte instead."
)
def command(place: Path | None, form: str, step: int | None, out: Path | None, verify: Path | None) -> None:
    """Write the weights in PLACE, a run directory or a folder of Hugging Face, as one file, layer after layer, for serving.

    `phalanx generate --stream` reads a model that is larger than memory from such a file. fp8 and int8 have one scale per
    32 neighbors; the rounding error is printed.

    \b
      phalanx pack runs/quickstart-1f3a9c04
      phalanx pack runs/quickstart-1f3a9c04 --format bf16
      phalanx pack Llama-3.1-8B --out llama.pack
      phalanx pack --verify model.pack
    """
    if (place is None) == (verify is None):
        raise click.UsageError("give either a run directory to pack, or --verify and a pack")
    if verify is not None:
        refuse_given(("form", "step", "out"), "--verify writes no pack")
        _verify(verify)
        return
    assert place is not None, "one of both is given"
    from phalanx.checkpoint.pack.writer import pack

    with explained(CheckpointError, RunDirectoryError), weights_place(place, step) as where:
        path, index = pack(where.root.parent, where.step, out, form, progress=_shown)  # type: ignore[arg-type]
    click.echo(f"step {index.step} packed as {form} into {path} ({path.stat().st_size:,} bytes)")
    click.echo(f"  weights {index.weights_id}")
    if index.rounding.worst_tensor:
        click.echo(
            f"  rounding changed the weights by {index.rounding.relative_error:.2%} of their root mean square, at most "
            f"{index.rounding.worst_error:.2%} ({index.rounding.worst_tensor})"
        )


def _verify(path: Path) -> None:
    """Read a pack completely, and print that it is whole, or each damaged chunk on standard error.

    Raises ClickException if any is damaged, or the pack cannot be opened.
    """
    from phalanx.checkpoint.pack.reader import damage, open_pack

    with explained(CheckpointError):
        pack = open_pack(path)
        damaged = list(damage(pack, _shown))
    for line in damaged:
        click.echo(line, err=True)
    if damaged:
        raise click.ClickException(f"{path}: {len(damaged)} chunks are damaged")
    index = pack.index
    click.echo(f"{path}: whole; {index.format}, step {index.step} of {index.run}, weights {index.weights_id}")


def _shown(read_bytes: int, total: int) -> None:
    """Show progress in per cent on standard error, if it is a terminal; end the line at the last byte."""
    if sys.stderr.isatty():
        end = "\n" if read_bytes >= total else ""
        click.echo(f"\r{read_bytes / max(1, total):4.0%} of {total:,} bytes", nl=False, err=True)
        click.echo(end, nl=False, err=True)
