"""Text that a run writes after given prompts, by its own forward pass, token by token.

Each token costs one forward pass of all texts that are still being written, as sequences whose last token is unknown
(``phalanx.train.evaluation.scoring``). So a text has the bits of the scores: layouts with one hash of the weights write the same text. There is
no cache of keys and values, whose products have other shapes and other bits.

A sample at a temperature T is the token with the largest sum of its logit and T times Gumbel noise (Maddison et al., arXiv 1411.0030). The
noise comes of the prompt's seed, so that a text differs from that of another step by the weights alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.train.evaluation.prompts import Prompt
from phalanx.train.evaluation.tasks import ScoredSequence, SequenceScore

Score = Callable[[Sequence[ScoredSequence], Tensor | None], Sequence[SequenceScore]]
"""Scores sequences with noise ``(sequences, vocab)`` on the logits, or none, as ``phalanx.train.evaluation.scoring.score_sequences`` does."""


@dataclass(frozen=True)
class Continuation:
    """The text that a model writes after a prompt."""

    tokens: list[int]
    is_finite: bool
    """False if a token was chosen where a log-probability is not finite."""


def continue_prompts(
    prompts: Sequence[Prompt],
    score: Score,
    tokenizer: Tokenizer,
    seq_len: int,
    vocabulary: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[Continuation]:
    """Return the text after each prompt, up to the end of the document or a string of ``until``. The model reads the last ``seq_len`` tokens.

    ``vocabulary`` is the model's. Tokens that only the model has are never chosen. ``on_progress`` is called after each forward pass with the
    number of tokens that are written, and the most that there can be.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    broken: set[int] = set()
    generators = [np.random.default_rng(prompt.seed) for prompt in prompts]
    running, most = list(range(len(prompts))), sum(prompt.most for prompt in prompts)
    while running:
        sequences = [
            ScoredSequence((*prompts[n].tokens, *texts[n], 0)[-seq_len - 1 :], 1, n, 0) for n in running
        ]
        noise = None
        if any(prompts[n].temperature for n in running):
            rows = [_noise(generators[n], prompts[n].temperature, vocabulary) for n in running]
            noise = torch.stack(rows)  # (running texts, vocab)
            noise[:, tokenizer.vocab_size :] = -torch.inf
        elif vocabulary > tokenizer.vocab_size:
            row = torch.zeros(vocabulary)
            row[tokenizer.vocab_size :] = -torch.inf
            noise = row.expand(len(running), -1)  # one row in memory, however many texts there are
        for n, scores in zip(running, score(sequences, noise), strict=True):
            texts[n].append(scores.greedy_tokens[-1])
            if not math.isfinite(scores.log_probabilities[-1]):
                broken.add(n)
        running = [
            n
            for n in running
            if len(texts[n]) < prompts[n].most
            and texts[n][-1] != tokenizer.end_of_document
            and not _has_stop(prompts[n], texts[n], tokenizer)
        ]
        on_progress(sum(map(len, texts)), most)
    return [Continuation(tokens, n not in broken) for n, tokens in enumerate(texts)]


def _has_stop(prompt: Prompt, tokens: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Return True if the decoded ``tokens`` contain a string of ``prompt.until``."""
    if not prompt.until:
        return False
    text = tokenizer.decode(
        tokens, at_start=False
    )  # as a whole: a string may begin in one token and end in another
    return any(stop in text for stop in prompt.until)


def _noise(generator: np.random.Generator, temperature: float, vocabulary: int) -> Tensor:
    """Return Gumbel noise times the temperature, ``(vocab,)``, fp32; zeros at temperature 0."""
    if not temperature:
        return torch.zeros(vocabulary)
    # Computed in fp64, so that the roundings of a processor's logarithms are seldom seen in fp32.
    return torch.from_numpy((temperature * generator.gumbel(size=vocabulary)).astype(np.float32))
