"""Answers in the forms of OpenAI's two interfaces: whole, in chunks, and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.serve.http.answers.course import Piece
from phalanx.serve.http.messages.requests import RefusedError
from phalanx.traffic.requests import Token

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


def error_body(error: RefusedError) -> dict[str, Any]:
    """The body of an error."""
    kind = _TYPES.get(error.status, "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code or None}}


_HOLE = "\ue000 text \ue000"
"""A text that no field of an event holds by chance."""


def event_of(content: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


@dataclass
class Form:
    """What the choices of one answer have in common, and how they are written."""

    id: str
    created: int
    model: str
    weights: str
    """The hash of the weights that answer at present."""
    numerics_id: str
    chat: bool
    tokenizer: Tokenizer
    logprobs: int
    """Others told with each token; -1 for no log-probabilities."""
    token_ids: bool
    offsets: dict[int, int] = field(default_factory=dict)
    """For each choice, the characters that its tokens had so far."""
    _around: dict[tuple[int, str], tuple[bytes, bytes]] = field(default_factory=dict)
    """For each choice and its weights, what stands before and after the text of an event that has nothing else to tell."""

    def made_by(self, tokens: Sequence[Token]) -> None:
        """Names the weights of these tokens from now on, those of the last one where they differ."""
        if tokens and tokens[-1].weights:
            self.weights = tokens[-1].weights

    @property
    def plain(self) -> bool:
        """True if events within a text tell its text alone."""
        return self.logprobs < 0 and not self.token_ids

    def text_event(self, index: int, text: str, more: Mapping[str, None]) -> bytes:
        """The event of a ``chunk`` within a text, with ``more`` fields, where the form is ``plain``.

        Building and encoding the whole chunk for each token takes longer than all else that the gateway does with it.
        """
        around = self._around.get((index, self.weights))
        if around is None:
            chunk = self.envelope([self.chunk(index, Piece(_HOLE), first=False)], chunk=True) | dict(more)
            before, _, after = event_of(chunk).partition(msgspec.json.encode(_HOLE))
            around = self._around[index, self.weights] = (before, after)
        return b"%b%b%b" % (around[0], msgspec.json.encode(text), around[1])

    def envelope(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        """An answer or a chunk of it."""
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": kind + (".chunk" if chunk and self.chat else ""),
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"{self.weights}:{self.numerics_id}",
            "choices": choices,
        }

    def chunk(self, index: int, piece: Piece, *, first: bool) -> dict[str, Any]:
        """A choice of a chunk."""
        choice = self._choice(index, piece)
        if self.chat:
            delta: dict[str, Any] = {"role": "assistant"} if first else {}
            choice["delta"] = delta | ({"content": piece.text} if piece.text or first else {})
        else:
            choice["text"] = piece.text
        return choice

    def whole(self, index: int, piece: Piece) -> dict[str, Any]:
        """A choice of a whole answer."""
        choice = self._choice(index, piece)
        self.made_by(piece.tokens)
        begins = _weights_of(piece.tokens)
        if len(begins) > 1:
            choice["weights"] = begins
        if self.chat:
            choice["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
        else:
            choice["text"] = piece.text
        return choice

    def prompt_chunk(
        self, index: int, text: str, ids: Sequence[int], scored: tuple[float, ...] | None, *, tell: bool
    ) -> dict[str, Any]:
        """What of a choice is about its prompt: its text if it is echoed, and log-probabilities."""
        choice: dict[str, Any] = {"text": text} if text else {}
        if scored is not None and tell:
            choice["prompt_logprobs"] = [None, *scored]
        if scored is not None and text and self.logprobs >= 0:
            tokens = [Token("", 0, one, value) for one, value in zip(ids, (0.0, *scored), strict=True)]
            choice["logprobs"] = self._completion_logprobs(index, tokens)
            choice["logprobs"]["token_logprobs"][0] = None
        self.offsets[index] = len(text)
        if self.token_ids:
            choice["prompt_token_ids"] = list(ids)
        return choice

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": piece.finish or None, "logprobs": None}
        if self.logprobs >= 0 and piece.tokens:
            if self.chat:
                choice["logprobs"] = {
                    "content": [self._chat_logprob(one) for one in piece.tokens],
                    "refusal": None,
                }
            else:
                choice["logprobs"] = self._completion_logprobs(index, piece.tokens)
        if self.token_ids:
            choice["token_ids"] = [one.id for one in piece.tokens]
        return choice

    def _word(self, token: int) -> str:
        known = 0 <= token < self.tokenizer.vocab_size
        return self.tokenizer.decode([token], at_start=False) if known else f"<{token}>"

    def _chat_logprob(self, token: Token) -> dict[str, Any]:
        def one(number: int, logprob: float) -> dict[str, Any]:
            word = self._word(number)
            return {"token": word, "logprob": _finite(logprob), "bytes": list(word.encode())}

        return one(token.id, token.logprob) | {"top_logprobs": [one(*other) for other in token.top]}

    def _completion_logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        words = [self._word(token.id) for token in tokens]
        offsets = []
        for word in words:
            offsets.append(self.offsets.get(index, 0))
            self.offsets[index] = offsets[-1] + len(word)
        return {
            "tokens": words,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            # Different ids may read alike, as parts of characters do: of those the likeliest is told.
            "top_logprobs": [{self._word(n): _finite(p) for n, p in reversed(token.top)} for token in tokens],
            "text_offset": offsets,
        }


def joined(parts: Sequence[Piece]) -> Piece:
    """All pieces of a text as one."""
    last = parts[-1]
    tokens = [token for part in parts for token in part.tokens]
    scored = next((part.scored for part in parts if part.scored is not None), None)
    return Piece("".join(part.text for part in parts), tokens, scored, last.finish, last.cached_tokens)


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """What an answer has cost, in tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _weights_of(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """The weights that made a text, each with the place of its first token."""
    begins: list[dict[str, Any]] = []
    for number, token in enumerate(tokens):
        if not begins or begins[-1]["weights"] != token.weights:
            begins.append({"from_token": number, "weights": token.weights})
    return begins


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no infinity; OpenAI's own lowest value.
