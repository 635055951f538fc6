"""Locks on ranges of a file that keep out other processes and other threads alike, and end with their holder.

They belong to an open file description (fcntl(2), F_OFD_SETLKW), so each is taken by a description of its own: threads that share one do not
keep each other out. The kernel lets go when the description is closed, however its process ended.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_FLOCK = "hhqqi4x"
"""``struct flock`` on 64-bit Linux: type, whence, start, length, process (which must be 0 for this kind of lock)."""


@contextmanager
def range_locked(path: Path, start: int, stop: int) -> Iterator[None]:
    """Holds bytes ``start`` to ``stop`` of the file, once nobody else does.

    Where there are no such locks (another system or file system, a file that was removed) it is as if nobody else held them: for work that may be
    done twice.
    """
    with ExitStack() as held:
        with suppress(OSError):
            file = held.enter_context(path.open("r+b", 0))
            if sys.platform == "linux":
                lock = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, stop - start, 0)
                fcntl.fcntl(file, fcntl.F_OFD_SETLKW, lock)
        yield
