"""Text generation from a run directory or a checkpoint: ``phalanx generate``, and the sample at the end of a run.

A transformer runs in ``phalanx_serve.engine`` with one request, on the device of its weights. The checks and the code
are those of ``phalanx serve``. The command uses exact numerics for a run with portable numerics on a CPU, else fast
ones. A user's own model has no KV cache: each token takes a pass over the full text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch

from phalanx.checkpoint.interop.huggingface.stored_folder import run_or_stand_in
from phalanx.hardware.local.device import gpus
from phalanx.hardware.portable.operations import begin as begin_portable
from phalanx.model.custom import Chain
from phalanx.model.transformer import Transformer
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.spec import ModelSpec, SampleSpec
from phalanx.train.score import restored_model
from phalanx_serve import prompt as prompts
from phalanx_serve.engine.engine import Engine
from phalanx_serve.engine.model_runner import require_computable
from phalanx_serve.engine.sampler import require_sampling
from phalanx_serve.http.detokenizer import IncrementalDetokenizer
from phalanx_serve.numerics import Numerics, computing_on, device_named
from phalanx_serve.served.opened import turns
from phalanx_serve.traffic.events import Ended, EngineOutput, Request, Sampling, Token
from phalanx_serve.traffic.scheduler import PAGE

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
    """Return text that continues ``prompt``, at most ``tokens`` tokens, without the prompt.

    ``run_dir`` is a run directory, or a folder of Hugging Face.

    The tokenizer's start tokens precede the prompt. Any of the model's end tokens ends the text. With ``chat`` the
    prompt is a user's message, which the run's chat template frames. The same seed gives the same text.

    ``temperature`` 0 takes the likeliest token; ``top_k`` 0 and ``top_p`` 1 keep all tokens. ``device`` is "cpu",
    "cuda", "cuda:1", or "auto": a GPU if there is one, but the CPU for a run with portable numerics. Another kind of
    device may round to another text.

    Raises ``RunDirectoryError`` if the run has no checkpoint, ``CheckpointError``, ``DataError`` without a tokenizer
    or chat template, and ``ValueError`` for numbers out of range.
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
    """Yield the text that continues ``prompt``, piece by piece, at most ``tokens`` tokens; it ends with the document.

    With ``chat`` the prompt is a user's message, framed by the run's chat template, and the text is the answer.
    ``model`` replaces the run's own model if it is open already (``phalanx_serve.weights``); ``step``, ``device`` and
    ``dtype`` are then ignored. ``dtype`` is PyTorch's name of the format to compute in.

    ``device`` is "cpu", "cuda", "cuda:1", or "auto": a GPU if there is one, but the CPU for a run with portable
    numerics. On a CPU, the text of such a run has exact numerics, as ``phalanx serve`` generates it on any machine.

    The other arguments are those of ``phalanx_serve.generate.generate``. Raises the errors of that function and of
    ``load_model``, at once; for logits that are not finite, while the text is read.
    """
    tokenizer = prompts.load_run_tokenizer(run_dir)
    published = prompts.published_with(run_dir, tokenizer)
    templates = prompts.template_folder(run_dir, published)
    prompt_ids = (
        prompts.encode_chat(templates, tokenizer, prompt)
        if chat
        else prompts.encode_prompt(tokenizer, prompt)
    )
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
        stop=prompts.stop_tokens(published, tokenizer, templates),
        vocab_size=tokenizer.vocab_size,
        numerics="exact" if exact else "fast",
    )
    return _text(ids, IncrementalDetokenizer(tokenizer, at_start=not prompt and not chat))


def _text(ids: Iterator[int], detokenizer: IncrementalDetokenizer) -> Iterator[str]:
    """Yield the text of ids as it becomes certain."""
    for token in ids:
        yield detokenizer.feed(token)
    yield detokenizer.flush()


def sample_text(run_dir: Path, sample: SampleSpec) -> str:
    """Return the prompt and its continuation by the run's newest checkpoint.

    A run that was trained on CUDA is sampled on a GPU if there is one and its numerics are not portable; others on
    the CPU. One kind of device gives the same text every time. Raises the errors of ``continued``.
    """
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
"""Prompt tokens per prefill chunk."""


def load_model(
    run_dir: Path,
    step: int | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Transformer | Chain, ModelSpec]:
    """Load the model of a run with the weights of ``step``, or of the newest readable step.

    Reads ``run.toml`` and ``checkpoints/``, and of a checkpoint only the weights (stored as fp32, returned as
    ``dtype``). Without ``step``, a damaged checkpoint is skipped with a warning. For a run with portable numerics,
    this process computes with portable kernels on the CPU from then on.

    Raises RunDirectoryError if the run has no checkpoint, NoSuchStepError, NotPortableError, DeviceMemoryError if a
    GPU lacks memory for the weights, and the errors of ``restore``.
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
    """Yield up to ``tokens`` ids that continue the prompt; end before the first id in ``stop``.

    ``temperature`` 0 takes the likeliest token; ``top_k`` 0 and ``top_p`` 1 keep all tokens. ``context`` is the most
    tokens, prompt included, that are cached at once; 0 sets no limit. ``vocab_size`` is that of the tokenizer: larger
    ids are not drawn; 0 sets no limit.

    With ``numerics`` "exact" the logits are those of ``phalanx serve``, and this process computes with portable
    kernels from then on. Memory: twice the keys and values of prompt and ``tokens``. A custom model has no such
    cache: each token takes a pass over the full text.

    Raises ValueError at once for an empty prompt, unknown ids, numbers out of range, or too long a text, and later
    for logits that are not finite.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, vocab_size=vocab_size)
    length = len(prompt_ids) + tokens
    request = Request("text", tuple(prompt_ids), tokens, sampling, frozenset(stop))
    require_computable(request, model.spec.vocab_size, context or length)
    require_sampling(sampling)
    if isinstance(model, Transformer):
        return _tokens(_outputs(_engine_of(model, length, numerics), request))
    return _tokens(turns(model, request))


def _engine_of(model: Transformer, length: int, numerics: Numerics) -> Engine:
    """Return an engine with pages for one text of ``length`` tokens, without a prefix cache."""
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


def _outputs(engine: Engine, request: Request) -> Iterator[EngineOutput]:
    """Yield the outputs of a request as the engine computes them."""
    engine.submit(request)
    while engine.busy:
        yield from engine.step()


def _tokens(outputs: Iterator[EngineOutput]) -> Iterator[int]:
    """Yield the ids of the tokens among the outputs of a request. Raises ValueError if it fails."""
    for output in outputs:
        if isinstance(output, Token):
            yield output.id
        elif isinstance(output, Ended) and output.outcome == "error":
            raise ValueError(output.text)
