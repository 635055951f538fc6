"""Has tasks done by processes of this machine, each a Python of its own that is asked line by line (``worker.py``)."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from phalanx.data.portions.executors.executor import TaskOutcome, one_thread_each
from phalanx.process.child import LineChild, describe_exit, end_all

_COMMAND = (sys.executable, "-P", "-m", "phalanx.data.portions.executors.worker")


class Processes:
    """Runs tasks in ``workers`` processes; one that dies is replaced."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._idle: list[LineChild] = []
        self._running: set[LineChild] = set()
        self._lock = threading.Lock()
        self._closed = False

    def map(self, stage: str, url: str, tasks: Sequence[int]) -> Iterator[TaskOutcome]:
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        outcomes: queue.SimpleQueue[TaskOutcome] = queue.SimpleQueue()
        for task in tasks:
            todo.put(task)
        for _ in range(min(self._workers, len(tasks))):
            threading.Thread(target=self._feed, args=(stage, url, todo, outcomes), daemon=True).start()
        for _ in tasks:
            yield outcomes.get()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            processes = [*self._idle, *self._running]
            self._idle = []
        end_all(processes)

    def _feed(
        self, stage: str, url: str, todo: queue.SimpleQueue[int], outcomes: queue.SimpleQueue[TaskOutcome]
    ) -> None:
        """Gives one worker after another tasks until there are none."""
        process: LineChild | None = None
        while True:
            try:
                task = todo.get_nowait()
            except queue.Empty:
                break
            if process is None:
                process = self._worker()
            if process is None:
                outcomes.put(TaskOutcome(task, lost="the preparation has ended"))
                continue
            reply = process.exchange({"stage": stage, "url": url, "task": task})
            if reply is None:
                with self._lock:
                    self._running.discard(process)
                outcomes.put(TaskOutcome(task, lost=_how_it_ended(process.end())))
                process = None
            else:
                outcomes.put(TaskOutcome(task, failed=str(reply["failed"])))
        if process is not None:
            with self._lock:
                self._running.discard(process)
                self._idle.append(process)

    def _worker(self) -> LineChild | None:
        with self._lock:
            if self._closed:
                return None
            process = self._idle.pop() if self._idle else LineChild(_COMMAND, os.environ | one_thread_each())
            self._running.add(process)
            return process


def _how_it_ended(code: int) -> str:
    return describe_exit(code) + ("; out of memory?" if code == -signal.SIGKILL else "")
