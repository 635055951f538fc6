"""``phalanx generate``: generates text with the weights of a checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from phalanx.cli.errors import explained
from phalanx.cli.run_places import checkpoint_place


@click.command("generate")
@click.argument("place", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="How the text begins; empty begins a new document.")
@click.option(
    "--chat",
    is_flag=True,
    help="The prompt is a user's message; an imported model's chat template frames it.",
)
@click.option("--tokens", type=click.IntRange(min=1), default=200, show_default=True, help="At most so many.")
@click.option(
    "--temperature", type=click.FloatRange(min=0.0), default=0.8, show_default=True, help="0: the likeliest."
)
@click.option(
    "--top-k", type=click.IntRange(min=0), default=0, help="Choose among the k likeliest; 0: among all."
)
@click.option(
    "--top-p", type=click.FloatRange(0.0, 1.0, min_open=True), default=1.0, help="Nucleus sampling."
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="The same seed gives the same text.",
)
@click.option("--step", type=int, help="A step other than the newest.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    place: Path,
    prompt: str,
    chat: bool,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    step: int | None,
    as_json: bool,
) -> None:
    """Generate text with the weights in PLACE: a run directory or a checkpoint.

    \b
      phalanx generate runs/quickstart-1f3a9c04 --prompt "def "
      phalanx generate runs/quickstart-1f3a9c04 --prompt "import " --temperature 0 --tokens 50
      phalanx generate imported/llama --chat --prompt "Why is the sky blue?"
    """
    from phalanx.checkpoint.format.errors import CheckpointError
    from phalanx.data.errors import DataError
    from phalanx.run.directory.paths import RunDirectoryError
    from phalanx.serve.sample import continued

    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise click.ClickException("--prompt is not valid UTF-8")
    where = checkpoint_place(place, step)
    with explained(CheckpointError, DataError, RunDirectoryError, ValueError):
        pieces = continued(
            where.root.parent,
            prompt,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            step=where.step,
            chat=chat,
        )
        if as_json:
            click.echo(json.dumps({"prompt": prompt, "text": "".join(pieces)}))
            return
        if not chat:
            click.echo(prompt, nl=False)
        for piece in pieces:
            click.echo(piece, nl=False)
            sys.stdout.flush()
        click.echo()
