"""Text from a checkpoint: restore the weights alone, fill the cache with the prompt, then decode token by token.

Decoding keeps each layer's keys and values (``phalanx.model.layers.cache``), so a token costs one pass over the weights instead of one
over the whole text. A user's own model, whose blocks keep nothing, passes over the whole text for each token. Tokens are drawn by
``phalanx.serve.sampling``, so that a seed gives the same text wherever the logits are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from phalanx.model.custom import Chain
from phalanx.model.facts.stretching import longest_short
from phalanx.model.layers.cache import empty_cache
from phalanx.model.transformer import Transformer, logits
from phalanx.run.spec import ModelSpec
from phalanx.serve.sampling import draw, require_sampling
from phalanx.traffic.requests import Sampling
from phalanx.train.score.restored import restored_model


def load_model(
    run_dir: Path,
    step: int | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Transformer | Chain, ModelSpec]:
    """The model of a run with the weights of ``step``, or of the newest step that can be read.

    Reads ``run.toml`` and ``checkpoints/``; of a checkpoint, nothing but the weights (fp32 there, ``dtype`` here). Without
    ``step``, a damaged checkpoint is passed over with a warning. Raises RunDirectoryError where the run
    has no checkpoint, NoSuchStepError, and what ``restore`` raises.
    """
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
) -> Iterator[int]:
    """Up to ``tokens`` ids that continue the prompt; ends before the first id in ``stop``.

    ``temperature`` 0 takes the likeliest token; ``top_k`` 0 and ``top_p`` 1 leave all tokens in. ``context`` is the most
    tokens, prompt included, that may be held at once; 0 sets no limit. Memory: the cache of prompt and ``tokens``.
    Raises ValueError at once for an empty prompt, unknown ids, numbers out of range, or too long a text.
    """
    vocab_size = model.spec.vocab_size
    _require_prompt(prompt_ids, vocab_size)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    require_sampling(sampling)
    length = len(prompt_ids) + tokens
    if tokens < 1:
        raise ValueError(f"tokens = {tokens}: ask for at least one")
    if context and length > context:
        raise ValueError(
            f"a prompt of {len(prompt_ids)} tokens and {tokens} new ones do not fit into a context of {context}: "
            "shorten the prompt, or ask for fewer tokens"
        )
    return _decode(model, list(prompt_ids), length, sampling, frozenset(stop))


def _require_prompt(prompt_ids: Sequence[int], vocab_size: int) -> None:
    if not prompt_ids:
        raise ValueError("the prompt is empty: begin with the end-of-document token, as encode_prompt does")
    unknown = [token for token in prompt_ids if not 0 <= token < vocab_size]
    if unknown:
        raise ValueError(
            f"token id {unknown[0]} is outside the model's vocabulary of {vocab_size}: encode the prompt with the "
            "run's own tokenizer"
        )


def _decode(
    model: Transformer | Chain,
    prompt_ids: list[int],
    length: int,
    sampling: Sampling,
    stop: frozenset[int],
) -> Iterator[int]:
    weight = next(model.parameters())
    cache = None
    if isinstance(model, Transformer):
        cache = empty_cache(model.spec, 1, length, weight.device, weight.dtype)
    text, unseen = prompt_ids, prompt_ids
    cap = model.spec.logit_cap

    def last_logits(hidden: Tensor, weight: Tensor) -> Tensor:
        return logits(hidden[:, -1:], weight, cap)

    for _ in range(length - len(prompt_ids)):
        # Not around the loop: a generator would leave the mode switched on for whoever consumes it.
        with torch.no_grad():
            if cache is None:
                ids = torch.tensor([text], device=weight.device)
                scores = model(ids, readout=last_logits)[0, 0]
            else:
                ids = torch.tensor([unseen], device=weight.device)
                scores = model(ids, readout=last_logits, cache=cache)[0, 0]
        token = draw(scores, sampling, len(text))
        if token in stop:
            return
        yield token
        text, unseen = [*text, token], [token]
        if isinstance(model, Transformer) and len(text) == longest_short(model.spec) + 1:
            # From here on all positions are rotated by other factors, those of the cached keys too.
            cache, unseen = empty_cache(model.spec, 1, length, weight.device, weight.dtype), text
