"""A request understood: its prompts as ids, its defaults filled in, and whether it can ever be held."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import msgspec

from phalanx.serve.http.access.admission import Demand, pages_of
from phalanx.serve.http.messages.requests import (
    Chat,
    Common,
    Completion,
    RefusedError,
    prompts_of,
    seed_of,
    stops_of,
)
from phalanx.serve.http.served.model_text import ModelText
from phalanx.traffic.pages import PAGE


@dataclass(frozen=True)
class Asked:
    """A request with its prompts encoded and its defaults filled in."""

    body: Common
    prompts: list[list[int]]
    texts: list[str]
    """The prompts to echo; empty where there is nothing to."""
    seed: int
    stops: list[str]
    logprobs: int
    max_tokens: list[int]
    at_start: list[bool]

    @property
    def n(self) -> int:
        return self.body.n or 1

    @property
    def chat(self) -> bool:
        return isinstance(self.body, Chat)

    @property
    def scored(self) -> bool:
        """Whether log-probabilities of prompts are needed."""
        echo = isinstance(self.body, Completion) and bool(self.body.echo) and self.logprobs >= 0
        return self.body.prompt_logprobs not in (None, False) or echo

    @cached_property
    def demand(self) -> Demand:
        """The room that all its texts take at their longest."""
        lengths = zip(self.prompts, self.max_tokens, strict=True)
        pages = sum(pages_of(len(prompt) + most) for prompt, most in lengths)
        return Demand(len(self.prompts) * self.n, pages * self.n, self.prompt_tokens * self.n)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts, each counted once however many choices it has."""
        return sum(map(len, self.prompts))

    @property
    def most_tokens(self) -> int:
        """Tokens of prompts, and of all texts at their longest."""
        return self.prompt_tokens + sum(self.max_tokens) * self.n

    def id(self) -> str:
        """An id that tells the seed, and is the same for a repeated request."""
        sent = msgspec.json.encode(
            [self.prompts, msgspec.to_builtins(self.body) | {"seed": self.seed, "stream": None}]
        )
        digest = hashlib.sha256(sent).hexdigest()[:16]
        return f"{'chatcmpl' if self.chat else 'cmpl'}-{self.seed:x}-{digest}"


@dataclass(frozen=True)
class Room:
    """How long a text may be."""

    context: int
    """Tokens that the model takes."""
    pages: int
    """Pages that there are for its keys and values; 0 where memory is not counted in pages."""

    @property
    def tokens(self) -> int:
        """Tokens that there is room for in every respect."""
        return min(self.context, self.pages * PAGE) if self.pages else self.context

    def require(self, prompt_tokens: int, new_tokens: int, prompt_field: str) -> None:
        """Raises RefusedError for a text that is too long, with the numbers."""
        tokens = prompt_tokens + new_tokens
        field = "max_tokens" if prompt_tokens < self.tokens else prompt_field
        if tokens > self.context:
            raise RefusedError(
                f"a prompt of {prompt_tokens} tokens and {new_tokens} new ones do not fit into the model's context of "
                f"{self.context}: shorten the prompt, or ask for fewer tokens",
                field,
                code="context_length_exceeded",
            )
        if tokens > self.tokens:
            raise RefusedError(
                f"a prompt of {prompt_tokens} tokens and {new_tokens} new ones take {pages_of(tokens)} pages of {PAGE} tokens, and this server "
                f"has {self.pages}: shorten the prompt, ask for fewer tokens, or start the server with more --memory",
                field,
                code="context_length_exceeded",
            )


def understood(body: Completion | Chat, model: ModelText, room: Room, most_prompts: int) -> Asked:
    """What is asked, in ids. Raises RefusedError."""
    if body.model != model.name:
        raise RefusedError(
            f"there is no model {body.model[:100]!r}: this server has {model.name!r}",
            "model",
            404,
            "model_not_found",
        )
    if body.stream_options is not None and not body.stream:
        raise RefusedError("stream_options is for stream: true alone", "stream_options")
    options = body.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise RefusedError("continuous_usage_stats needs include_usage: true", "stream_options")
    if body.top_p == 0:
        raise RefusedError("top_p: above 0; temperature 0 takes the likeliest token", "top_p")
    at_start = [False]
    wanted = body.max_tokens
    if isinstance(body, Chat):
        prompts, texts = [model.chat_ids(body.messages)], [""]
        if body.top_logprobs is not None and not body.logprobs:
            raise RefusedError("top_logprobs needs logprobs: true", "top_logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else -1
        wanted = wanted if body.max_completion_tokens is None else body.max_completion_tokens
    else:
        given = prompts_of(body)
        if len(given) > most_prompts:
            raise RefusedError(f"prompt: {len(given)} prompts; at most {most_prompts} at once", "prompt")
        prompts = [model.prompt_ids(one) for one in given]
        at_start = [one == "" for one in given]
        echoed = (one if isinstance(one, str) else model.tokenizer.decode(one) for one in given)
        texts = list(echoed) if body.echo else [""] * len(given)
        logprobs = -1 if body.logprobs is None else body.logprobs
        wanted = 16 if wanted is None else wanted
    lengths = []
    for prompt in prompts:
        room.require(len(prompt), wanted or 1, "messages" if isinstance(body, Chat) else "prompt")
        lengths.append(wanted or room.tokens - len(prompt))
    return Asked(body, prompts, texts, seed_of(body), stops_of(body), logprobs, lengths, at_start)
