"""The lock that a run's one coordinator holds for as long as its process lives."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.fleet.control.succession.reign import FIRST_REIGN
from phalanx.fleet.core.replay import JournalError
from phalanx.run.directory.paths import RunDirectory


@contextmanager
def only_coordinator(directory: RunDirectory, reign: int = FIRST_REIGN) -> Iterator[None]:
    """Inside, no other process coordinates the run: two would write one journal, each at its own place.

    A lock of its own (``fleet/coordinator.lock``), since the journal is replaced now and then. The kernel gives it back, however this
    process ends. Each reign has its own: on a lost machine, the process of the one before may still hold its lock.

    Raises:
        JournalError: Another process holds it.
    """
    directory.fleet.mkdir(exist_ok=True)
    name = "coordinator.lock" if reign == FIRST_REIGN else f"coordinator-reign-{reign}.lock"
    path = directory.fleet / name
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise JournalError(f"{directory.path} is coordinated by {holder} already; end it first") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
