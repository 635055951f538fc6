"""Answers that many viewers ask for at once are made once: fifty open pages of one run cost little more than one.

An answer is given again for a second, but not after its run is known to have changed. Whoever asks while it is being made waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from anyio import to_thread
from starlette.responses import Response

KEPT_S = 1.0
_MOST_BYTES = 64 << 20


class KeptAnswers:
    """The answers of the last second, by question. For one event loop."""

    def __init__(self, kept_s: float = KEPT_S) -> None:
        self._kept_s = kept_s
        self._made: OrderedDict[str, tuple[float, Response]] = OrderedDict()
        self._making: dict[str, asyncio.Task[Response]] = {}
        self._changes: Counter[str] = Counter()
        self._nbytes = 0

    def changed(self, run: str) -> None:
        """The run of this identifier is another than before: what is kept of it is old."""
        self._changes[run] += 1

    async def get(self, run: str, question: str, make: Callable[[], Response]) -> Response:
        """The answer to a question about a run; ``make`` makes it, in a thread. Raises what ``make`` does."""
        key = f"{self._changes[run]} {question}"
        kept = self._made.get(key)
        if kept is not None and time.monotonic() - kept[0] < self._kept_s:
            return kept[1]
        making = self._making.get(key)
        if making is None:
            making = self._making[key] = asyncio.create_task(self._make(key, make))
        return await asyncio.shield(making)  # one who leaves takes the answer from nobody else

    async def _make(self, key: str, make: Callable[[], Response]) -> Response:
        try:
            answer = await to_thread.run_sync(make)
        finally:
            del self._making[key]
        self._forget(key)
        self._made[key] = time.monotonic(), answer
        self._nbytes += len(answer.body)
        while self._made and (self._nbytes > _MOST_BYTES or self._is_old()):
            self._forget(next(iter(self._made)))
        return answer

    def _is_old(self) -> bool:
        return time.monotonic() - next(iter(self._made.values()))[0] > 2 * self._kept_s

    def _forget(self, key: str) -> None:
        kept = self._made.pop(key, None)
        self._nbytes -= len(kept[1].body) if kept is not None else 0
