"""The rank streams of the runs that were looked at last, kept open between requests: to index one of days anew takes longer than to draw it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from phalanx.observe.rank_stream import RankStream


class RankStreams:
    """Open streams, each used by one thread at a time."""

    def __init__(self, most: int = 16) -> None:
        self._most, self._lock = most, threading.Lock()
        self._held: OrderedDict[Path, tuple[RankStream, threading.Lock]] = OrderedDict()

    def of(self, path: Path) -> tuple[RankStream, threading.Lock]:
        """The stream in a file, and the lock under which it is used. Raises ``RankStreamError``."""
        with self._lock:
            found = self._held.get(path)
            if found is None:
                found = self._held[path] = (RankStream(path), threading.Lock())
            self._held.move_to_end(path)
            while len(self._held) > self._most:
                self._held.popitem(last=False)  # its file is closed with it, when nobody uses it any more
        return found
