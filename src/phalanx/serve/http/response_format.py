"""Response bodies of OpenAI's two interfaces: full, in chunks, and errors."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.serve.http.detokenizer import TextDelta
from phalanx.serve.http.protocol import RefusedError
from phalanx.traffic.requests import PromptScored, Token

_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


def error_body(error: RefusedError) -> dict[str, Any]:
    """Return the JSON body of an error."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code or None}}


_TEXT_HOLE = "\ue000 text \ue000"
"""A text that no field of an event has by chance."""


def sse_event(content: Mapping[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


@dataclass
class ResponseFormat:
    """Fields that the choices of one response share, and the encoding of its choices."""

    id: str
    created: int
    model: str
    weights: str
    """The hash of the current weights."""
    numerics_id: str
    bits: str
    """The origin of the bits of tokens and log-probabilities."""
    chat: bool
    tokenizer: Tokenizer
    logprobs: int
    """Top log-probabilities of each token; -1 for no log-probabilities."""
    token_ids: bool
    _offsets: dict[int, TextOffsets] = field(default_factory=dict)
    """For each choice, the places of its tokens in its text."""
    _around: dict[tuple[int, str], tuple[bytes, bytes]] = field(default_factory=dict)
    """For each choice and its weights, the bytes before and after the text of an event that has only text."""

    def set_weights(self, tokens: Sequence[Token]) -> None:
        """Name the weights of the last of these tokens from now on."""
        if tokens and tokens[-1].weights:
            self.weights = tokens[-1].weights

    @property
    def plain(self) -> bool:
        """True if events within a text have its text alone."""
        return self.logprobs < 0 and not self.token_ids

    def text_event(self, index: int, text: str, more: Mapping[str, None]) -> bytes:
        """Encode the event of a ``chunk`` within a text, with ``more`` fields, if the format is ``plain``.

        Building and encoding the full chunk for each token takes longer than everything else that the server does with it.
        """
        around = self._around.get((index, self.weights))
        if around is None:
            chunk = self.envelope([self.chunk(index, TextDelta(_TEXT_HOLE), first=False)], chunk=True) | dict(
                more
            )
            before, _, after = sse_event(chunk).partition(msgspec.json.encode(_TEXT_HOLE))
            around = self._around[index, self.weights] = (before, after)
        return b"%b%b%b" % (around[0], msgspec.json.encode(text), around[1])

    def envelope(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        """Return a response, or a chunk of it."""
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": kind + (".chunk" if chunk and self.chat else ""),
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"{self.weights}:{self.numerics_id}:{self.bits}",
            "choices": choices,
        }

    def chunk(self, index: int, delta: TextDelta, *, first: bool) -> dict[str, Any]:
        """Return a choice of a chunk."""
        choice = self._choice(index, delta)
        if self.chat:
            role: dict[str, Any] = {"role": "assistant"} if first else {}
            choice["delta"] = role | ({"content": delta.text} if delta.text or first else {})
        else:
            choice["text"] = delta.text
        return choice

    def full_choice(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """Return a choice of a full response."""
        choice = self._choice(index, delta)
        self.set_weights(delta.tokens)
        weights = _weights_of(delta.tokens)
        if len(weights) > 1:
            choice["weights"] = weights
        if self.chat:
            choice["message"] = {"role": "assistant", "content": delta.text, "refusal": None}
        else:
            choice["text"] = delta.text
        return choice

    def prompt_fields(
        self,
        index: int,
        text: str,
        ids: Sequence[int],
        scored: PromptScored | None,
        *,
        with_logprobs: bool,
    ) -> dict[str, Any]:
        """Return the fields of a choice about its prompt: its text if it is echoed, and log-probabilities."""
        choice: dict[str, Any] = {"text": text} if text else {}
        if scored is not None and with_logprobs:
            choice["prompt_logprobs"] = [None, *scored.logprobs]
        if scored is not None and text and self.logprobs >= 0:
            # The space that a tokenizer puts before a text is not the text's.
            begins_with_space = b"".join(map(self._bytes, ids)).startswith(b" ")
            self._offsets[index] = TextOffsets(self.tokenizer.prefix_bytes if begins_with_space else 0)
            tops = scored.top or ((),) * len(scored.logprobs)
            tokens = [
                Token("", 0, token_id, value, top)
                for token_id, value, top in zip(ids, (0.0, *scored.logprobs), ((), *tops), strict=True)
            ]
            choice["logprobs"] = self._completion_logprobs(index, tokens)
            choice["logprobs"]["token_logprobs"][0] = choice["logprobs"]["top_logprobs"][0] = None
        if self.token_ids:
            choice["prompt_token_ids"] = list(ids)
        return choice

    def _choice(self, index: int, delta: TextDelta) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": delta.finish or None, "logprobs": None}
        if self.logprobs >= 0 and delta.tokens:
            if self.chat:
                choice["logprobs"] = {
                    "content": [self._chat_logprob(token) for token in delta.tokens],
                    "refusal": None,
                }
            else:
                choice["logprobs"] = self._completion_logprobs(index, delta.tokens)
        if self.token_ids:
            choice["token_ids"] = [token.id for token in delta.tokens]
        return choice

    def _bytes(self, token: int) -> bytes:
        return self.tokenizer.token_bytes(token) if token < self.tokenizer.vocab_size else b""

    def _word(self, token: int) -> str:
        """A token's text; of a part of a character its bytes, as OpenAI writes them."""
        if token >= self.tokenizer.vocab_size:
            return f"<{token}>"
        spelled = self._bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def _chat_logprob(self, token: Token) -> dict[str, Any]:
        def entry(number: int, logprob: float) -> dict[str, Any]:
            return {
                "token": self._word(number),
                "logprob": _finite(logprob),
                "bytes": list(self._bytes(number)),
            }

        return entry(token.id, token.logprob) | {"top_logprobs": [entry(*other) for other in token.top]}

    def _completion_logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        offsets = self._offsets.setdefault(index, TextOffsets())
        return {
            "tokens": [self._word(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            # Different ids may have the same text: the likeliest is returned.
            "top_logprobs": [{self._word(n): _finite(p) for n, p in reversed(token.top)} for token in tokens],
            "text_offset": [offsets.place(self._bytes(token.id)) for token in tokens],
        }


class TextOffsets:
    """Places of tokens in the characters of their text: a token within a character has the place of that character."""

    def __init__(self, dropped: int = 0) -> None:
        """``dropped`` is how many characters before the text its first token has that are not the text's."""
        self._characters = -dropped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def place(self, spelled: bytes) -> int:
        """Return the place of the next token, which has these bytes."""
        place = max(0, self._characters)
        self._characters += len(self._decoder.decode(spelled))
        return place


def join_deltas(parts: Sequence[TextDelta]) -> TextDelta:
    """Join all deltas of a text into one."""
    last = parts[-1]
    tokens = [token for part in parts for token in part.tokens]
    scored = next((part.scored for part in parts if part.scored is not None), None)
    return TextDelta("".join(part.text for part in parts), tokens, scored, last.finish, last.cached_tokens)


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Return the token usage of a response."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _weights_of(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Return the weights that generated a text, each with the index of its first token."""
    begins: list[dict[str, Any]] = []
    for number, token in enumerate(tokens):
        if not begins or begins[-1]["weights"] != token.weights:
            begins.append({"from_token": number, "weights": token.weights})
    return begins


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no infinity; OpenAI's own lowest value.
