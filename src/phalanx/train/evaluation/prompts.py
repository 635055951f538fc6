"""Prompts that a run continues: those of its samples, and the contexts of its tasks by generation."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.run.sections.evaluation import PromptSpec


@dataclass(frozen=True)
class Prompt:
    """Tokens that are continued."""

    tokens: tuple[int, ...]
    """At least one."""
    most: int
    """Number of tokens to generate, unless the text ends before."""
    temperature: float = 0.0
    """0 for the most probable tokens."""
    seed: tuple[int, ...] = ()
    """Seed of the noise."""
    until: tuple[str, ...] = ()
    """Strings at which the text ends: no token is generated after one of them."""


def prompt_of(spec: PromptSpec, tokenizer: Tokenizer, seed: int) -> Prompt:
    """Return the prompt of a run's sample; ``seed`` is the run's."""
    tokens = prompt_tokens(spec.prompt, tokenizer)
    return Prompt(tokens, spec.tokens, spec.temperature, (seed, *spec.name.encode()))


def prompt_tokens(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens of a text that is continued, at least one: a document's beginning if it is empty."""
    start = tokenizer.document_start or (() if text else (tokenizer.end_of_document,))
    return (*start, *tokenizer.encode(text))
