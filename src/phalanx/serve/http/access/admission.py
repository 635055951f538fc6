"""Admission of requests: accept one now, or refuse it with a time to retry. A decision on values alone.

Texts wait for two things: for pages of keys and values, where those of the texts before them do not leave enough, and for the prompts
before them to be computed. Both are predicted in seconds from the pace that was measured while the server was busy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.traffic.block_table import PAGE

_LONGEST_S = 600


@dataclass(frozen=True)
class Limits:
    """Limits of one server."""

    requests: int = 256
    """Texts that are computed or wait, at most."""
    wait_s: float = 60.0
    """The longest wait for the first token that is promised."""
    body_bytes: int = 8 << 20
    prompts: int = 128
    connections: int = 0
    """Connections at a time; 0: as many as the process may have (``phalanx.serve.http.connections``)."""


@dataclass(frozen=True)
class Demand:
    """Resources that a request needs."""

    texts: int
    pages: int
    """Pages of all its texts at their longest."""
    prompt_tokens: int


@dataclass(frozen=True)
class Measured:
    """Admitted requests in flight, and their completion rates; a rate of 0 is not known yet."""

    texts: int = 0
    pages_needed: int = 0
    """By the texts at their longest."""
    pages: int = 0
    """Pages there are; 0 where memory is not counted in pages."""
    unread_tokens: int = 0
    """Tokens of prompts whose text has no first token yet."""
    pages_per_s: float = 0.0
    tokens_per_s: float = 0.0
    """Tokens of prompts that are computed in a second."""

    def wait_s(self, demand: Demand) -> float:
        """The seconds up to the first token of a request that comes now, as predicted."""
        surplus = max(0, self.pages_needed + demand.pages - self.pages) if self.pages else 0
        return _seconds(surplus, self.pages_per_s) + _seconds(self.unread_tokens, self.tokens_per_s)


def pages_of(tokens: int) -> int:
    """The pages that a text of so many tokens takes."""
    return -(-tokens // PAGE)


def retry_after(limits: Limits, measured: Measured, demand: Demand) -> int:
    """0 if the request is admitted, else the seconds after which to retry. An idle server admits anything."""
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
