"""``phalanx export``: a run's weights for other software."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import click

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.cli.errors import DtypeName, explained
from phalanx.cli.run_places import checkpoint_place
from phalanx.command import Argument, Heading, Option, command_options
from phalanx.command_help import Command
from phalanx.plugins import load_plugin
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.fields import POSITIVE

_VERIFIED_PROMPTS = 8
"""Held-out texts whose beginnings are continued."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    place: Annotated[Path, Argument()]
    kind: Annotated[Literal["hf", "dcp"], Option("--to", show_default=False), Heading("Format")] = "hf"
    """The format (hf)."""
    step: int | None = None
    """A step other than the newest."""
    dtype: Annotated[Literal["float32", "bfloat16"], DtypeName(), Option(show_default=False)] = "float32"
    """Format of the weights (hf only)."""
    max_seq_len: Annotated[int | None, POSITIVE] = None
    """The context length to write (hf only; the published one, or else train.seq_len)."""
    verify: Annotated[Literal["transformers", "vllm"] | None, Heading("Verify")] = None
    """Then let this engine load OUT, and compare its greedy tokens with the run's (hf only)."""
    prompts: Annotated[tuple[str, ...], Option("--verify-prompt")] = ()
    """A prompt for --verify; may be repeated. Without one, the beginnings of held-out text."""
    verify_tokens: Annotated[int, POSITIVE] = 24
    """New tokens of each."""
    verify_python: Annotated[str, Option(metavar="PATH")] = ""
    """The Python of another environment, which has the engine."""
    out: Annotated[Path, Argument()]


@click.command("export", cls=Command)
@command_options(ExportOptions)
def command(options: ExportOptions) -> None:
    """Write the weights of the run in PLACE to the folder OUT.

    "hf" is a Hugging Face folder (config, safetensors, tokenizer) that transformers opens; "dcp" is PyTorch's
    distributed checkpoint, with the optimizer's state.

    For a run that started from an imported model, the publisher's files and settings (tokenizer files, chat
    template, generation config, context length) are written again if they are still valid; the others are
    printed.

    \b
      phalanx export runs/quickstart-1f3a9c04 --to hf exported/
      phalanx export runs/quickstart-1f3a9c04 --to hf exported/ --verify transformers
    """
    if options.verify is None and (options.prompts or options.verify_python):
        raise click.UsageError("--verify-prompt and --verify-python are for --verify")
    if options.verify is not None and options.kind != "hf":
        raise click.UsageError("--verify reads a Hugging Face folder: --to hf")
    length = options.max_seq_len or 0
    if options.verify is None:
        export_to(options.place, options.kind, options.step, options.out, options.dtype, length)
        return
    export_check = load_plugin("phalanx.export_checks", "phalanx")
    if export_check is None:
        raise click.UsageError(
            "--verify needs a package that runs a model: pip install --force-reinstall --no-deps phalanx-train"
        )
    run_dir = checkpoint_place(options.place, options.step).root.parent
    # Before anything is written: a refused command must not leave files to remove.
    verified = export_check(
        *(run_dir, options.verify, options.prompts, _VERIFIED_PROMPTS),
        *(options.verify_tokens, options.verify_python),
    )
    step = export_to(options.place, options.kind, options.step, options.out, options.dtype, length)
    verified(step, options.out, options.dtype)


def export_to(
    place: Path,
    kind: str,
    step: int | None,
    out: Path,
    dtype: Literal["float32", "bfloat16"],
    max_seq_len: int = 0,
) -> int:
    """Export a checkpoint to ``out``, print the notes, and return its step. Errors end the command with a message.

    ``kind`` "dcp" writes PyTorch's distributed checkpoint, any other a Hugging Face folder.
    """
    notes: tuple[str, ...] = ()
    checkpoints = checkpoint_place(place, step)
    with explained(CheckpointError, RunDirectoryError):
        tier = DiskTier(checkpoints.root)
        chosen = checkpoints.newest(tier.steps())
        if kind == "dcp":
            from phalanx.checkpoint.interop.dcp.export_folder import export_dcp

            export_dcp(tier, chosen, out)
        else:
            from phalanx.checkpoint.interop.huggingface.export_folder import export_hf

            run = RunDirectory(checkpoints.root.parent)
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
