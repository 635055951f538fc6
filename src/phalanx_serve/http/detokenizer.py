"""Detokenizer: token ids become text while they arrive, cut before the first stop string.

A token of a byte-level tokenizer is a string of bytes that can end within a character. Decoding it alone would print U+FFFD where an
emoji is about to follow. ``IncrementalDetokenizer`` therefore holds back text that may still change. For any ids, the texts that it
returns and its flush together equal the decoding of all ids at once.

``StopStrings`` holds back the longest end of the text that begins a stop string. For any cut of the text into pieces, it returns
exactly the text up to where a naive search finds the first stop string.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx_serve.http.protocol import RefusedError
from phalanx_serve.http.worker import WorkerPort
from phalanx_serve.prompt import ModelText
from phalanx_serve.traffic.events import Ended, PromptScored, Request, Token

_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Incremental decoder of ids to text; special tokens have no text."""

    def __init__(
        self, tokenizer: Tokenizer, *, at_start: bool = True, token_texts: dict[int, str] | None = None
    ) -> None:
        """Begin a text ``at_start``; otherwise the ids continue one, such as a prompt.

        ``token_texts`` caches the texts of ids that are whole characters within a text; None makes a new cache. All
        detokenizers of a tokenizer may share it.
        """
        self._tokenizer = tokenizer
        self._at_start = at_start
        self._token_texts = {} if token_texts is None else token_texts
        self._pending: list[int] = []

    def feed(self, token: int) -> str:
        """Return the text that is certain after one more id: often the token's own, sometimes none.

        Bytes of an incomplete character are held back; ids without bytes give no text. Raises ValueError for an id
        outside the tokenizer's vocabulary.
        """
        is_within = not self._pending and not self._at_start
        if is_within and (token_text := self._token_texts.get(token)) is not None:
            return token_text
        if not 0 <= token < self._tokenizer.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {self._tokenizer.vocab_size}")
        if self._tokenizer.byte_lengths[token] == 0:
            return ""
        self._pending.append(token)
        text = self._decode(self._pending)
        if not text.endswith(_REPLACEMENT):
            if is_within:
                self._token_texts[token] = text
            self._pending.clear()
            self._at_start = False
            return text
        # A cut that does not change the decoding is between characters: the text before it is certain.
        before, last = self._pending[:-1], self._pending[-1:]
        certain = self._decode(before)
        if not before or certain + self._tokenizer.decode(last, at_start=False) != text:
            return ""
        self._pending = last
        self._at_start = False
        return certain

    def flush(self) -> str:
        """Return the text that is held back, with U+FFFD for a character that was never finished."""
        text = self._decode(self._pending)
        self._pending.clear()
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, at_start=self._at_start)


class StopStrings:
    """Filter that passes text up to the first stop string. If two begin at one position, either ends the text
    there.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Begin without text. Raises ValueError if one of ``stops`` is empty."""
        if not all(stops):
            raise ValueError("stop: an empty string would end every text; leave it out")
        self._stops = tuple(stops)
        self._pending = ""
        self._stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text that is certain after more of it, and True if a stop string has occurred; no text follows
        it.

        The earliest stop string cuts the text. An end that may begin one is held back.
        """
        if self._stopped:
            return "", True
        if not self._stops:
            return text, False
        text_so_far = self._pending + text
        stop_at = min((place for stop in self._stops if (place := text_so_far.find(stop)) >= 0), default=-1)
        certain = len(text_so_far) - self._partial_stop(text_so_far)
        if stop_at >= 0 and stop_at <= certain:
            self._pending, self._stopped = "", True
            return text_so_far[:stop_at], True
        # A longer stop string that begins before ``stop_at`` may still be incomplete.
        self._pending = text_so_far[certain:]
        return text_so_far[:certain], False

    def flush(self) -> str:
        """Return the text that is held back, at the end of all text, up to a stop string in it. Such a string sets ``stopped``."""
        # A stop string may be pending because a longer one, which begins before it, was still incomplete.
        pending, self._pending = self._pending, ""
        places = [place for stop in self._stops if (place := pending.find(stop)) >= 0]
        self._stopped = self._stopped or bool(places)
        return pending[: min(places)] if places else pending

    @property
    def stopped(self) -> bool:
        """True once a stop string was found, at the latest by ``flush``."""
        return self._stopped

    def _partial_stop(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that begins a stop string without being one."""
        for length in range(min(len(text), max(map(len, self._stops), default=1) - 1), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0


@dataclass
class TextDelta:
    """A part of a text that is sent at once."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    """The tokens that came with it. Their text may be held back until a later delta."""
    scored: PromptScored | None = None
    finish: str = ""
    cached_tokens: int = 0

    def without_text(self) -> TextDelta:
        """Return only the fields of the prompt."""
        return replace(self, text="", tokens=[], finish="length" if self.finish else "")


async def text_deltas(
    port: WorkerPort, request: Request, model: ModelText, stops: list[str], *, at_start: bool
) -> AsyncGenerator[TextDelta]:
    """Yield the deltas of a request's text; the last one has ``finish``.

    The request is canceled if the caller leaves early, or at a stop string. Ids beyond the tokenizer's have no text.
    Raises RefusedError (500) if it fails or is canceled elsewhere.
    """
    vocab_size = model.tokenizer.vocab_size
    detokenizer = IncrementalDetokenizer(model.tokenizer, at_start=at_start, token_texts=model.texts)
    stop = StopStrings(stops)
    async with aclosing(port.submit(request)) as outputs:
        async for output in outputs:
            if isinstance(output, Token):
                text, stopped = stop.feed(detokenizer.feed(output.id) if output.id < vocab_size else "")
                if stopped:
                    yield TextDelta(text, [output], finish="stop")
                    return
                yield TextDelta(text, [output])
            elif isinstance(output, PromptScored):
                yield TextDelta(scored=output)
            elif isinstance(output, Ended):
                if output.outcome in ("error", "cancelled"):
                    raise RefusedError(output.text or "the request was given up", status=500)
                text = stop.feed(detokenizer.flush())[0] + stop.flush()
                finish = "stop" if stop.stopped else output.outcome
                yield TextDelta(text, finish=finish, cached_tokens=output.cached_tokens)
