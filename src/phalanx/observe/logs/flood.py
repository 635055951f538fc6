"""Bounds what a process that says too much costs: a bucket of bytes that fills again with time.

A process may say much at once (a start, a listing), and little for ever. What goes beyond is left out and counted; errors never are.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PER_LINE = 200
"""Bytes that a line costs beside its text."""


class Bucket:
    """Lets ``per_s`` bytes a second through, and ``most`` at once."""

    def __init__(
        self, per_s: float = 2 << 20, most: float = 8 << 20, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s, self._most, self._clock = per_s, most, clock
        self._left, self._at_s = float(most), clock()

    def takes(self, nbytes: int) -> bool:
        """True if so many bytes may pass; then they are taken out."""
        if not self.has(nbytes):
            return False
        self._left -= nbytes
        return True

    def has(self, nbytes: int) -> bool:
        """True if so many bytes might pass now."""
        if self._left < nbytes:
            now_s = self._clock()
            self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
            self._at_s = now_s
        return self._left >= nbytes
