"""Memory that a worker shares with the process of its NIXL agent: pages are laid there for others to read, and read into it.

It is registered with the agent once, for as long as that lives: registering anew for each job would pin and unpin memory each time, and leave others with
keys of memory that is gone. Stretches of it are dealt out to conversations and taken back at their end. Whoever reads copies a page out of it before it is
hashed, so that nothing that is written there too late or too early is believed.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from phalanx.serve.workers.over_nixl.errors import NixlError

_GRAIN_BYTES = 4096


@dataclass(frozen=True)
class Stretch:
    """A part of a staging."""

    start: int
    nbytes: int


class Staging:
    """See the module; for all threads of a worker. The system gives memory for what is written to, as it is."""

    def __init__(self, nbytes: int) -> None:
        """Raises OSError where the system gives no such memory."""
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("phalanx-staging", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, nbytes)
        self._memory = memoryview(mmap.mmap(self.descriptor, nbytes))
        self._lock = threading.Lock()
        self._taken: list[Stretch] = []
        """In their order in memory."""

    @contextmanager
    def stretches(self, count: int, nbytes: int) -> Iterator[list[Stretch]]:
        """So many stretches of so many bytes each, until the block ends. Raises NixlError where there is no room."""
        taken: list[Stretch] = []
        try:
            for _ in range(count):
                taken.append(self.take(nbytes))
            yield taken
        finally:
            for one in taken:
                self.give_back(one)

    def take(self, nbytes: int) -> Stretch:
        """The first stretch of so many bytes that is free. Raises NixlError where there is none."""
        with self._lock:
            start = 0
            for place, taken in enumerate([*self._taken, Stretch(self.nbytes, 0)]):
                if taken.start - start >= nbytes:
                    found = Stretch(start, nbytes)
                    self._taken.insert(place, found)
                    return found
                start = -(-(taken.start + taken.nbytes) // _GRAIN_BYTES) * _GRAIN_BYTES
        raise NixlError(
            f"{nbytes:,} bytes are not free among the {self.nbytes:,} that are registered with NIXL"
        )

    def give_back(self, stretch: Stretch) -> None:
        """Frees a stretch."""
        with self._lock:
            self._taken.remove(stretch)

    def view(self, stretch: Stretch) -> memoryview:
        """The bytes of a stretch."""
        return self._memory[stretch.start : stretch.start + stretch.nbytes]
