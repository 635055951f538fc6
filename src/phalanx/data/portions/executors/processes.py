"""Has tasks done by processes of this machine, each a Python of its own that is asked line by line (``worker.py``)."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

from phalanx.data.portions.executors.executor import TaskOutcome, one_thread_each


class Processes:
    """Runs tasks in ``workers`` processes; one that dies is replaced."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._idle: list[subprocess.Popen[str]] = []
        self._running: set[subprocess.Popen[str]] = set()
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
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()

    def _feed(
        self, stage: str, url: str, todo: queue.SimpleQueue[int], outcomes: queue.SimpleQueue[TaskOutcome]
    ) -> None:
        """Gives one worker after another tasks until there are none."""
        process: subprocess.Popen[str] | None = None
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
            answer = _ask(process, {"stage": stage, "url": url, "task": task})
            if answer is None:
                with self._lock:
                    self._running.discard(process)
                outcomes.put(TaskOutcome(task, lost=_how_it_ended(process.wait())))
                process = None
            else:
                outcomes.put(TaskOutcome(task, failed=answer))
        if process is not None:
            with self._lock:
                self._running.discard(process)
                self._idle.append(process)

    def _worker(self) -> subprocess.Popen[str] | None:
        with self._lock:
            if self._closed:
                return None
            process = self._idle.pop() if self._idle else _start_worker()
            self._running.add(process)
            return process


def _start_worker() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "phalanx.data.portions.executors.worker", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, **one_thread_each()},
        start_new_session=True,  # Ctrl-C is for the parent, which ends its workers itself
    )


def _ask(process: subprocess.Popen[str], request: dict[str, object]) -> str | None:
    """What failed, "" if nothing; ``None`` if the process has died."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        return str(json.loads(line)["failed"]) if line.endswith("\n") else None
    except (OSError, ValueError):
        process.kill()
        return None


def _how_it_ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "killed by signal 9; out of memory?"
    return f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
