"""Requests for text and engine outputs: the values that engine, HTTP server, router and simulator exchange.

A token's bits belong to its request: no value here depends on the worker, on the other requests of a batch, or on the chunks of a prompt. A
request that moves to another worker is the same request with the tokens that its client has. By the counter-based sampling
(``phalanx_serve.engine.sampler``) its next token is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["stop", "length", "cancelled", "error"]
"""Why a request ended: at a stop token, at ``max_tokens``, because its client cancelled or left, or by the error in ``Ended.text``."""


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from its logits; temperature 0 takes the likeliest."""

    temperature: float = 1.0
    top_k: int = 0
    """The likeliest tokens that are left in; 0 leaves in all."""
    top_p: float = 1.0
    """Keeps of these the smallest set that holds so much of the probability."""
    min_p: float = 0.0
    """Keeps of these those at least so likely as this share of the likeliest."""
    seed: int = 0
    choice: int = 0
    """The index of this text among the ``n`` of a request; each draws other numbers."""
    vocab_size: int = 0
    """Ids from here on are never drawn: a model may embed more than its tokenizer has. 0 leaves all in."""


@dataclass(frozen=True)
class Request:
    """A text to continue."""

    id: str
    """Unique among those that a worker holds."""
    prompt: tuple[int, ...]
    max_tokens: int
    """Tokens to generate at most, including those in ``told``."""
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    """Ids that end the text; the one that does is not returned."""
    top_logprobs: int = -1
    """Number of top log-probabilities of each token; -1 for no log-probabilities."""
    prompt_logprobs: bool = False
    """True if log-probabilities of the prompt's tokens are returned (``PromptScored``)."""
    told: tuple[int, ...] = ()
    """Tokens that were generated before the request came to this worker."""


@dataclass(frozen=True)
class Token:
    """One more token of a request's text."""

    request: str
    index: int
    """Its place in the generated text, from 0."""
    id: int
    logprob: float = 0.0
    """In nats, of the model's own distribution (temperature 1, nothing cut), whatever ``Sampling`` says."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities, falling; ties by lower id."""
    weights: str = ""
    """The weights that made it, of several with ``+`` between; empty where the worker has no others than those it began with."""


@dataclass(frozen=True)
class PromptScored:
    """The log-probabilities of a prompt's tokens after the first, in nats."""

    request: str
    logprobs: tuple[float, ...] = field(default=())
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each, the likeliest tokens as ``Token.top`` has them; empty unless ``Request.top_logprobs`` is above 0."""


@dataclass(frozen=True)
class Ended:
    """The last output of a request."""

    request: str
    outcome: Outcome
    text: str = ""
    cached_tokens: int = 0
    """Prompt tokens whose pages were cached already."""


EngineOutput = Token | PromptScored | Ended
"""An output of an engine for one of its requests."""
