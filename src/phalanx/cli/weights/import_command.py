"""``phalanx import``: other software's weights as a run directory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.errors import explained
from phalanx.command_help import Command

if TYPE_CHECKING:
    from phalanx.run.spec import ModelSpec


@click.command("import", cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The run directory to make (imported/NAME).")
@click.option(
    "--model",
    help="Of a folder in PyTorch's distributed format, the model: a preset, a run file or a run directory.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(directory: Path, out: Path | None, model: str | None, as_json: bool) -> None:
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
    from phalanx.checkpoint.format.errors import CheckpointError
    from phalanx.checkpoint.interop.dcp.import_folder import import_dcp
    from phalanx.checkpoint.interop.huggingface.import_folder import import_hf
    from phalanx.data.errors import DataError

    target = out or Path("imported") / Path(os.path.abspath(directory)).name
    with explained(CheckpointError, DataError):
        if model is None:
            imported = import_hf(directory, target)
        else:
            imported = import_dcp(directory, target, _model(model))
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


def _model(place: str) -> ModelSpec:
    """Return the model of a run file, a run directory or a preset. Raises ``RunFileError``."""
    from phalanx.model.facts.presets import PRESETS
    from phalanx.run.read import read_run, read_table

    path = Path(place)
    if path.suffix == ".toml":
        return read_run(path, PRESETS).model
    return read_table({"model": {"preset": place}}, PRESETS, (), path).model
