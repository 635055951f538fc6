"""Text from a run directory or a checkpoint: the continuation of a prompt, and the sample with which a run ends.

A transformer is a client of ``phalanx_serve.engine`` with one request, where its weights are: the same checks and the same code that answer for
``phalanx serve``. The command has exact numerics for a run of portable numerics on a CPU, and fast ones else. A user's own model, whose blocks
keep nothing, is decoded here, and passes over the whole text for each token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint.interop.huggingface.stored_folder import run_or_stand_in
from phalanx.hardware.local.device import gpus
from phalanx.hardware.portable.operations import begin as begin_portable
from phalanx.model.custom import Chain
from phalanx.model.transformer import Transformer, logits
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.spec import ModelSpec, SampleSpec
from phalanx.train.score import restored_model
from phalanx_serve.engine.engine import Engine
from phalanx_serve.engine.model_runner import require_computable
from phalanx_serve.engine.sampler import draw, require_sampling
from phalanx_serve.http.detokenizer import IncrementalDetokenizer
from phalanx_serve.numerics import Numerics, computing_on, device_named
from phalanx_serve.prompt import (
    encode_chat,
    encode_prompt,
    load_run_tokenizer,
    published_with,
    stop_tokens,
    template_folder,
)
from phalanx_serve.traffic.block_table import PAGE
from phalanx_serve.traffic.events import Ended, Request, Sampling, Token

# The Python interface.


def generate_text(
    run_dir: Path | str,
    prompt: str = "",
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    step: int | None = None,
    chat: bool = False,
    device: str = "auto",
) -> str:
    """Returns text that continues ``prompt``, at most ``tokens`` tokens, without the prompt.

    ``run_dir`` is a run directory, or a folder of Hugging Face.

    What the tokenizer puts before each text comes before the prompt; any of the model's end tokens ends the text. With ``chat`` the
    prompt is a user's message, which the chat template of an imported model frames. The same seed gives the same text. ``temperature`` 0
    takes the likeliest token; ``top_k`` 0 and ``top_p`` 1 leave all in. ``device`` computes: "cpu", "cuda", "cuda:1", or "auto", which is a GPU
    if there is one; another kind may round to another text. Raises ``RunDirectoryError`` where the run has saved nothing,
    ``CheckpointError``, ``DataError`` where it has no tokenizer or no chat template, and ``ValueError`` for numbers out of range.
    """
    with run_or_stand_in(Path(run_dir)) as read:
        return "".join(
            continued(
                read,
                prompt,
                tokens=tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                step=step,
                chat=chat,
                device=device,
            )
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
    ``model`` is one that is open already (``phalanx_serve.weights``), in the place of the run's own; ``step``, ``device`` and ``dtype``,
    PyTorch's name of the format to compute in, say nothing then.
    Else ``device`` computes: "cpu", "cuda", "cuda:1", or "auto", which is a GPU if there is one, but for a run of portable numerics the CPU.
    There the text of such a run is computed with exact numerics: it is what ``phalanx serve`` generates, on any machine.
    The other arguments are those of ``phalanx_serve.generate.generate``. Raises as it and ``load_model`` do, at once.
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


# Text from a model in memory.


_ROWS = 512
"""Tokens of a prompt that go through the model at once."""


def load_model(
    run_dir: Path,
    step: int | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Transformer | Chain, ModelSpec]:
    """The model of a run with the weights of ``step``, or of the newest step that can be read.

    Reads ``run.toml`` and ``checkpoints/``; of a checkpoint, nothing but the weights (fp32 there, ``dtype`` here). Without
    ``step``, a damaged checkpoint is passed over with a warning. Of a run with portable numerics, all that this process computes afterwards on
    the CPU is portable. Raises RunDirectoryError where the run has no checkpoint, NoSuchStepError, NotPortableError, DeviceMemoryError where a GPU has no
    memory for them, and what ``restore`` raises.
    """
    runtime = read_resolved(RunDirectory(run_dir)).runtime
    if runtime.numerics == "portable" and torch.device(device).type == "cpu":
        begin_portable()
    with computing_on(torch.device(device), f"the weights in {str(dtype).removeprefix('torch.')}"):
        model, spec, _ = restored_model(run_dir, step, device=device, dtype=dtype)
    return model, spec


def generate(
    model: Transformer | Chain,
    prompt_ids: Sequence[int],
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Collection[int] = (),
    context: int = 0,
    vocab_size: int = 0,
    numerics: Numerics = "fast",
) -> Iterator[int]:
    """Up to ``tokens`` ids that continue the prompt; ends before the first id in ``stop``.

    ``temperature`` 0 takes the likeliest token; ``top_k`` 0 and ``top_p`` 1 leave all tokens in. ``context`` is the most
    tokens, prompt included, that may be held at once; 0 sets no limit. ``vocab_size`` is that of the tokenizer: ids from there on are not
    drawn; 0 leaves all in. With ``numerics`` "exact" the tokens are drawn from the
    very logits of ``phalanx serve``, and this process computes with portable kernels from then on.
    Memory: the keys and values of prompt and ``tokens``, twice. Raises ValueError at once for an empty prompt, unknown ids, numbers out of range, or too long a text;
    and for logits that are not finite when they come.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, vocab_size=vocab_size)
    length = len(prompt_ids) + tokens
    request = Request("text", tuple(prompt_ids), tokens, sampling, frozenset(stop))
    require_computable(request, model.spec.vocab_size, context or length)
    require_sampling(sampling)
    if isinstance(model, Transformer):
        return _from_engine(_engine_of(model, length, numerics), request)
    return _decode(model, list(prompt_ids), length, sampling, frozenset(stop))


def _engine_of(model: Transformer, length: int, numerics: Numerics) -> Engine:
    """An engine for one text of ``length`` tokens."""
    return Engine(
        model,
        model.spec,
        pages=-(-length // PAGE),
        rows=_ROWS,
        numerics=numerics,
        prefix_cache=False,
        context=length,
        weights_id="",
    )


def _from_engine(engine: Engine, request: Request) -> Iterator[int]:
    engine.submit(request)
    while engine.busy:
        for told in engine.step():
            if isinstance(told, Token):
                yield told.id
            elif isinstance(told, Ended) and told.outcome == "error":
                raise ValueError(told.text)


def _decode(
    model: Chain,
    text: list[int],
    length: int,
    sampling: Sampling,
    stop: frozenset[int],
) -> Iterator[int]:
    weight = next(model.parameters())
    cap = model.spec.logit_cap

    def last_logits(hidden: Tensor, weight: Tensor) -> Tensor:
        return logits(hidden[:, -1:], weight, cap)

    for _ in range(length - len(text)):
        # Not around the loop: a generator would leave the mode switched on for whoever consumes it.
        with computing_on(weight.device, f"a pass over {len(text)} tokens"):
            with torch.no_grad():
                ids = torch.tensor([text], device=weight.device)
                scores = model(ids, readout=last_logits)[0, 0]
            token = draw(scores, sampling, len(text))
        if token in stop:
            return
        yield token
        text = [*text, token]
