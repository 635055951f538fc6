"""``phalanx generate``: generates text with the weights of a checkpoint."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import click

from phalanx.cli.errors import explained
from phalanx.cli.run_places import weights_place
from phalanx.cli.safe_output import data_output
from phalanx.cli.weights.options import Bytes, DeviceName, DtypeName, require_trusted_code, trust_option
from phalanx.run.directory.paths import is_published


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
@click.option(
    "--stream",
    is_flag=True,
    help="Read the weights as they are computed with; for models larger than memory.",
)
@click.option(
    "--memory", type=Bytes(), help="What the weights may take: 2GiB, 500MiB (four fifths of what is free)."
)
@click.option(
    "--dtype",
    type=DtypeName(),
    default="float32",
    help="Of the weights and of what is computed with them (float32).",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    type=DeviceName(),
    help="What computes: cpu, cuda, or one GPU, cuda:1. auto: a GPU if there is one; with --stream, and of a run of portable numerics, the CPU.",
)
@trust_option
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
    stream: bool,
    memory: int | None,
    dtype: str,
    device: str,
    trust_code: bool,
    as_json: bool,
) -> None:
    """Generate text with the weights in PLACE: a run directory, a checkpoint, a pack (`phalanx pack`), or a folder of Hugging Face.

    With --stream the weights are read layer by layer as they are computed with, and a mixture's experts as they are chosen; of a run, they
    are packed for that once.

    \b
      phalanx generate runs/quickstart-1f3a9c04 --prompt "def "
      phalanx generate runs/quickstart-1f3a9c04 --prompt "import " --temperature 0 --tokens 50
      phalanx generate runs/quickstart-1f3a9c04 --prompt "def " --device cpu
      phalanx generate model.pack --stream --memory 2GiB --prompt "def "
      phalanx generate Llama-3.1-8B --chat --prompt "Why is the sky blue?"
    """
    from phalanx.checkpoint.format.errors import CheckpointError
    from phalanx.data.errors import DataError
    from phalanx.run.directory.paths import RunDirectoryError
    from phalanx.serve.engine.errors import PartLostError
    from phalanx.serve.generate import continued

    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise click.ClickException("--prompt is not valid UTF-8")
    packed, published = place.is_file(), is_published(place)
    if published and memory is not None and not stream:
        raise click.UsageError("--memory is for --stream, for a run directory and for a pack: leave it out")
    kinds = (CheckpointError, DataError, RunDirectoryError, PartLostError, ValueError)
    with ExitStack() as stack, explained(*kinds):
        where = None if packed else stack.enter_context(weights_place(place, step))
        run_dir = place if where is None else where.root.parent
        step = step if where is None else where.step
        model = None
        if not packed:
            require_trusted_code(run_dir, trust_code=trust_code)
        if packed or stream or (not published and (memory is not None or dtype != "float32")):
            import torch

            from phalanx.checkpoint.pack.reader import open_pack
            from phalanx.hardware.local.device import gpus
            from phalanx.hardware.portable.operations import begun
            from phalanx.serve.engine.errors import ONLY_STREAMED
            from phalanx.serve.numerics import computing_on, device_named
            from phalanx.serve.weights.open_model import open_model, run_folder

            if packed:
                run_dir = stack.enter_context(run_folder(open_pack(place).index))
                require_trusted_code(run_dir, trust_code=trust_code, place=place)
            computing = device_named(device, gpus(), only_cpu=ONLY_STREAMED if stream else "")
            model, _ = open_model(
                place if packed else run_dir,
                stream=stream,
                memory_bytes=memory,
                dtype=getattr(torch, dtype),
                step=step,
            )
            if device == "auto" and begun():  # of a run of portable numerics, which are a CPU's
                computing = torch.device("cpu")
            with computing_on(computing, f"the weights in {dtype}"):
                model.to(computing)
        pieces = continued(
            run_dir,
            prompt,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            step=step,
            chat=chat,
            model=model,
            device=device,
            dtype=dtype,
        )
        if as_json:
            click.echo(json.dumps({"prompt": prompt, "text": "".join(pieces)}))
            return
        if not chat:
            click.echo(prompt, data_output(), nl=False)
        for piece in pieces:
            click.echo(piece, data_output(), nl=False)
        click.echo()
