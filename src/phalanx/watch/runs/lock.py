"""Whether a process holds a run directory, found without locking anything.

A start of a run holds the file ``lock`` of its directory (``flock``), and the kernel drops that lock with the last of its processes, however
they end. To try the lock would hold it for a moment, in which the run could be refused; so the kernel's own list is read, ``/proc/locks``
(proc(5)). Of a run on another machine, and where there is no such list, nobody here can tell.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.run.directory.paths import RunDirectory
from phalanx.run.directory.regular_file import read_small

_LOCK = re.compile(r"^\d+: FLOCK +\S+ +WRITE +(-?\d+) +([0-9a-f]+):([0-9a-f]+):(\d+) ", re.MULTILINE)
_HOLDER = re.compile(r"process (\d+) on (\S+)")


@dataclass(frozen=True)
class KernelLocks:
    """The exclusive ``flock`` locks of this machine: process, device (major, minor) and inode of each; ``None`` if they are not known."""

    held: frozenset[tuple[int, int, int, int]] | None = field(
        default_factory=lambda: _listed(Path("/proc/locks"))
    )

    def holds(self, directory: RunDirectory) -> bool | None:
        """True if a process of this machine holds the run directory, False if none of any does, ``None`` if that cannot be told."""
        try:
            status, text = (
                directory.lock.stat(),
                read_small(directory.lock).decode(errors="replace"),
            )
        except FileNotFoundError:
            return False
        except OSError:
            return None
        holder = _HOLDER.match(text)
        if holder is None or holder[2] != socket.gethostname() or self.held is None:
            return None
        device = os.major(status.st_dev), os.minor(status.st_dev)
        # Some file systems give other device numbers to stat than to the kernel's list: there the process tells.
        return any(
            inode == status.st_ino and ((major, minor) == device or process == int(holder[1]))
            for process, major, minor, inode in self.held
        )


def holder_of(directory: RunDirectory) -> int | None:
    """The process of this machine that took the lock of the run directory last; ``None`` if that was on another machine, or nobody knows."""
    try:
        holder = _HOLDER.match(read_small(directory.lock).decode(errors="replace"))
    except OSError:
        return None
    return int(holder[1]) if holder is not None and holder[2] == socket.gethostname() else None


def _listed(path: Path) -> frozenset[tuple[int, int, int, int]] | None:
    try:
        text = path.read_text()
    except OSError:
        return None
    found = _LOCK.findall(text)
    return frozenset((int(process), int(a, 16), int(b, 16), int(inode)) for process, a, b, inode in found)
