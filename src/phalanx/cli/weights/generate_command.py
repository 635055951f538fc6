"""``phalanx generate``: generates text with the weights of a checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from phalanx.cli.errors import explained
from phalanx.serve.text_stream import TextStream


@click.command("generate")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="How the text begins; empty begins a new document.")
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
    run_dir: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    step: int | None,
    as_json: bool,
) -> None:
    """Generate text with the weights of the run in RUN_DIR.

    \b
      phalanx generate runs/quickstart-1f3a9c04 --prompt "def "
      phalanx generate runs/quickstart-1f3a9c04 --prompt "import " --temperature 0 --tokens 50
    """
    from phalanx.checkpoint.format.errors import CheckpointError
    from phalanx.data.errors import DataError
    from phalanx.run.directory import RunDirectoryError
    from phalanx.serve.generate import encode_prompt, generate, load_model, load_run_tokenizer

    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise click.ClickException("--prompt is not valid UTF-8")
    with explained(CheckpointError, DataError, RunDirectoryError, ValueError):
        model, _ = load_model(run_dir, step)
        tokenizer = load_run_tokenizer(run_dir)
        stream = TextStream(tokenizer)
        ids = generate(
            model,
            encode_prompt(tokenizer, prompt),
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop={tokenizer.end_of_document},
        )
        if as_json:
            click.echo(json.dumps({"prompt": prompt, "text": "".join(_text(ids, stream))}))
            return
        click.echo(prompt, nl=False)
        for piece in _text(ids, stream):
            click.echo(piece, nl=False)
            sys.stdout.flush()
        click.echo()


def _text(ids: Iterator[int], stream: TextStream) -> Iterator[str]:
    for token in ids:
        yield stream.feed(token)
    yield stream.flush()
