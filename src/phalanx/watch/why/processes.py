"""The processes of a run that this machine holds, with their states: which of them is stopped, or waits for a disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from phalanx.run.directory.paths import RunDirectory
from phalanx.watch.runs.lock import holder_of
from phalanx.watch.why.observed import ProcessSeen

_MOST = 4096
_RANK = (b"PHALANX_RANK", b"RANK", b"SLURM_PROCID")
"""Variables that hold the rank: of our own launcher, of torchrun, and of srun."""


def processes_of(directory: RunDirectory, proc: Path = Path("/proc")) -> Iterator[ProcessSeen]:
    """Yield the process that holds the run directory, its siblings that write there, and the descendants of them all.

    The siblings are the ranks that torchrun or srun has started beside rank 0. Processes that this user may not read are left out.
    """
    holder = holder_of(directory)
    if holder is None:
        return
    stat = _stat(proc / str(holder))
    siblings = _children(proc / stat[1]) if stat else []
    ranks = [pid for pid in siblings if pid != holder and _writes_in(directory, proc / str(pid))]
    waiting = [*ranks, holder]
    for _ in range(_MOST):
        if not waiting:
            return
        pid = waiting.pop()
        if stat := _stat(proc / str(pid)):
            yield ProcessSeen(pid, stat[0], _rank(proc / str(pid)))
        waiting += _children(proc / str(pid))


def _stat(process: Path) -> list[str]:
    """Return the process's state, the id of its parent and what follows in its file ``stat``; empty if that cannot be read."""
    with suppress(OSError):
        # The name of the program, in parentheses, may hold spaces.
        return (process / "stat").read_text().rpartition(")")[2].split()
    return []


def _children(process: Path) -> list[int]:
    pids: list[int] = []
    for children in (process / "task").glob("*/children"):
        with suppress(OSError, ValueError):
            pids += map(int, children.read_text().split())
    return pids


def _writes_in(directory: RunDirectory, process: Path) -> bool:
    """Return True if the process has a log of the run open."""
    logs = directory.logs.resolve()
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                if Path(os.readlink(descriptor)).parent == logs:
                    return True
    return False


def _rank(process: Path) -> int | None:
    variables: dict[bytes, bytes] = {}
    with suppress(OSError):
        for variable in (process / "environ").read_bytes().split(b"\0"):
            name, _, value = variable.partition(b"=")
            variables[name] = value
    for name in _RANK:
        if (value := variables.get(name, b"")).isdigit():
            return int(value)
    return None
