"""Tasks of kind ``generation``: greedy text after each context, compared with the accepted answers (exact match).

The text is written as the samples of a run are (``phalanx.train.evaluation.samples``), so layouts with one hash of the weights have one score.
Compared is the text before the first string of ``until``, or all of it, without white space at both ends (``str.strip``). Answers are
stripped alike, and nothing else is changed. Items share micro-batches: each costs at most ``max_tokens`` sequences of a forward pass, but for
the padding of the last micro-batch.

``encode_task`` encodes tasks of every kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.train.evaluation.prompts import Prompt, prompt_tokens
from phalanx.train.evaluation.tasks import (
    Item,
    ScoredSequence,
    Task,
    TaskError,
    sequences_of,
    share_of_right,
)

if TYPE_CHECKING:  # tasks are encoded before torch is imported
    from phalanx.train.evaluation.samples import Continuation


@dataclass(frozen=True)
class EncodedTask:
    """A task with what the model reads: sequences that are scored, or prompts that are continued."""

    task: Task
    sequences: list[ScoredSequence]
    """None for kind ``generation``."""
    prompts: list[Prompt]
    """For kind ``generation`` one of each item."""


def encode_task(task: Task, tokenizer: Tokenizer, seq_len: int) -> EncodedTask:
    """Encode a task for a model that reads ``seq_len`` tokens. Raises ``TaskError`` for an item that does not fit."""
    if task.kind != "generation":
        return EncodedTask(task, sequences_of(task, tokenizer, seq_len), [])
    prompts = []
    for number, item in enumerate(task.items, 1):
        prompt = Prompt(prompt_tokens(item.context, tokenizer), item.max_tokens, until=item.until)
        if len(prompt.tokens) + prompt.most > seq_len + 1:  # the last token that is written is not read
            raise TaskError(
                f"task {task.name}, item {number}: the context has {len(prompt.tokens):,} tokens and max_tokens is {prompt.most:,}, and the "
                f"model reads {seq_len:,} (train.seq_len); shorten the context, or lower max_tokens"
            )
        prompts.append(prompt)
    return EncodedTask(task, [], prompts)


@dataclass(frozen=True)
class GeneratedAnswer:
    """The answer that the model writes for an item."""

    text: str
    """Before the first string of ``until``, stripped."""
    is_right: bool
    is_finite: bool
    """False if a token was chosen where a log-probability is not finite."""


def generated_answers(
    task: Task, continuations: Sequence[Continuation], tokenizer: Tokenizer
) -> list[GeneratedAnswer]:
    """Return the answer to each item of a task of kind ``generation`` in the continuations of its prompts."""
    answers = []
    for item, continuation in zip(task.items, continuations, strict=True):
        text = answer_in(tokenizer.decode(continuation.tokens, at_start=False), item)
        answers.append(GeneratedAnswer(text, text in item.continuations, continuation.is_finite))
    return answers


def answer_in(text: str, item: Item) -> str:
    """Return the part of a generated text that is compared with the answers of ``item``."""
    end = min((place for stop in item.until if (place := text.find(stop)) >= 0), default=len(text))
    return text[:end].strip()


def generation_figures(answers: Sequence[GeneratedAnswer]) -> dict[str, float]:
    """Return ``exact_match`` and its standard error, ``exact_match_error``; NaN if an answer is not finite."""
    results = share_of_right("exact_match", (answer.is_right for answer in answers))
    return results if all(answer.is_finite for answer in answers) else dict.fromkeys(results, math.nan)
