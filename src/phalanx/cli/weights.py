"""Commands for weights: checkpoints that are listed, verified and copied, their hashes, and conversion from and to other software."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import click

from phalanx.checkpoint.committed.digest import digest_checkpoint
from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier, require_conditional_store
from phalanx.cli.errors import DtypeName, explained, refuse_given
from phalanx.cli.output import byte_progress
from phalanx.cli.run_places import checkpoint_place, is_store, open_checkpoints, open_object_tier
from phalanx.command import Argument, Heading, Option, command_options
from phalanx.command_help import Command, CommandGroup
from phalanx.data.errors import DataError
from phalanx.model.facts.presets import PRESETS
from phalanx.observe.throughput import format_bytes
from phalanx.plugins import load_plugin
from phalanx.run.directory.paths import (
    RunDirectory,
    RunDirectoryError,
    is_published,
    locate_checkpoints,
    read_small_json,
)
from phalanx.run.fields import POSITIVE, JsonObject
from phalanx.run.identity import lineage_table, read_lineage, read_unchanged
from phalanx.run.read import read_run, read_table
from phalanx.run.spec import ModelSpec


@click.group("checkpoint", cls=CommandGroup)
def checkpoint_command() -> None:
    """List, verify, copy and export checkpoints.

    \b
      phalanx checkpoint list runs/quickstart-1f3a9c04
      phalanx checkpoint verify runs/quickstart-1f3a9c04
      phalanx checkpoint copy runs/quickstart-1f3a9c04 s3://bucket/kept
    """


@checkpoint_command.command("list")
@click.argument("place")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_command(place: str, as_json: bool) -> None:
    """List the committed checkpoints in PLACE, a run directory or the URL of an object store.

    \b
      phalanx checkpoint list runs/quickstart-1f3a9c04
      phalanx checkpoint list s3://bucket/quickstart
    """
    with explained(CheckpointError):
        checkpoints = open_checkpoints(place)
        tier = checkpoints.tier
        rows = [_row(tier, step) for step in tier.steps()]
    if as_json:
        click.echo(json.dumps({"checkpoints": rows}))
        return
    if not rows:
        click.echo(f"there is no committed checkpoint in {checkpoints.name}", err=True)
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


@checkpoint_command.command("verify")
@click.argument("place")
@click.option("--step", type=int, help="Only this step.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify_command(place: str, step: int | None, as_json: bool) -> None:
    """Read every byte of the checkpoints in PLACE, a run directory or a URL, and compare it with its checksum. Exit code 1 if any is bad.

    \b
      phalanx checkpoint verify runs/quickstart-1f3a9c04
      phalanx checkpoint verify s3://bucket/quickstart --step 100
    """
    from phalanx.checkpoint.committed.copying import silent, verify_tier

    progress = silent if as_json else byte_progress("read")
    with explained(CheckpointError):
        checkpoints = open_checkpoints(place, step)
        findings = verify_tier(checkpoints.tier, checkpoints.name, checkpoints.step, progress=progress)
    bad = [{"step": f.step, "path": f.place, "problem": str(f.error)} for f in findings]
    if as_json:
        click.echo(json.dumps({"good": not bad, "findings": bad}))
    elif not bad:
        click.echo("every byte is as it was written")
    for finding in bad if not as_json else ():
        click.echo(f"step {finding['step']}: {finding['problem']}")
    sys.exit(1 if bad else 0)


@checkpoint_command.command("copy")
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


@checkpoint_command.command("export")
@click.argument("place", type=click.Path(path_type=Path))
@click.option("--to", "kind", type=click.Choice(["dcp", "hf"]), required=True, help="The format.")
@click.option("--step", type=int, help="A step other than the newest.")
@click.argument("out", type=click.Path(path_type=Path))
def checkpoint_export_command(place: Path, kind: str, step: int | None, out: Path) -> None:
    """Write a checkpoint in PLACE to the folder OUT in another format.

    \b
      phalanx checkpoint export runs/quickstart-1f3a9c04 --to dcp exported/
    """
    export_to(place, kind, step, out, "float32")


@click.command("hash", cls=Command)
@click.argument("place", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="A step other than the newest.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def hash_command(place: Path, step: int | None, as_json: bool) -> None:
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
def export_command(options: ExportOptions) -> None:
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
    if options.verify is None:
        refuse_given(("prompts", "verify_tokens", "verify_python"), "is for --verify")
    if options.verify is not None and options.kind != "hf":
        raise click.UsageError("--verify reads a Hugging Face folder: --to hf")
    if options.kind != "hf":
        refuse_given(("dtype", "max_seq_len"), "is for --to hf")
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
    """Export a checkpoint (``step`` None: the newest) to ``out``, print step and notes, and return the step.

    ``kind`` "dcp" writes PyTorch's distributed checkpoint, any other a Hugging Face folder in ``dtype``. Raises
    ``click.ClickException``.
    """
    notes: tuple[str, ...] = ()
    checkpoints = checkpoint_place(place, step)
    with explained(CheckpointError, DataError, RunDirectoryError):
        tier = DiskTier(checkpoints.root)
        chosen = checkpoints.newest(tier.steps())
        if kind == "dcp":
            from phalanx.checkpoint.interop.dcp import export_dcp

            export_dcp(tier, chosen, out)
        else:
            from phalanx.checkpoint.interop.huggingface.convert import export_hf
            from phalanx.data.tokenizers.tokenizer import load_own_tokenizer

            run = RunDirectory(checkpoints.root.parent)
            spec = read_unchanged(run)
            tokenizer = run.tokenizer if run.tokenizer.is_dir() else None
            if tokenizer is not None:
                load_own_tokenizer(run)  # refuses another one
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


@click.command("import", cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The run directory to make (imported/NAME).")
@click.option(
    "--model",
    help="Of a folder in PyTorch's distributed format, the model: a preset, a run file or a run directory.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def import_command(directory: Path, out: Path | None, model: str | None, as_json: bool) -> None:
    """Read the Hugging Face model in DIRECTORY, or a checkpoint of PyTorch's distributed format, into a run
    directory.

    Dense families: Llama, Mistral, Qwen2, Qwen3, Phi-3 and Phi-4, Gemma 2, Gemma 3 (text), OLMo 2 and 3, SmolLM3, Seed-OSS, GLM-4.
    Mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, MiniMax-M2, gpt-oss, OLMoE, GLM-4.5, dots.llm1, DeepSeek-V2, DeepSeek-V3 and
    Kimi K2. Weights are safetensors, also in fp8 by blocks; those of gpt-oss also in mxfp4.

    PyTorch's distributed format (torch.distributed.checkpoint) does not describe the model, so pass it with
    --model. Names may be those that `phalanx export --to dcp` writes, or those of torchtitan's Llama 3. Only
    weights are imported.

    Text can be generated from it, and a run can start from it: --set checkpoint.init_from=RUN_DIR.

    \b
      phalanx import Llama-3.1-8B
      phalanx import Llama-3.1-8B --out imported/llama
      phalanx generate imported/llama --prompt "Once"
      phalanx import outputs/checkpoint/step-1000 --model llama3-8b
    """
    from phalanx.checkpoint.interop.dcp import import_dcp
    from phalanx.checkpoint.interop.huggingface.convert import import_hf

    target = out or Path("imported") / Path(os.path.abspath(directory)).name
    with explained(CheckpointError, DataError):
        if model is None:
            imported = import_hf(directory, target)
        else:
            imported = import_dcp(directory, target, _imported_model(model))
    if as_json:
        result = {"run_dir": str(target), "weights_sha256": imported.weights_sha256, "notes": imported.notes}
        click.echo(json.dumps(result))
        return
    click.echo(f"{target}: imported")
    for note in imported.notes:
        click.echo(f"  note: {note}")
    if imported.no_tokenizer_because:
        click.echo(f"  without a tokenizer: {imported.no_tokenizer_because}")
    click.echo(f"  weights sha256 {imported.weights_sha256}")


def _imported_model(place: str) -> ModelSpec:
    """Return the model of a run file ("*.toml") or of a preset's name. Raises ``RunFileError``."""
    path = Path(place)
    if path.suffix == ".toml":
        return read_run(path, PRESETS).model
    return read_table({"model": {"preset": place}}, PRESETS, (), path).model
