"""A token drawn by counters: a function of logits, seed, choice and place, with no generator that a process could take with it.

The token is the arg max of ``logit / temperature + gumbel`` over those that are kept (Gumbel-max trick), where a token's number comes from
the words of (seed, choice, place, token) and is rounded to 2^-30, so that another worker draws the same. Ties go to the lower id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.model.random_bits import random_words, stream_key
from phalanx.traffic.requests import Sampling


def draw(logits: Tensor, sampling: Sampling, position: int) -> int:
    """The token at ``position`` of prompt and text, from its finite ``logits`` ``(vocab,)``."""
    if sampling.temperature == 0 or sampling.top_k == 1:
        return int(logits.argmax())
    scores = logits.double().cpu() / sampling.temperature
    kept = _kept(scores, sampling)
    key = stream_key(sampling.seed, f"choice {sampling.choice}, token {position}")
    words = random_words(key, torch.arange(len(scores)))
    uniform = (((words >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52
    gumbel = torch.round(-(-uniform.log()).log() * 2.0**30) * 2.0**-30
    return int((scores + gumbel).masked_fill(~kept, -torch.inf).argmax())


def draw_rows(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """``draw`` for each row of ``logits`` ``(rows, vocab)``."""
    return [draw(*row) for row in zip(logits, samplings, positions, strict=True)]


def _kept(scores: Tensor, sampling: Sampling) -> Tensor:
    """The tokens that are left in, ``(vocab,)``, bool."""
    ordered, ids = scores.sort(descending=True, stable=True)
    count = min(sampling.top_k or len(scores), len(scores))
    probabilities = ordered[:count].softmax(dim=0)
    left = torch.ones(count, dtype=torch.bool)
    if sampling.top_p < 1:
        left &= probabilities.cumsum(0) - probabilities < sampling.top_p
    if sampling.min_p > 0:
        left &= probabilities >= sampling.min_p * probabilities[0]
    left[0] = True
    return torch.zeros(len(scores), dtype=torch.bool).index_fill_(0, ids[:count][left], True)
