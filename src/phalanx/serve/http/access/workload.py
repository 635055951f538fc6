"""Admitted requests in flight, and their completion rate, which admission reads.

The pace is what ended in a second in which there was anything to do, later seconds counting for more: sums that fade with a time of a minute.
Pages are those that texts need at their longest, on both sides of the reckoning, so that texts that end early show as a higher pace.
"""

from __future__ import annotations

import math

from phalanx.serve.http.access.admission import Demand, Measured

_FADE_S = 60.0


class Workload:
    """Texts, pages and prompt tokens under way; times are those of a monotonic clock, in seconds."""

    def __init__(self) -> None:
        self.texts = self._pages = self._unread = 0
        self._busy_s = self._pages_done = self._tokens_done = 0.0
        self._last = 0.0

    def began(self, demand: Demand, now: float) -> None:
        """A request was admitted."""
        self._pass(now)
        self.texts += demand.texts
        self._pages += demand.pages
        self._unread += demand.prompt_tokens

    def read(self, tokens: int, now: float) -> None:
        """The prompt of one text, of so many tokens, was computed."""
        self._pass(now)
        self._unread -= tokens
        self._tokens_done += tokens

    def left_unread(self, tokens: int) -> None:
        """A text was given up before its prompt was computed."""
        self._unread -= tokens

    def ended(self, demand: Demand, now: float) -> None:
        """A request has ended or was given up."""
        self._pass(now)
        self.texts -= demand.texts
        self._pages -= demand.pages
        self._pages_done += demand.pages

    def measured(self, pages: int, now: float) -> Measured:
        """All of it as admission reads it, of a worker that has so many ``pages``."""
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
        passed = now - self._last if self.texts else 0.0
        self._last = now
        if passed > 0:
            kept = math.exp(-passed / _FADE_S)
            self._pages_done *= kept
            self._tokens_done *= kept
            self._busy_s = self._busy_s * kept + passed
