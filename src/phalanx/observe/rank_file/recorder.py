"""Writes the ranks' numbers from a thread of its own, so that no disk can hold a step up.

A write to a shared file system may take seconds, and so does coarsening a file at its full size. Frames wait in a short queue meanwhile; when
that is full they are dropped, and whoever records the next one is told.
"""

from __future__ import annotations

import queue
import threading
from pathlib import Path

from phalanx.observe.rank_file.format import RankFrame
from phalanx.observe.rank_file.index import RankStreamError
from phalanx.observe.rank_file.writer import RankStreamWriter

_QUEUE_FRAMES = 32
"""Frames that wait to be written: some 50 MB with 100,000 ranks."""
_CLOSE_TIMEOUT_S = 5.0


class RankRecorder:
    """Appends frames to the file ``path`` in the order of ``record``; never raises, never waits for a disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: queue.Queue[RankFrame | None] = queue.Queue(_QUEUE_FRAMES)
        self._ending = threading.Event()
        self._trouble = ""
        self._told = False
        self._thread: threading.Thread | None = None

    def record(self, frame: RankFrame) -> str:
        """Hands a frame over; returns a warning for people, the first time that there is one, else nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ranks.bin", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(frame)
        except queue.Full:
            self._trouble = f"{self._path} is written too slowly"
        return self._warning()

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> str:
        """Writes what waits, within a bounded time; returns a warning as ``record`` does."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ending.set()
            try:
                self._queue.put(None, timeout=timeout_s)
            except queue.Full:
                return self._warning()  # it hangs, and is left behind
            thread.join(timeout_s)
        return self._warning()

    def _warning(self) -> str:
        if not self._trouble or self._told:
            return ""
        self._told = True
        return f"{self._trouble}; training goes on, and some of the ranks' numbers will be missing"

    def _work(self) -> None:
        writer: RankStreamWriter | None = None
        while (frame := self._queue.get()) is not None:
            try:
                if writer is None:
                    writer = RankStreamWriter(self._path, hurry=self._ending.is_set)
                writer.append(frame)
            except (RankStreamError, OSError, ValueError) as error:
                self._trouble = str(error)
        if writer is not None:
            writer.close()
