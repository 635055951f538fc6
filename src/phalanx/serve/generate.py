"""Text from a checkpoint: restore the weights alone, and have the engine continue the prompt.

A transformer is a client of ``phalanx.serve.engine`` with one request, where its weights are: the same checks and the same code that answer for
``phalanx serve``. The command has exact numerics for a run of portable numerics on a CPU, and fast ones else. A user's own model, whose blocks
keep nothing, is decoded here, and passes over the whole text for each token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from phalanx.hardware.portable.operations import begin as begin_portable
from phalanx.model.custom import Chain
from phalanx.model.transformer import Transformer, logits
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.spec import ModelSpec
from phalanx.serve.computing_device import computing_on
from phalanx.serve.engine.engine import Engine
from phalanx.serve.engine.supported import require_computable
from phalanx.serve.numerics import Numerics
from phalanx.serve.sampling import draw, require_sampling
from phalanx.traffic.block_table import PAGE
from phalanx.traffic.requests import Ended, Request, Sampling, Token
from phalanx.train.score.score import restored_model

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
