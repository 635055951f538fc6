"""Whether a request is taken now or sent away with a time to come back: a decision on values alone."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """How much one gateway takes on."""

    requests: int = 256
    """Texts that are computed or wait, at most."""
    wait_s: float = 60.0
    """The longest wait for the first token that is promised."""
    body_bytes: int = 8 << 20
    prompts: int = 128
    connections: int = 4096


@dataclass(frozen=True)
class Measured:
    """What was seen of the worker lately; ``seconds_per_text`` is 0 before the first text has ended."""

    unfinished: int
    seconds_per_text: float


def retry_after(limits: Limits, measured: Measured, texts: int) -> int:
    """0 if ``texts`` more are admitted, else the seconds after which to ask again.

    Each text that ended took ``seconds_per_text`` of the worker, so what is before the new ones takes that many times as long.
    """
    wait = measured.unfinished * measured.seconds_per_text
    if measured.unfinished and measured.unfinished + texts > limits.requests:
        surplus = measured.unfinished + texts - limits.requests
        return max(1, min(600, math.ceil(surplus * measured.seconds_per_text)))
    if wait > limits.wait_s:
        return max(1, min(600, math.ceil(wait - limits.wait_s)))
    return 0
