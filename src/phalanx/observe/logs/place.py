"""Where a process is in its run, for the lines of its log: rank, epoch and step, in memory that its parent sees too.

A rank sets its step with one store. The launcher or agent that reads what native code in it prints looks here for the rank and step of
those lines, and finds them also after the rank was killed. The descriptor is inherited; a process without one has a place of its own.
"""

from __future__ import annotations

import mmap
import os
import tempfile

_NAMES = ("rank", "epoch", "step")
_BYTES = 8 * len(_NAMES)
_UNKNOWN = -(2**63)


class Place:
    """Rank, epoch and step of a process; ``None`` is not known, or none."""

    def __init__(self, descriptor: int | None = None) -> None:
        """``descriptor``: of a place that another process made; it stays the caller's. Raises ``OSError`` or ``ValueError`` if it is none."""
        self._shared = None if descriptor is None else mmap.mmap(descriptor, _BYTES)
        self._values = memoryview(self._shared or bytearray(_BYTES)).cast("q")
        if descriptor is None:
            self.rank = self.epoch = self.step = None

    @classmethod
    def shared(cls) -> tuple[Place, int]:
        """A new place, and the descriptor by which a child process gets it; the caller closes that. Raises ``OSError``."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("phalanx-place", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, _BYTES)
        place = cls(descriptor)
        place.rank = place.epoch = place.step = None
        return place, descriptor

    def close(self) -> None:
        """Gives the shared memory back; the place is not used any more."""
        self._values.release()
        if self._shared is not None:
            self._shared.close()

    def _get(self, index: int) -> int | None:
        value = self._values[index]
        return None if value == _UNKNOWN else value

    @property
    def rank(self) -> int | None:
        """The rank that the process holds."""
        return self._get(0)

    @rank.setter
    def rank(self, value: int | None) -> None:
        self._values[0] = _UNKNOWN if value is None else value

    @property
    def epoch(self) -> int | None:
        """The epoch of the fleet that it is in."""
        return self._get(1)

    @epoch.setter
    def epoch(self, value: int | None) -> None:
        self._values[1] = _UNKNOWN if value is None else value

    @property
    def step(self) -> int | None:
        """The step that it computes."""
        return self._get(2)

    @step.setter
    def step(self, value: int | None) -> None:
        self._values[2] = _UNKNOWN if value is None else value
