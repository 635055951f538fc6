"""Use of a run's machines: processors, memory, network and GPU, each measured by the machine's first rank.

The figures travel in the all-reduce in which ranks exchange their own numbers once a window (``phalanx.train.step.meters``), so they cost
no collective and no wait of their own. They are no columns of ``ranks.bin``: its frames have one number for each rank, and its
columns are its format. What is kept is an event whose size does not grow with the machines (``MachineUsed``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.observe.events import MachineUsed
from phalanx.parallel.mesh import RankMachines

# Use of this machine by all of its processes: processors, memory and network, from the counters of Linux. Reading them takes a
# fraction of a millisecond. Other systems have no such counters.

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
        """Return the figures that can be read, rates since the last call. Others are left out.

        ``cpu``: share of the processors' time in use, 0 to 1. ``memory_bytes``: memory in use.
        ``received_bytes_per_s`` and ``sent_bytes_per_s``: traffic of all network interfaces except the loopback.
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
        """Return the idle and the total clock ticks of all processors since boot, from ``/proc/stat``. None if they cannot be read."""
        with suppress(OSError, ValueError, IndexError):
            counts = [int(word) for word in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:]]
            return sum(counts[column] for column in _IDLE), sum(counts[:_COUNTED])
        return None

    def _memory(self) -> int | None:
        """Return the bytes of memory in use: total minus available, from ``/proc/meminfo``. None if they cannot be read."""
        with suppress(OSError, ValueError, KeyError, IndexError):
            rows = (line.split() for line in (self._proc / "meminfo").read_text().splitlines())
            sizes = {row[0].rstrip(":"): int(row[1]) * _KIB for row in rows}
            return sizes["MemTotal"] - sizes["MemAvailable"]
        return None

    def _traffic(self) -> tuple[int, int] | None:
        """Return the bytes that all interfaces except the loopback have received and sent, from ``/proc/net/dev``.
        None if they cannot be read.
        """
        with suppress(OSError, ValueError, IndexError):
            received = sent = 0
            for line in (self._proc / "net" / "dev").read_text().splitlines()[2:]:
                name, _, counts = line.partition(":")
                if name.strip() != "lo":
                    received, sent = received + int(counts.split()[0]), sent + int(counts.split()[8])
            return received, sent
        return None


MACHINE_FIGURES = (
    *("cpu", "memory_bytes", "received_bytes_per_s", "sent_bytes_per_s", "link_bytes_per_s"),
    *("gpu", "gpu_watts"),
)
"""The columns of a table of machines; ``MachineUsed`` defines them. No figure is below zero."""
FEW_MACHINES = 8
"""Up to so many machines have their own figures in an event."""
_READING_S = 10.0
"""Least time between two readings of a machine."""
_READINGS = 500
"""The time between them is at least this part of the time of the start."""


class MachineTable:
    """The newest figures of all machines, on one rank.

    Args:
        machines: The machine of each rank.
        rank: This rank.
        measure: Returns the figures of this machine since its last call, as far as they are known.
        clock: In seconds.
    """

    def __init__(
        self,
        machines: RankMachines,
        rank: int,
        measure: Callable[[], Mapping[str, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with all figures unknown. ``measure`` reads this machine; ``clock`` is in seconds."""
        self._names, self._measure, self._clock = machines.names, measure, clock
        self.place = machines.measured_by(rank)
        """The index of this rank's machine if this rank measures it, else ``None``."""
        self.rows: NDArray[np.float64] = np.full((len(machines.names), len(MACHINE_FIGURES)), np.nan)
        """``(machines, figures)``: NaN where a figure is unknown. Other machines' rows are those of the newest exchange."""
        self.readings = 0
        """Readings of this machine so far."""
        self._began_s = self._read_s = clock()

    def refresh(self) -> None:
        """Measure this machine, if this rank does: every ten seconds at first, ever less often in a long start."""
        now_s = self._clock()
        pause_s = max(_READING_S, (now_s - self._began_s) / _READINGS)
        if self.place is None or now_s - self._read_s < pause_s:
            return
        self._read_s = now_s
        self.readings += 1
        figures = self._measure()
        self.rows[self.place] = [figures.get(name, np.nan) for name in MACHINE_FIGURES]

    def event(self, step: int) -> MachineUsed | None:
        """Return the event for the newest figures, after ``step``; ``None`` if no figure is known."""
        return machines_used(step, self._names, self.rows)


def machines_used(step: int, names: tuple[str, ...], rows: NDArray[np.float64]) -> MachineUsed | None:
    """Summarize the figures of machines, ``(machines, figures)``, NaN if unknown: median, least and most with their
    nodes. ``None`` if no figure is known.

    With at most ``FEW_MACHINES``, each one's figures are listed too; with one measured machine, only its own are
    returned.
    """
    measured = np.flatnonzero(~np.isnan(rows).all(1))
    if not len(measured):
        return None
    figures, least, most = dict[str, float](), dict[str, float](), dict[str, float]()
    least_node, most_node = dict[str, str](), dict[str, str]()
    for name, column in zip(MACHINE_FIGURES, rows.T, strict=True):
        if np.isnan(column).all():
            continue
        figures[name] = float(np.nanmedian(column))
        low, high = int(np.nanargmin(column)), int(np.nanargmax(column))
        least[name], least_node[name] = float(column[low]), names[low]
        most[name], most_node[name] = float(column[high]), names[high]
    if len(measured) == 1:  # there is nothing to compare it with
        return MachineUsed(step, names[measured[0]], figures)
    by_node = {
        names[place]: {
            name: float(value)
            for name, value in zip(MACHINE_FIGURES, rows[place], strict=True)
            if not np.isnan(value)
        }
        for place in measured
        if len(measured) <= FEW_MACHINES
    }
    return MachineUsed(step, names[0], figures, len(measured), least, most, least_node, most_node, by_node)
