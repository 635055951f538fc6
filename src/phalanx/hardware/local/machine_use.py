"""Use of this machine by all of its processes: processors, memory and network, from the counters of Linux.

Reading them takes a fraction of a millisecond. Elsewhere there are none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_KIB = 1024
_IDLE = (3, 4)
"""Columns of ``/proc/stat`` for idle time and for time that waits for a disk."""
_COUNTED = 8
"""Columns that do not count another one again, as guests do."""


class MachineMeter:
    """Use of this machine since the last reading."""

    def __init__(self, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self._proc, self._clock = proc, clock
        self._before = self._clock(), self._ticks(), self._traffic()

    def read(self) -> dict[str, float]:
        """Return the figures that can be read, rates since the last call.

        ``cpu``: share of the processors' time in use, 0 to 1. ``memory_bytes``: memory in use. ``received_bytes_per_s``
        and ``sent_bytes_per_s``: traffic of all network interfaces but the loopback.
        """
        (then_s, ticks, traffic), self._before = self._before, (self._clock(), self._ticks(), self._traffic())
        now_s, new_ticks, new_traffic = self._before
        figures: dict[str, float] = {}
        if ticks is not None and new_ticks is not None and new_ticks[1] > ticks[1]:
            figures["cpu"] = 1 - (new_ticks[0] - ticks[0]) / (new_ticks[1] - ticks[1])
        if (memory := self._memory()) is not None:
            figures["memory_bytes"] = float(memory)
        if traffic is not None and new_traffic is not None and now_s > then_s:
            for name, before, after in zip(("received", "sent"), traffic, new_traffic, strict=True):
                figures[f"{name}_bytes_per_s"] = max(0, after - before) / (now_s - then_s)
        return figures

    def _ticks(self) -> tuple[int, int] | None:
        """Return the idle and all clock ticks of all processors so far. None if unknown."""
        with suppress(OSError, ValueError, IndexError):
            counts = [int(word) for word in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:]]
            return sum(counts[column] for column in _IDLE), sum(counts[:_COUNTED])
        return None

    def _memory(self) -> int | None:
        """Return the bytes of memory in use; None if unknown."""
        with suppress(OSError, ValueError, KeyError, IndexError):
            rows = (line.split() for line in (self._proc / "meminfo").read_text().splitlines())
            sizes = {row[0].rstrip(":"): int(row[1]) * _KIB for row in rows}
            return sizes["MemTotal"] - sizes["MemAvailable"]
        return None

    def _traffic(self) -> tuple[int, int] | None:
        """Return the bytes that all interfaces have received and sent. Loopback is left out; None if unknown."""
        with suppress(OSError, ValueError, IndexError):
            received = sent = 0
            for line in (self._proc / "net" / "dev").read_text().splitlines()[2:]:
                name, _, counts = line.partition(":")
                if name.strip() != "lo":
                    received, sent = received + int(counts.split()[0]), sent + int(counts.split()[8])
            return received, sent
        return None
