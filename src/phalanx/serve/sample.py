"""Text from a run directory: the continuation of a prompt, and the sample with which a run ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from phalanx.hardware.local.device import gpus
from phalanx.model.custom import Chain
from phalanx.model.transformer import Transformer
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.spec import SampleSpec
from phalanx.serve.computing_device import device_named
from phalanx.serve.generate import generate, load_model
from phalanx.serve.http.detokenizer import IncrementalDetokenizer
from phalanx.serve.prompt import (
    encode_chat,
    encode_prompt,
    load_run_tokenizer,
    published_with,
    stop_tokens,
    template_folder,
)


def continued(
    run_dir: Path,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    step: int | None = None,
    chat: bool = False,
    model: Transformer | Chain | None = None,
    device: str = "auto",
    dtype: str = "float32",
) -> Iterator[str]:
    """Text that continues ``prompt``, piece by piece as it is generated, at most ``tokens`` tokens; ends with the document.

    With ``chat`` the prompt is a user's message, framed by the run's chat template, and the text is the answer.
    ``model`` is one that is open already (``phalanx.serve.weights``), in the place of the run's own; ``step``, ``device`` and ``dtype``,
    PyTorch's name of the format to compute in, say nothing then.
    Else ``device`` computes: "cpu", "cuda", "cuda:1", or "auto", which is a GPU if there is one, but for a run of portable numerics the CPU.
    There the text of such a run is computed with exact numerics: it is what ``phalanx serve`` generates, on any machine.
    The other arguments are those of ``phalanx.serve.generate.generate``. Raises as it and ``load_model`` do, at once.
    """
    tokenizer = load_run_tokenizer(run_dir)
    published = published_with(run_dir, tokenizer)
    templates = template_folder(run_dir, published)
    prompt_ids = encode_chat(templates, tokenizer, prompt) if chat else encode_prompt(tokenizer, prompt)
    portable = read_resolved(RunDirectory(run_dir)).runtime.numerics == "portable"
    if model is None:
        computing = device_named("cpu" if portable and device == "auto" else device, gpus())
        model, _ = load_model(run_dir, step, device=computing, dtype=getattr(torch, dtype))
    exact = portable and next(model.parameters()).device.type == "cpu"
    ids = generate(
        model,
        prompt_ids,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop_tokens(published, tokenizer, templates),
        vocab_size=tokenizer.vocab_size,
        numerics="exact" if exact else "fast",
    )
    return _text(ids, IncrementalDetokenizer(tokenizer, at_start=not prompt and not chat))


def _text(ids: Iterator[int], detokenizer: IncrementalDetokenizer) -> Iterator[str]:
    for token in ids:
        yield detokenizer.feed(token)
    yield detokenizer.flush()


def sample_text(run_dir: Path, sample: SampleSpec) -> str:
    """The prompt and what the newest checkpoint of a run makes of it, on a device of the kind that the run was trained on; on one the same text
    every time."""
    trained_on = read_resolved(RunDirectory(run_dir)).runtime.device
    pieces = continued(
        run_dir,
        sample.prompt,
        tokens=sample.tokens,
        temperature=sample.temperature,
        device="auto" if trained_on == "cuda" else "cpu",
    )
    return sample.prompt + "".join(pieces)
