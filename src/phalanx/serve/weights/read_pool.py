"""Threads that read what is needed soonest first: an expert that a layer waits for goes before the next layers' weights."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from concurrent.futures import Future

Urgency = tuple[int, int]
"""The smaller, the sooner: the number of the layer, counted through all passes, and what of it."""


class ReadPool:
    """A pool of threads with a priority queue; reads of equal urgency are done in the order in which they were asked for."""

    def __init__(self, threads: int) -> None:
        self._queue: list[tuple[Urgency, int, Callable[[], None], Future[None]]] = []
        self._asked = 0
        self._closed = False
        self._change = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"weights-read-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, urgency: Urgency, read: Callable[[], None]) -> Future[None]:
        """Queues a read. What it raises, the future raises."""
        future: Future[None] = Future()
        with self._change:
            heapq.heappush(self._queue, (urgency, self._asked, read, future))
            self._asked += 1
            self._change.notify()
        return future

    def close(self) -> None:
        """Ends the threads after the reads under way; reads that still wait are cancelled."""
        with self._change:
            self._closed = True
            waiting, self._queue = self._queue, []
            self._change.notify_all()
        for *_, future in waiting:
            future.cancel()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._change:
                while not self._queue and not self._closed:
                    self._change.wait()
                if self._closed:
                    return
                *_, read, future = heapq.heappop(self._queue)
            if not future.set_running_or_notify_cancel():
                continue  # nobody wants it any more, and its buffer may be another's
            try:
                read()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
