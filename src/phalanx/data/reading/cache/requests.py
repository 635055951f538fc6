"""Requests under way: a few threads that fetch what is waited for first, and otherwise what will be needed, in that order.

The threads are daemons and hold nothing, so that a process ends without waiting for a store that does not answer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from phalanx.data.errors import DatasetError

_AT_ONCE = 32
"""Requests under way. By Little's law that is 320 samples/s from a store that takes 100 ms for each; a rank needs a few."""

T = TypeVar("T")


def in_background(call: Callable[[], T]) -> Future[T]:
    """What ``call`` returns or raises, made at once in a daemon thread of its own."""
    future: Future[T] = Future()

    def make() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # it is raised in whoever waits
            future.set_exception(error)

    threading.Thread(target=make, name="data-request", daemon=True).start()
    return future


class Requests:
    """A pool of threads with two queues. Threads may share it."""

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._most_threads = at_once
        self._threads = 0
        self._idle = 0
        self._urgent: deque[Callable[[], None]] = deque()
        self._ahead: deque[Callable[[], None]] = deque()
        self._waiting: dict[Future[Any], float] = {}
        """What is waited for, and since when, oldest first."""
        self._changed = threading.Condition()

    def results(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """What the calls return, in their order; all of them go before anything that is only read ahead.

        Raises what the first that fails raises, and ``DatasetError`` if ``give_up`` is called meanwhile.
        """
        futures = [self._urgently(call) for call in calls]
        try:
            return [future.result() for future in futures]
        finally:
            with self._changed:
                for future in futures:
                    self._waiting.pop(future, None)

    def ahead(self, call: Callable[[], object]) -> None:
        """Has ``call`` made once nothing is waited for, after those that were given before. What it raises is dropped."""

        def quietly() -> None:
            with suppress(Exception):  # whoever comes to need it asks again, and is told
                call()

        self._enqueue(self._ahead, quietly)

    def give_up(self) -> None:
        """Ends the waiting of all who wait for ``results`` now, and forgets what would be read ahead."""
        with self._changed:
            self._ahead.clear()
            waiting, self._waiting = self._waiting, {}
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(DatasetError("reading was ended before the store had answered"))

    def waiting_s(self) -> float:
        """Seconds for which somebody has waited for ``results``; 0 if nobody does."""
        with self._changed:
            return max((time.monotonic() - since_s for since_s in self._waiting.values()), default=0.0)

    def _urgently(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def make() -> None:
            if future.done():  # given up
                return
            try:
                result = call()
            except BaseException as error:  # it is raised in whoever waits
                with suppress(InvalidStateError):
                    future.set_exception(error)
            else:
                with suppress(InvalidStateError):
                    future.set_result(result)

        with self._changed:
            self._waiting[future] = time.monotonic()
        self._enqueue(self._urgent, make)
        return future

    def _enqueue(self, queue: deque[Callable[[], None]], call: Callable[[], None]) -> None:
        with self._changed:
            queue.append(call)
            if len(self._urgent) + len(self._ahead) > self._idle and self._threads < self._most_threads:
                self._threads += 1
                threading.Thread(target=self._work, name="data-request", daemon=True).start()
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._urgent or self._ahead)
                self._idle -= 1
                call = (self._urgent or self._ahead).popleft()
            call()
