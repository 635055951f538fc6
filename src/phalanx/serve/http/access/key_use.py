"""Rate limits of keys: buckets that fill again at the limit's pace, decided on values alone.

A bucket holds a minute's worth and is full at first, so that a client may send bursts but not more than its limit in the long run
(the token bucket, RFC 2697). Tokens are taken for a request's longest course when it is admitted, since nobody knows where it will end, and what was
not made is put back.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from phalanx.serve.http.access.keys import Key
from phalanx.serve.http.protocol import RefusedError


@dataclass
class Bucket:
    """So much of a limit as is left at a time; ``limit`` is what a minute gives."""

    limit: int
    left: float
    at: float

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until ``amount`` can be taken, which is at most what a minute gives."""
        self._fill(now)
        # Rounding must not send away whom the bucket has just enough for.
        lacking = amount - self.left
        return 60 * lacking / self.limit if lacking > 1e-6 else 0.0

    def take(self, amount: float, now: float) -> None:
        """Takes an amount, or puts a negative one back."""
        self._fill(now)
        self.left = min(float(self.limit), self.left - amount)

    def _fill(self, now: float) -> None:
        self.left = min(float(self.limit), self.left + max(0.0, now - self.at) * self.limit / 60)
        self.at = max(self.at, now)


@dataclass
class KeyUse:
    """Requests of one key since the start, and the rest of its limits."""

    key: Key
    requests: Bucket | None = None
    tokens: Bucket | None = None
    running: int = 0
    admitted: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Requests that were sent away, by limit."""

    @classmethod
    def of(cls, key: Key, now: float) -> KeyUse:
        """A key that has used nothing."""

        def full(limit: int) -> Bucket | None:
            return Bucket(limit, float(limit), now) if limit else None

        return cls(key, full(key.limits.requests), full(key.limits.tokens))

    def begin(self, now: float) -> None:
        """Take a request from the limits, before any work is done for it. Raises RefusedError, which names the limit and the time."""
        limits = self.key.limits
        if limits.concurrent and self.running >= limits.concurrent:
            raise self._over("concurrent", f"{limits.concurrent} requests at a time", 1)
        self._take("requests", self.requests, 1, now)
        self.running += 1
        self.admitted += 1

    def take_tokens(self, tokens: int, now: float) -> None:
        """Take the most tokens that a request may need from the limits. Raises RefusedError, which names the limit and the time."""
        if self.tokens is not None and tokens > self.tokens.limit:
            self.refused["tokens"] += 1
            raise RefusedError(
                f"the request may take {tokens} tokens, and the key {self.key.name!r} has {self.tokens.limit} in a minute: "
                "shorten the prompt, or ask for fewer tokens",
                "max_tokens",
                code="request_exceeds_rate_limit",
            )
        self._take("tokens", self.tokens, tokens, now)

    def _take(self, name: str, bucket: Bucket | None, amount: int, now: float) -> None:
        if bucket is None:
            return
        if wait := bucket.wait_s(amount, now):
            raise self._over(name, f"{bucket.limit} {name} in a minute", math.ceil(wait))
        bucket.take(amount, now)

    def ended(self, taken: int, prompt_tokens: int, generated_tokens: int, now: float) -> None:
        """A request has ended for which ``taken`` tokens had been taken."""
        self.running -= 1
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += generated_tokens
        if self.tokens is not None:
            self.tokens.take(prompt_tokens + generated_tokens - taken, now)

    def _over(self, limit: str, words: str, wait: int) -> RefusedError:
        self.refused[limit] += 1
        return RefusedError(
            f"the key {self.key.name!r} has {words}: ask again in {wait} s",
            status=429,
            code="rate_limit_exceeded",
            retry_after=wait,
        )
