"""One text on its way to a client: tokens become certain text, up to a stop string, and are counted."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from phalanx.serve.http.messages.requests import RefusedError
from phalanx.serve.http.served.model_text import ModelText
from phalanx.serve.http.worker import WorkerPort
from phalanx.serve.stop_strings import StopStrings
from phalanx.serve.text_stream import TextStream
from phalanx.traffic.requests import Ended, PromptScored, Request, Token


@dataclass
class Piece:
    """What is sent of a text at once."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    """The tokens that came with it: their text may be held back, and come with a later piece."""
    scored: tuple[float, ...] | None = None
    finish: str = ""
    cached_tokens: int = 0


async def pieces(
    port: WorkerPort, request: Request, model: ModelText, stops: list[str], *, at_start: bool
) -> AsyncGenerator[Piece]:
    """The pieces of a request's text; the last one has ``finish``. Raises RefusedError if it cannot be computed.

    Left early, or by a stop string, the request is cancelled.
    """
    vocab_size = model.tokenizer.vocab_size
    stream = TextStream(model.tokenizer, at_start=at_start, known=model.texts)
    stop = StopStrings(stops)
    async with aclosing(port.submit(request)) as told:
        async for one in told:
            if isinstance(one, Token):
                text, stopped = stop.feed(stream.feed(one.id) if one.id < vocab_size else "")
                if stopped:
                    yield Piece(text, [one], finish="stop")
                    return
                yield Piece(text, [one])
            elif isinstance(one, PromptScored):
                yield Piece(scored=one.logprobs)
            elif isinstance(one, Ended):
                if one.outcome in ("error", "cancelled"):
                    raise RefusedError(one.text or "the request was given up", status=500)
                text = stop.feed(stream.flush())[0] + stop.flush()
                finish = "stop" if stop.stopped else one.outcome
                yield Piece(text, finish=finish, cached_tokens=one.cached_tokens)
