"""A lock file: held by one process and the children that it passes the descriptor to, and naming the holder to others.

The kernel releases the lock (``flock``) when the last of them has ended, for whatever reason. The file stays: if it were removed, a process that
waits for it and one that makes it again would both get a lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from phalanx.process.this_process import host_name

_PAUSE_S = 0.05


class LockHeldError(RuntimeError):
    """Another process holds the lock; ``holder`` names it."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"held by {holder}")
        self.holder = holder


def lock_file(path: Path, mode: int = 0o644, *, patience_s: float = 0.0) -> int:
    """Lock the file at ``path``, made with ``mode`` if missing, write this process's name into it, and return its
    descriptor, which holds the lock while it is open.

    Raises ``LockHeldError`` if another process still holds it after ``patience_s``, and ``OSError``.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    deadline_s = time.monotonic() + patience_s
    try:
        while not _locked(descriptor, fcntl.LOCK_EX):
            if time.monotonic() >= deadline_s:
                raise LockHeldError(_holder(descriptor))
            time.sleep(_PAUSE_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {host_name()}\n".encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def holder_of(path: Path) -> str:
    """Return the name of the process that holds the lock at ``path``; empty if none does, or without locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return "" if _locked(descriptor, fcntl.LOCK_SH) else _holder(descriptor)
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _locked(descriptor: int, kind: int) -> bool:
    """Return True if the lock was taken, and False if another process holds it. Raises ``OSError``."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
