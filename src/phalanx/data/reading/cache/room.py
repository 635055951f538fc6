"""Room on the disk: all cached datasets of one folder together stay below a limit.

Which blocks go is of no consequence to what is read, since whoever finds one missing, or emptied while it looked, asks the store for it
again. So nobody is asked: whoever has written a part of the limit looks at all shards of the cache, and empties those that nobody has written
to for longest. An emptied file keeps its name and its open descriptors; only its bytes are gone.
"""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path

_KEPT = 0.9
"""Part of the limit that is left in use after blocks were dropped, so that this does not happen with every write."""
_LOOKS = 32
"""Times that the shards are looked at while as much is written as the limit allows."""
_UNIT_BYTES = 512
"""Unit of ``st_blocks`` (POSIX leaves it open; on Linux it is 512 whatever the file system's block)."""


class Room:
    """The limit of the cached datasets below ``root``. Threads and processes may share it."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._root = root
        self._limit_bytes = limit_bytes
        self._unseen_bytes = limit_bytes  # so that a cache that was left too large is looked at first of all
        self._lock = threading.Lock()

    def wrote(self, nbytes: int) -> None:
        """Counts what was written to a cache, and drops blocks where the limit is passed."""
        with self._lock:
            self._unseen_bytes += nbytes
            if self._unseen_bytes < self._limit_bytes // _LOOKS:
                return
            self._unseen_bytes = 0
        self.drop()

    def drop(self) -> None:
        """Empties the shards written to longest ago until the rest is well below the limit, if all are above it."""
        with suppress(
            OSError
        ):  # a cache that cannot be looked at is one that cannot be kept small, and no more than that
            descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another is at it
                self._drop()
            finally:
                os.close(descriptor)

    def _drop(self) -> None:
        shards = []
        for path in self._root.glob("*/*.bin"):
            found = path.stat()
            shards.append((found.st_mtime_ns, found.st_blocks * _UNIT_BYTES, path))
        held_bytes = sum(nbytes for _, nbytes, _ in shards)
        if held_bytes <= self._limit_bytes:
            return
        for _, nbytes, path in sorted(shards):
            if held_bytes <= _KEPT * self._limit_bytes:
                return
            os.truncate(path, 0)
            held_bytes -= nbytes
