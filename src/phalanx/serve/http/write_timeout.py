"""Timeout for writes to a slow client, with one timer for the full response.

``asyncio.timeout`` around each event sets and cancels a timer for each token, which costs more than sending it.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class WriteTimeout:
    """Cancel the task that entered the block if a write does not end within ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._write_start: float | None = None

    def __enter__(self) -> WriteTimeout:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        self._task = task
        self._timer = self._loop.call_later(self._seconds, self._check)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def begin(self) -> None:
        """Mark the start of a write."""
        self._write_start = self._loop.time()

    def end(self) -> None:
        """Mark the end of the write."""
        self._write_start = None

    def _check(self) -> None:
        remaining = self._seconds
        if self._write_start is not None:
            remaining += self._write_start - self._loop.time()
        if remaining <= 0:
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(remaining, self._check)
