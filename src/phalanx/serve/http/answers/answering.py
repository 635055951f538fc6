"""From an admitted request to its answer: the texts of all prompts and choices, whole or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from itertools import count
from typing import Any

from phalanx.serve.http.access.workload import Workload
from phalanx.serve.http.answers.asked import Asked
from phalanx.serve.http.answers.course import Piece, pieces
from phalanx.serve.http.counts import Counts
from phalanx.serve.http.messages.forms import Form, error_body, event_of, joined, usage
from phalanx.serve.http.messages.requests import RefusedError
from phalanx.serve.http.served.model_text import ModelText
from phalanx.serve.http.worker import WorkerPort
from phalanx.traffic.requests import Request, Sampling

_BEHIND = 64
"""Pieces that may wait for a slow reader before their texts wait too."""
_numbers = count()


class Answering:
    """The texts of one request, on their way to its client."""

    def __init__(
        self, asked: Asked, model: ModelText, port: WorkerPort, counts: Counts, workload: Workload
    ) -> None:
        self.asked, self._model, self._port = asked, model, port
        self._counts, self._workload = counts, workload
        identity = port.identity
        self._form = Form(
            asked.id(),
            int(time.time()),
            model.name,
            identity.weights_sha,
            identity.numerics_id,
            asked.chat,
            model.tokenizer,
            asked.logprobs,
            asked.body.return_token_ids,
        )
        self.generated_tokens = self._cached = 0
        """Tokens made so far, and prompt tokens that were held already."""
        counts.prompt_tokens += asked.prompt_tokens
        self._continuous = False

    async def _text(self, index: int) -> AsyncGenerator[Piece]:
        asked, body = self.asked, self.asked.body
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
                        self.generated_tokens += len(piece.tokens)
                        self._counts.generated_tokens += len(piece.tokens)
                        (self._counts.first_token if first else self._counts.next_token).observe(now - last)
                        if first:
                            self._workload.read(len(request.prompt), now)
                        first, last = False, now
                    if piece.finish:
                        finish = piece.finish
                        self._cached += piece.cached_tokens
                        self._counts.cached_tokens += piece.cached_tokens
                    yield piece
        finally:
            if first:
                self._workload.left_unread(len(request.prompt))
            if finish:
                self._counts.ended(finish, time.monotonic() - began)
            else:
                self._counts.cancelled += 1

    def _about_prompt(self, index: int, scored: tuple[float, ...] | None) -> dict[str, Any]:
        asked = self.asked
        number = index // asked.n
        tell = asked.body.prompt_logprobs not in (None, False)
        return self._form.prompt_chunk(index, asked.texts[number], asked.prompts[number], scored, tell=tell)

    def _usage(self) -> dict[str, Any]:
        return usage(self.asked.prompt_tokens, self.generated_tokens, self._cached)

    async def whole(self) -> dict[str, Any]:
        """The answer at once. Raises RefusedError; then, or when it is given up, all its texts are."""

        async def one(index: int) -> dict[str, Any]:
            piece = joined([piece async for piece in self._text(index)])
            before = self._about_prompt(index, piece.scored)
            choice = self._form.whole(index, piece)
            return _together(before, choice)

        choices: list[dict[str, Any]] = []
        async with _AllOrNone() as group:
            tasks = [group.start(one(index)) for index in range(len(self.asked.prompts) * self.asked.n)]
            choices = [await task for task in tasks]
        return self._form.envelope(choices, chunk=False) | {"usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes]:
        """The answer as server-sent events; an error in the middle is the last of them."""
        total = len(self.asked.prompts) * self.asked.n
        options = self.asked.body.stream_options
        with_usage = options is not None and options.include_usage
        self._continuous = options is not None and options.continuous_usage_stats
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
                form.made_by(piece.tokens)
                if form.plain and not piece.finish:
                    if not piece.text:
                        continue
                    if not first and not self._continuous:
                        yield form.text_event(index, piece.text, more)
                        continue
                before = self._about_prompt(index, scored) if first else {}
                choice = _together(before, form.chunk(index, piece, first=first))
                first = False
                used: Mapping[str, Any] = {"usage": self._usage()} if self._continuous else more
                yield event_of(form.envelope([choice], chunk=True) | dict(used))

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
