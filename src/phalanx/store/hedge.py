"""Hedged reads: what takes far longer than usual is asked for a second time, and the first answer counts.

Of many thousand requests some take a hundred times as long as the median, for no reason of their own, and whoever reads them all waits for the last.
A second request at such a moment is mostly answered at once (Dean and Barroso 2013, "The Tail at Scale", CACM 56(2)). It is sent only after three times the 99th percentile of
the latest reads, and for at most one read in twenty, so that a store that is slow as a whole is not asked twice for everything.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

_LATEST = 256
"""Reads of which the percentile is taken."""
_FACTOR, _LEAST_S, _UNKNOWN_S = 3.0, 0.5, 5.0
_FEW = 16
"""Number of reads below which there is no percentile: a second request is sent after ``unmeasured_s`` then."""
_MOST_SHARE = 0.05

T = TypeVar("T")


class HedgedReads:
    """Reads of one kind and size from one store, and how long they took. Threads may share it."""

    def __init__(self, *, min_s: float = _LEAST_S, unmeasured_s: float = _UNKNOWN_S) -> None:
        """
        Args:
            min_s: Lower bound of the wait before a second request.
            unmeasured_s: Wait before a second request while there are too few reads for a percentile.
        """
        self._min_s, self._unmeasured_s = min_s, unmeasured_s
        self.reads = 0
        self.hedged = 0
        """Reads that were asked for a second time."""
        self._latest: deque[float] = deque(maxlen=_LATEST)
        self._lock = threading.Lock()

    def read(self, ask: Callable[[], T]) -> T:
        """What ``ask`` returns, which may be called twice, at the same time in two threads. Raises what both raise, the first's."""
        with self._lock:
            self.reads += 1
        begun_s = time.monotonic()
        answers: queue.SimpleQueue[_Answer[T]] = queue.SimpleQueue()
        _ask_in_thread(ask, answers)
        try:
            answer = answers.get(timeout=self.patience_s())
        except queue.Empty:
            asked = 1 + self._may_hedge()
            if asked == 2:
                _ask_in_thread(ask, answers)
            answer = answers.get()
            if answer.error is not None and asked == 2:
                other = answers.get()
                answer = answer if other.error is not None else other
        with self._lock:
            self._latest.append(time.monotonic() - begun_s)
        return answer.value()

    def patience_s(self) -> float:
        """Seconds after which a read is asked for a second time."""
        with self._lock:
            latest = sorted(self._latest)
        if len(latest) < _FEW:
            return self._unmeasured_s
        return max(self._min_s, _FACTOR * latest[math.ceil(0.99 * len(latest)) - 1])

    def _may_hedge(self) -> bool:
        with self._lock:
            allowed = self.hedged < max(1.0, _MOST_SHARE * self.reads)
            self.hedged += allowed
            return allowed


class _Answer(Generic[T]):
    """What a call returned, or what it raised."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self.error: BaseException | None = None
        try:
            self._value = ask()
        except BaseException as error:  # it is raised in whoever waits
            self.error = error

    def value(self) -> T:
        if self.error is not None:
            raise self.error
        return self._value


def _ask_in_thread(ask: Callable[[], T], answers: queue.SimpleQueue[_Answer[T]]) -> None:
    # A daemon: the slower of two may never be answered, and nobody waits for it.
    threading.Thread(target=lambda: answers.put(_Answer(ask)), name="store-read", daemon=True).start()
