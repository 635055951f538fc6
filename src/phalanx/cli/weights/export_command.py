"""``phalanx export``: a run's weights for other software."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.cli.errors import explained
from phalanx.cli.run_places import checkpoint_place
from phalanx.cli.weights.options import DtypeName
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved

_VERIFIED_PROMPTS = 8
"""Held-out texts whose beginnings are continued."""


@click.command("export")
@click.argument("place", type=click.Path(path_type=Path))
@click.option("--to", "kind", type=click.Choice(["hf", "dcp"]), default="hf", help="The format (hf).")
@click.option("--step", type=int, help="A step other than the newest.")
@click.option("--dtype", type=DtypeName(), default="float32", help="Of the weights (hf only).")
@click.option(
    "--max-seq-len",
    type=click.IntRange(min=1),
    help="The context that readers are told of (hf only; the published one, or else train.seq_len).",
)
@click.option(
    "--verify",
    type=click.Choice(["transformers", "vllm"]),
    help="Then let this engine load OUT, and compare its greedy tokens with the run's (hf only).",
)
@click.option(
    "--verify-prompt",
    "prompts",
    multiple=True,
    help="A prompt for --verify; again for more. Without one, the beginnings of held-out text.",
)
@click.option(
    "--verify-tokens", default=24, show_default=True, type=click.IntRange(1), help="New tokens of each."
)
@click.option(
    "--verify-python",
    default="",
    metavar="PATH",
    help="The python of another environment, which has the engine.",
)
@click.argument("out", type=click.Path(path_type=Path))
def command(
    place: Path,
    kind: str,
    step: int | None,
    dtype: Literal["float32", "bfloat16"],
    max_seq_len: int | None,
    verify: Literal["transformers", "vllm"] | None,
    prompts: tuple[str, ...],
    verify_tokens: int,
    verify_python: str,
    out: Path,
) -> None:
    """Write the weights of the run in PLACE to the folder OUT.

    "hf" is a Hugging Face folder (config, safetensors, tokenizer) that transformers opens; "dcp" is PyTorch's
    distributed checkpoint, with the optimizer's state.

    Of a run that started from an imported model, what its publisher said (tokenizer files, chat template, generation config,
    context length) is written again as long as it holds; what is left out is printed.

    \b
      phalanx export runs/quickstart-1f3a9c04 --to hf exported/
      phalanx export runs/quickstart-1f3a9c04 --to hf exported/ --verify transformers
    """
    if verify is None and (prompts or verify_python):
        raise click.UsageError("--verify-prompt and --verify-python are for --verify")
    if verify is not None and kind != "hf":
        raise click.UsageError("--verify reads a Hugging Face folder: --to hf")
    if verify is None:
        export_to(place, kind, step, out, dtype, max_seq_len or 0)
        return
    from phalanx.cli.weights.verify_export import prompts_to_verify, verify_export

    run_dir = checkpoint_place(place, step).root.parent
    # Before anything is written, since whoever is refused would have to remove it to try again.
    encoded = prompts_to_verify(run_dir, prompts, _VERIFIED_PROMPTS)
    chosen = export_to(place, kind, step, out, dtype, max_seq_len or 0)
    verify_export(
        run_dir, chosen, out, dtype, verify, prompts=encoded, tokens=verify_tokens, python=verify_python
    )


def export_to(
    place: Path,
    kind: str,
    step: int | None,
    out: Path,
    dtype: Literal["float32", "bfloat16"],
    max_seq_len: int = 0,
) -> int:
    """Exports a checkpoint and returns its step; errors end the command with a message."""
    notes: tuple[str, ...] = ()
    where = checkpoint_place(place, step)
    with explained(CheckpointError, RunDirectoryError):
        tier = DiskTier(where.root)
        chosen = where.newest(tier.steps())
        if kind == "dcp":
            from phalanx.checkpoint.interop.dcp.export_folder import export_dcp

            export_dcp(tier, chosen, out)
        else:
            from phalanx.checkpoint.interop.huggingface.export_folder import export_hf

            run = RunDirectory(where.root.parent)
            spec = read_resolved(run)
            tokenizer = run.tokenizer if run.tokenizer.is_dir() else None
            published = run.published if run.published.is_dir() else None
            # An imported model that was never trained has no sequence length of its own.
            trained = published is None or run.record.exists()
            notes = export_hf(
                tier,
                chosen,
                spec.model,
                out,
                dtype,
                tokenizer,
                published_dir=published,
                max_seq_len=max_seq_len,
                trained_seq_len=spec.train.seq_len if trained else 0,
            )
    click.echo(f"step {chosen} written to {out}")
    for note in notes:
        click.echo(f"  note: {note}")
    return chosen
