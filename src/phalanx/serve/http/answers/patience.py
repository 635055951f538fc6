"""How long a client may leave a piece of its answer unread, watched by one timer for the whole answer.

``asyncio.timeout`` around each piece sets and takes back a timer for each token, which costs more than sending it.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class Patience:
    """Cancels the task that entered it if what was begun does not end within ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begun: float | None = None

    def __enter__(self) -> Patience:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        self._task = task
        self._timer = self._loop.call_later(self._seconds, self._look)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def begin(self) -> None:
        """Something is begun that the client may hold up."""
        self._begun = self._loop.time()

    def end(self) -> None:
        """It has ended."""
        self._begun = None

    def _look(self) -> None:
        left = self._seconds
        if self._begun is not None:
            left += self._begun - self._loop.time()
        if left <= 0:
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(left, self._look)
