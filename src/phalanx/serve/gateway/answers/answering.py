"""From an admitted request to its answer: the texts of all prompts and choices, whole or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from phalanx.serve.gateway.answers.course import Piece, pieces
from phalanx.serve.gateway.counts import Counts
from phalanx.serve.gateway.messages.forms import Form, error_body, event_of, joined, usage
from phalanx.serve.gateway.messages.requests import (
    Chat,
    Common,
    Completion,
    RefusedError,
    prompts_of,
    seed_of,
    stops_of,
)
from phalanx.serve.gateway.served.model_text import ModelText
from phalanx.serve.gateway.worker import WorkerPort
from phalanx.traffic.requests import Request, Sampling

_BEHIND = 64
"""Pieces that may wait for a slow reader before their texts wait too."""
_numbers = count()


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

    def id(self) -> str:
        """An id that tells the seed, and is the same for a repeated request."""
        sent = msgspec.json.encode(
            [self.prompts, msgspec.to_builtins(self.body) | {"seed": self.seed, "stream": None}]
        )
        digest = hashlib.sha256(sent).hexdigest()[:16]
        return f"{'chatcmpl' if self.chat else 'cmpl'}-{self.seed:x}-{digest}"


def understood(body: Completion | Chat, model: ModelText, context: int, most_prompts: int) -> Asked:
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
        left = context - len(prompt)
        if left < 1 or (wanted or 1) > left:
            raise RefusedError(
                f"a prompt of {len(prompt)} tokens and {wanted or 1} new ones do not fit into the model's context of "
                f"{context}: shorten the prompt, or ask for fewer tokens",
                "max_tokens" if left >= 1 else "prompt" if not isinstance(body, Chat) else "messages",
                code="context_length_exceeded",
            )
        lengths.append(wanted or left)
    return Asked(body, prompts, texts, seed_of(body), stops_of(body), logprobs, lengths, at_start)


class Answering:
    """The texts of one request, on their way to its client."""

    def __init__(self, asked: Asked, model: ModelText, port: WorkerPort, counts: Counts, beside: int) -> None:
        self._asked, self._model, self._port, self._counts, self._beside = asked, model, port, counts, beside
        identity = port.identity
        self._form = Form(
            asked.id(),
            int(time.time()),
            model.name,
            f"{identity.weights_sha}:{identity.numerics_id}",
            asked.chat,
            model.tokenizer,
            asked.logprobs,
            asked.body.return_token_ids,
        )
        self._generated = self._cached = 0
        self._prompt_tokens = sum(map(len, asked.prompts))
        counts.prompt_tokens += self._prompt_tokens

    async def _text(self, index: int) -> AsyncGenerator[Piece]:
        asked, body = self._asked, self._asked.body
        number, choice = divmod(index, asked.n)
        request = Request(
            id=f"{self._form.id}-{next(_numbers)}",
            prompt=tuple(asked.prompts[number]),
            max_tokens=asked.max_tokens[number],
            sampling=Sampling(
                temperature=1.0 if body.temperature is None else body.temperature,
                top_k=max(0, body.top_k or 0),
                top_p=1.0 if body.top_p is None else body.top_p,
                min_p=body.min_p or 0.0,
                seed=asked.seed,
                choice=body.choice + choice,
            ),
            stop_tokens=frozenset() if body.ignore_eos else self._model.stop_tokens,
            top_logprobs=asked.logprobs,
            prompt_logprobs=asked.scored,
        )
        self._counts.queried_tokens += len(request.prompt)
        began = last = time.monotonic()
        first, finish = True, ""
        try:
            course = pieces(self._port, request, self._model, asked.stops, at_start=asked.at_start[number])
            async with aclosing(course) as steps:
                async for piece in steps:
                    now = time.monotonic()
                    if piece.tokens:
                        self._generated += len(piece.tokens)
                        self._counts.generated_tokens += len(piece.tokens)
                        (self._counts.first_token if first else self._counts.next_token).observe(now - last)
                        first, last = False, now
                    if piece.finish:
                        finish = piece.finish
                        self._cached += piece.cached_tokens
                        self._counts.cached_tokens += piece.cached_tokens
                    yield piece
        finally:
            if finish:
                self._counts.ended(finish, time.monotonic() - began, self._beside)
            else:
                self._counts.cancelled += 1

    def _about_prompt(self, index: int, scored: tuple[float, ...] | None) -> dict[str, Any]:
        asked = self._asked
        number = index // asked.n
        tell = asked.body.prompt_logprobs not in (None, False)
        return self._form.prompt_chunk(index, asked.texts[number], asked.prompts[number], scored, tell=tell)

    def _usage(self) -> dict[str, Any]:
        return usage(self._prompt_tokens, self._generated, self._cached)

    async def whole(self) -> dict[str, Any]:
        """The answer at once. Raises RefusedError; then, or when it is given up, all its texts are."""

        async def one(index: int) -> dict[str, Any]:
            piece = joined([piece async for piece in self._text(index)])
            before = self._about_prompt(index, piece.scored)
            choice = self._form.whole(index, piece)
            return _together(before, choice)

        choices: list[dict[str, Any]] = []
        async with _AllOrNone() as group:
            tasks = [group.start(one(index)) for index in range(len(self._asked.prompts) * self._asked.n)]
            choices = [await task for task in tasks]
        return self._form.envelope(choices, chunk=False) | {"usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes]:
        """The answer as server-sent events; an error in the middle is the last of them."""
        total = len(self._asked.prompts) * self._asked.n
        options = self._asked.body.stream_options
        with_usage = options is not None and options.include_usage
        more: dict[str, None] = {"usage": None} if with_usage else {}
        # A queue between tasks wakes the event loop once more for each token.
        source = self._events_of(0, more) if total == 1 else self._events_of_all(total, more)
        try:
            async with aclosing(source) as events:
                async for event in events:
                    yield event
        except RefusedError as error:
            yield event_of(error_body(error))
            return
        if with_usage:
            yield event_of(self._form.envelope([], chunk=True) | {"usage": self._usage()})
        yield b"data: [DONE]\n\n"

    async def _events_of(self, index: int, more: Mapping[str, None]) -> AsyncGenerator[bytes]:
        """The events of one text, with ``more`` fields. Raises RefusedError."""
        form, first = self._form, True
        scored: tuple[float, ...] | None = None
        async with aclosing(self._text(index)) as steps:
            async for piece in steps:
                if piece.scored is not None:
                    scored = piece.scored
                    continue
                if form.plain and not piece.finish:
                    if not piece.text:
                        continue
                    if not first:
                        yield form.text_event(index, piece.text, more)
                        continue
                before = self._about_prompt(index, scored) if first else {}
                choice = _together(before, form.chunk(index, piece, first=first))
                first = False
                yield event_of(form.envelope([choice], chunk=True) | more)

    async def _events_of_all(self, total: int, more: Mapping[str, None]) -> AsyncGenerator[bytes]:
        """The events of all texts as they come. Raises RefusedError at the first text that cannot be computed."""
        ready: asyncio.Queue[bytes | RefusedError | None] = asyncio.Queue(_BEHIND)

        async def one(index: int) -> None:
            try:
                async with aclosing(self._events_of(index, more)) as events:
                    async for event in events:
                        await ready.put(event)
                await ready.put(None)
            except RefusedError as error:
                await ready.put(error)

        async with _AllOrNone() as group:
            for index in range(total):
                group.start(one(index))
            left = total
            while left:
                event = await ready.get()
                if isinstance(event, RefusedError):
                    raise event
                left -= event is None
                if event is not None:
                    yield event


def _together(before: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    """A choice with what is told of its prompt put before it."""
    merged = choice | {name: value for name, value in before.items() if name not in ("text", "logprobs")}
    if "text" in before:
        merged["text"] = before["text"] + choice["text"]
    if "logprobs" in before:
        after = choice["logprobs"] or {}
        merged["logprobs"] = {k: v + after.get(k, []) for k, v in before["logprobs"].items()}
    return merged


class _AllOrNone:
    """Tasks of which none goes on after the block is left."""

    async def __aenter__(self) -> _AllOrNone:
        self._tasks: list[asyncio.Task[Any]] = []
        return self

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self._tasks.append(asyncio.create_task(work))
        return self._tasks[-1]

    async def __aexit__(self, *_error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
