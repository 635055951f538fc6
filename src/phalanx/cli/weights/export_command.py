"""``phalanx export``: a run's weights for other software."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.cli.errors import explained
from phalanx.cli.run_places import checkpoint_place
from phalanx.cli.weights.options import DtypeName
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved

# ``phalanx export --verify``: the exported folder's greedy texts by another engine, in a table beside the run's own model.

_PROMPT_TOKENS = 32


def verify_export(
    run_dir: Path,
    step: int,
    folder: Path,
    dtype: str,
    engine: Literal["transformers", "vllm"],
    *,
    prompts: Sequence[list[int]],
    tokens: int,
    python: str,
) -> None:
    """Prints how far ``engine`` and the run's model agree; exit code 1 where they do not."""
    import torch

    from phalanx.serve.generate import load_model
    from phalanx.serve.verify.verify import TIE_NATS, VerifyError, judged, other_texts

    with explained(VerifyError, ValueError):
        version, texts = other_texts(engine, folder, dtype, prompts, tokens, python)
        model, _ = load_model(run_dir, step, dtype=getattr(torch, dtype))
        found = judged(model, prompts, texts)
    tie = TIE_NATS[dtype]
    click.echo(f"{engine} {version} beside the run's own model, greedy, {dtype}:")
    click.echo(f"{'prompt':>7} {'tokens':>7}  first difference")
    for one in found:
        if one.differs_at is None:
            told = "none"
        else:
            kind = "a tie" if one.agrees(tie) else "differs"
            told = (
                f"{kind}: new token {one.differs_at + 1}: {one.theirs}, and {one.ours} by the run's model, "
                f"by {one.gap:.2g} nats (widest {one.widest:.2g})"
            )
        click.echo(f"{one.prompt:>7} {one.tokens:>7}  {told}")
    wrong = sum(not one.agrees(tie) for one in found)
    if wrong:
        click.echo(f"{wrong} of {len(found)} texts differ by more than rounding ({tie:g} nats)", err=True)
        raise SystemExit(1)
    click.echo(f"all {sum(one.tokens for one in found)} tokens agree (ties: up to {tie:g} nats)")


def prompts_to_verify(run_dir: Path, given: Sequence[str], count: int) -> list[list[int]]:
    """Token ids of the prompts that were given, or else of ``count`` held-out sequences' beginnings; ends the command where there are none."""
    from phalanx.data.errors import DataError
    from phalanx.run.directory.paths import RunDirectoryError
    from phalanx.serve.prompt import encode_prompt, load_run_tokenizer

    with explained(DataError, RunDirectoryError, ValueError):
        if not given:
            return held_out_prompts(run_dir, count)
        tokenizer = load_run_tokenizer(run_dir)
        return [encode_prompt(tokenizer, text) for text in given]


def held_out_prompts(run_dir: Path, count: int, tokens: int = _PROMPT_TOKENS) -> list[list[int]]:
    """The first ``tokens`` of held-out sequences, evenly spread. Raises DataError."""
    from phalanx.data.errors import DataError
    from phalanx.data.reading.dataset import RunData, inputs_of
    from phalanx.run.directory.paths import RunDirectory, read_resolved

    remedy = "give prompts: --verify-prompt TEXT"
    directory = RunDirectory(run_dir)
    if not directory.record.exists():
        raise DataError(f"{run_dir} was never trained, so it has no held-out data of its own; {remedy}")
    try:
        data = RunData.of_run(read_resolved(directory))
    except DataError as error:
        raise DataError(f"{error}; or {remedy}") from error
    if not data.held_out_len:
        raise DataError(f"the run holds no data out; {remedy}")
    places = [number * data.held_out_len // count for number in range(min(count, data.held_out_len))]
    samples = (data.held_out_samples(place, 1) for place in dict.fromkeys(places))
    return [inputs_of(sample)[0, :tokens].tolist() for sample in samples]


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
    from phalanx.cli.weights.export_command import prompts_to_verify, verify_export

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
