"""The processes of a run that this machine holds, with their states: which of them is stopped, or waits for a disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from phalanx.run.directory.paths import RunDirectory
from phalanx.watch.runs.lock import holder_of
from phalanx.watch.why.observed import ProcessSeen

_MOST = 4096


def processes_of(directory: RunDirectory, proc: Path = Path("/proc")) -> Iterator[ProcessSeen]:
    """Yield the process that holds the run directory and its descendants, as far as this user may read them."""
    holder = holder_of(directory)
    waiting = [] if holder is None else [holder]
    for _ in range(_MOST):
        if not waiting:
            return
        pid = waiting.pop()
        with suppress(OSError, ValueError, IndexError):
            # The name of the program, in parentheses, may hold spaces.
            state = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
            yield ProcessSeen(pid, state, _rank(proc / str(pid)))
        for children in (proc / str(pid) / "task").glob("*/children"):
            with suppress(OSError, ValueError):
                waiting += map(int, children.read_text().split())


def _rank(process: Path) -> int | None:
    with suppress(OSError, ValueError):
        for variable in (process / "environ").read_bytes().split(b"\0"):
            name, _, value = variable.partition(b"=")
            if name == b"PHALANX_RANK":
                return int(value)
    return None
