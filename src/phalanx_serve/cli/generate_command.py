"""``phalanx generate``: generate text with the weights of a checkpoint."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.cli.errors import Bytes, DeviceName, DtypeName, TrustCode, explained, require_trusted_code
from phalanx.cli.output import data_output
from phalanx.cli.run_places import weights_place
from phalanx.command import Argument, AsJson, FiniteRange, Heading, Option, command_options
from phalanx.command_help import Command
from phalanx.run.directory.paths import RunDirectoryError, is_published
from phalanx.run.fields import NOT_NEGATIVE, POSITIVE, ValueRange


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    place: Annotated[Path, Argument()]
    prompt: Annotated[str, Heading("Text")] = ""
    """Beginning of the text; empty begins a new document."""
    chat: bool = False
    """The prompt is a user's message; an imported model's chat template frames it."""
    tokens: Annotated[int, POSITIVE] = 200
    """Most tokens to generate."""
    temperature: Annotated[float, FiniteRange(0.0), Heading("Sampling")] = 0.8
    """0: the likeliest."""
    top_k: Annotated[int, NOT_NEGATIVE] = 0
    """Choose among the k likeliest; 0: among all."""
    top_p: Annotated[float, FiniteRange(0.0, 1.0, min_open=True), Option(show_default=False)] = 1.0
    """Nucleus sampling."""
    seed: Annotated[int, ValueRange(at_least=0, at_most=2**63 - 1), Option(show_default=True)] = 0
    """The same seed gives the same text."""
    step: Annotated[int | None, Heading("Weights and device")] = None
    """A step other than the newest."""
    stream: bool = False
    """Read the weights during computation; for models larger than memory."""
    memory: Annotated[int | None, Bytes()] = None
    """Memory of the weights: 2GiB, 500MiB (four fifths of the free memory)."""
    dtype: Annotated[str, DtypeName(), Option(show_default=False)] = "float32"
    """Format of weights and computation (float32)."""
    device: Annotated[str, DeviceName()] = "auto"
    """Device: cpu, cuda, or one GPU, cuda:1. auto: a GPU if there is one; with --stream, and of a run of portable numerics, the CPU."""
    trust_code: TrustCode = False
    as_json: AsJson = False


@click.command("generate", cls=Command)
@command_options(GenerateOptions)
def command(options: GenerateOptions) -> None:
    """Generate text with the weights in PLACE: a run directory, a checkpoint, a pack (`phalanx pack`), or a folder of Hugging Face.

    With --stream the weights are read layer by layer during computation, and a mixture's experts as they are chosen. A run is packed once
    for that.

    \b
      phalanx generate runs/quickstart-1f3a9c04 --prompt "def "
      phalanx generate runs/quickstart-1f3a9c04 --prompt "import " --temperature 0 --tokens 50
      phalanx generate runs/quickstart-1f3a9c04 --prompt "def " --device cpu
      phalanx generate model.pack --stream --memory 2GiB --prompt "def "
      phalanx generate Llama-3.1-8B --chat --prompt "Why is the sky blue?"
    """
    from phalanx.data.errors import DataError
    from phalanx_serve.generate import continued
    from phalanx_serve.traffic.events import PartLostError

    if any("\ud800" <= character <= "\udfff" for character in options.prompt):
        raise click.ClickException("--prompt is not valid UTF-8")
    place, device, dtype = options.place, options.device, options.dtype
    packed, published = place.is_file(), is_published(place)
    if published and options.memory is not None and not options.stream:
        raise click.UsageError("--memory is for --stream, for a run directory and for a pack: leave it out")
    kinds = (CheckpointError, DataError, RunDirectoryError, PartLostError, ValueError)
    with ExitStack() as stack, explained(*kinds):
        where = None if packed else stack.enter_context(weights_place(place, options.step))
        run_dir = place if where is None else where.root.parent
        step = options.step if where is None else where.step
        model = None
        if not packed:
            require_trusted_code(run_dir, trust_code=options.trust_code)
        is_adapted = options.memory is not None or dtype != "float32"
        if packed or options.stream or (is_adapted and not published):
            import torch

            from phalanx.checkpoint.pack.reader import open_pack
            from phalanx.hardware.local.device import gpus
            from phalanx.hardware.portable.operations import begun
            from phalanx_serve.numerics import computing_on, device_named
            from phalanx_serve.traffic.events import ONLY_STREAMED
            from phalanx_serve.weights.open_model import open_model, run_folder

            if packed:
                run_dir = stack.enter_context(run_folder(open_pack(place).index))
                require_trusted_code(run_dir, trust_code=options.trust_code, place=place)
            computing = device_named(device, gpus(), only_cpu=ONLY_STREAMED if options.stream else "")
            model, _ = open_model(
                place if packed else run_dir,
                stream=options.stream,
                memory_bytes=options.memory,
                dtype=getattr(torch, dtype),
                step=step,
            )
            if device == "auto" and begun():  # the run has portable numerics, which need a CPU
                computing = torch.device("cpu")
            with computing_on(computing, f"the weights in {dtype}"):
                model.to(computing)
        pieces = continued(
            run_dir,
            options.prompt,
            tokens=options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            step=step,
            chat=options.chat,
            model=model,
            device=device,
            dtype=dtype,
        )
        if options.as_json:
            click.echo(json.dumps({"prompt": options.prompt, "text": "".join(pieces)}))
            return
        if not options.chat:
            click.echo(options.prompt, data_output(), nl=False)
        for piece in pieces:
            click.echo(piece, data_output(), nl=False)
        click.echo()
