"""Admission of requests: accept one now, or refuse it with a time to retry. A pure decision.

Texts wait for KV pages, and for the prompts before them. Both waits are predicted in seconds, from the throughput
measured while the server was busy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx_serve.http.protocol import RefusedError
from phalanx_serve.traffic.block_table import PAGE

# Admitted requests in flight, and their completion rate, which admission reads.
#
# The rate is the completions per busy second, as sums that decay with a time constant of one minute.
# Pages are counted at a text's longest on both sides, so texts that end early raise the rate.

_FADE_S = 60.0


class AdmittedLoad:
    """Admitted texts, pages and prompt tokens; times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self.texts = self._pages = self._unread = 0
        self._busy_s = self._pages_done = self._tokens_done = 0.0
        self._last = 0.0

    def began(self, demand: Demand, now: float) -> None:
        """Record that a request was admitted."""
        self._pass(now)
        self.texts += demand.texts
        self._pages += demand.pages
        self._unread += demand.prompt_tokens

    def read(self, tokens: int, now: float) -> None:
        """Record that a prompt of ``tokens`` tokens was computed."""
        self._pass(now)
        self._unread -= tokens
        self._tokens_done += tokens

    def left_unread(self, tokens: int) -> None:
        """Record that a text was canceled before its prompt was computed."""
        self._unread -= tokens

    def ended(self, demand: Demand, now: float) -> None:
        """Record that a request ended or was canceled."""
        self._pass(now)
        self.texts -= demand.texts
        self._pages -= demand.pages
        self._pages_done += demand.pages

    def measured(self, pages: int, now: float) -> Measured:
        """Return the load as admission reads it, for a worker with ``pages`` pages."""
        self._pass(now)
        busy = self._busy_s
        return Measured(
            self.texts,
            self._pages,
            pages,
            self._unread,
            self._pages_done / busy if busy else 0.0,
            self._tokens_done / busy if busy else 0.0,
        )

    def _pass(self, now: float) -> None:
        """Let past throughput fade with the time since the last call, and count it as busy if there are texts."""
        passed = now - self._last if self.texts else 0.0
        self._last = now
        if passed > 0:
            kept = math.exp(-passed / _FADE_S)
            self._pages_done *= kept
            self._tokens_done *= kept
            self._busy_s = self._busy_s * kept + passed


# Limit on the length of a text: the model's context, and the pages of the KV cache.


@dataclass(frozen=True)
class LengthLimit:
    """The longest text that the server takes."""

    context: int
    """The model's context, in tokens."""
    pages: int
    """Pages of the KV cache; 0 if memory is not counted in pages."""

    @property
    def tokens(self) -> int:
        """The lower of context and KV cache, in tokens."""
        return min(self.context, self.pages * PAGE) if self.pages else self.context

    def require_text(self, text: str, longest_token: int, prompt_field: str) -> None:
        """Raise RefusedError, with the numbers, for a text that is too long for any tokenization; ``longest_token``
        is the longest token in bytes.

        Tokenizing takes time in proportion to the text, so this check comes first.
        """
        size, most = len(text.encode("utf-8", "surrogatepass")), self.tokens * longest_token
        if size > most:
            raise RefusedError(
                f"a prompt of {size:,} bytes does not fit into the context: {self.tokens:,} tokens have at most {most:,} bytes; shorten the prompt",
                prompt_field,
                code="context_length_exceeded",
            )

    def require(self, prompt_tokens: int, new_tokens: int, prompt_field: str) -> None:
        """Raise RefusedError, with the numbers, for a text that is too long for the context, or for the pages of the server."""
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


_LONGEST_S = 600


@dataclass(frozen=True)
class Limits:
    """Limits of one server."""

    requests: int = 256
    """Most texts that are computed or wait."""
    wait_s: float = 60.0
    """Longest predicted wait for the first token."""
    body_bytes: int = 8 << 20
    prompts: int = 128
    connections: int = 0
    """Connections at a time; 0: as many as the process may have (``phalanx_serve.http.server``)."""


@dataclass(frozen=True)
class Demand:
    """Resources that a request needs."""

    texts: int
    pages: int
    """Pages of all its texts at their longest."""
    prompt_tokens: int


@dataclass(frozen=True)
class Measured:
    """Admitted requests in flight and their completion rates. A rate of 0 is not measured yet."""

    texts: int = 0
    pages_needed: int = 0
    """Pages of the admitted texts at their longest."""
    pages: int = 0
    """Pages of the KV cache; 0 if memory is not counted in pages."""
    unread_tokens: int = 0
    """Prompt tokens of texts without a first token."""
    pages_per_s: float = 0.0
    tokens_per_s: float = 0.0
    """Prompt tokens computed per second."""

    def wait_s(self, demand: Demand) -> float:
        """Return the predicted seconds to the first token of a new request."""
        surplus = max(0, self.pages_needed + demand.pages - self.pages) if self.pages else 0
        return _seconds(surplus, self.pages_per_s) + _seconds(self.unread_tokens, self.tokens_per_s)


def pages_of(tokens: int) -> int:
    """Return the number of pages of a text of ``tokens`` tokens."""
    return -(-tokens // PAGE)


def retry_after(limits: Limits, measured: Measured, demand: Demand) -> int:
    """Return 0 if the request is admitted, else the whole seconds after which to retry.

    An idle server admits every request.
    """
    if not measured.texts:
        return 0
    if (surplus := measured.texts + demand.texts - limits.requests) > 0:
        # So many texts must end, each with its share of what all need.
        share = measured.pages_needed / measured.texts
        return _whole_seconds(_seconds(surplus * share, measured.pages_per_s))
    wait = measured.wait_s(demand)
    return _whole_seconds(wait - limits.wait_s) if wait > limits.wait_s else 0


def _seconds(amount: float, pace: float) -> float:
    return amount / pace if pace else 0.0


def _whole_seconds(seconds: float) -> int:
    return max(1, min(_LONGEST_S, math.ceil(seconds)))
