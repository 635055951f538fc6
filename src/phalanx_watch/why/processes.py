"""Local processes of a run, with their states: stopped, in disk wait, or with connections that deliver nothing (proc(5))."""

from __future__ import annotations

import ipaddress
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from phalanx.run.directory.paths import RunDirectory
from phalanx_watch.runs.probe import holder_of
from phalanx_watch.why import observed as o

_MOST = 4096
_RANK = (b"PHALANX_RANK", b"RANK", b"SLURM_PROCID")
"""Environment variables with the rank: of our own launcher, of torchrun, and of srun."""


def processes_of(
    directory: RunDirectory, proc: Path = Path("/proc"), *, with_links: bool = True
) -> Iterator[o.ProcessSeen]:
    """Yield the process that holds the run directory, its siblings that write there, and the descendants of them all, at most ``_MOST``.

    The siblings are the ranks that torchrun or srun has started beside rank 0. Processes that this user may not read
    are left out. Dead links are looked for ``with_links`` only: with thousands of connections on a machine that takes tenths of a second.
    """
    holder = holder_of(directory)
    if holder is None:
        return
    stat = _stat(proc / str(holder))
    siblings = _children(proc / stat[1]) if stat else []
    ranks = [pid for pid in siblings if pid != holder and _writes_in(directory, proc / str(pid))]
    waiting = [*ranks, holder]
    dead_sockets: dict[str, dict[str, o.DeadLinkSeen]] = {}
    for _ in range(_MOST):
        if not waiting:
            return
        pid = waiting.pop()
        if stat := _stat(proc / str(pid)):
            process = proc / str(pid)
            dead = tuple(_dead_links(process, dead_sockets)) if with_links else ()
            yield o.ProcessSeen(
                pid, stat[0], _rank(process), _address_space(process, stat), dead, _cores(pid)
            )
        waiting += _children(proc / str(pid))


def _stat(process: Path) -> list[str]:
    """Return the process's state, the id of its parent and what follows in its file ``stat``; empty if that cannot be read."""
    with suppress(OSError):
        # The name of the program, in parentheses, may hold spaces.
        return (process / "stat").read_text().rpartition(")")[2].split()
    return []


_USER_TICKS = 11
"""Index of the processor time in ``_stat``, which is followed by that in the kernel (fields 14 and 15 of proc(5)), in clock ticks."""
_MEASURED_S = 0.3
"""Clock ticks are 10 ms. On a machine with six times as many busy threads as cores, a process that computes uses five of them."""


def with_processor_use(
    processes: Sequence[o.ProcessSeen],
    proc: Path = Path("/proc"),
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[o.ProcessSeen, ...]:
    """Return the processes with the share of a core that each uses in the next 0.3 s. ``pause`` waits for as many seconds as it gets."""
    before = [(_processor_s(proc / str(process.pid)), clock()) for process in processes]
    pause(_MEASURED_S)
    after = [(_processor_s(proc / str(process.pid)), clock()) for process in processes]
    return tuple(
        replace(process, core_share=(end_s - begin_s) / (end_t - begin_t))
        if begin_s is not None and end_s is not None
        else process
        for process, (begin_s, begin_t), (end_s, end_t) in zip(processes, before, after, strict=True)
    )


def _processor_s(process: Path) -> float | None:
    """Return the processor time that a process has used, in seconds; None if it cannot be read."""
    stat = _stat(process)
    if len(stat) <= _USER_TICKS + 1:
        return None
    return (int(stat[_USER_TICKS]) + int(stat[_USER_TICKS + 1])) / os.sysconf("SC_CLK_TCK")


_SIZE = 20
"""Index of the bytes of address space in what ``_stat`` returns (field 23 of proc(5))."""


def _address_space(process: Path, stat: list[str]) -> float:
    """Return the used share of a process's limit of address space; 0 if it has no limit, or that cannot be read."""
    with suppress(OSError, ValueError, IndexError):
        for line in (process / "limits").read_text().splitlines():
            if line.startswith("Max address space"):
                return int(stat[_SIZE]) / int(line.split()[3])  # "unlimited" is no number
    return 0.0


def _cores(pid: int) -> frozenset[int]:
    """Return the cores that a process may run on; empty if they cannot be read."""
    with suppress(OSError, AttributeError):  # Linux has the call
        return frozenset(os.sched_getaffinity(pid))
    return frozenset()


_ESTABLISHED = "01"


def _dead_links(process: Path, by_namespace: dict[str, dict[str, o.DeadLinkSeen]]) -> list[o.DeadLinkSeen]:
    """Return the dead links among the process's descriptors.

    ``by_namespace`` caches ``_dead_sockets`` by network namespace: the kernel's tables have the sockets of all its processes.
    """
    own: set[str] = set()
    dead: dict[str, o.DeadLinkSeen] = {}
    with suppress(OSError):
        namespace = os.readlink(process / "ns" / "net")
        if namespace not in by_namespace:
            by_namespace[namespace] = _dead_sockets(process)
        dead = by_namespace[namespace]
        for descriptor in (process / "fd").iterdir() if dead else ():
            with suppress(OSError):  # closed since it was listed
                own.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    return [link for inode, link in dead.items() if inode in own]


def _dead_sockets(process: Path) -> dict[str, o.DeadLinkSeen]:
    """Return the established TCP connections with unsent bytes after ``RETRANSMISSIONS`` of one segment, by inode, in the network namespace of
    the process.
    """
    dead: dict[str, o.DeadLinkSeen] = {}
    for name in ("tcp", "tcp6"):
        with suppress(OSError, ValueError, IndexError):
            for line in (process / "net" / name).read_text().splitlines()[1:]:
                _, _, peer, state, queues, _, retransmissions, _, _, inode, *_ = line.split()
                waiting_bytes, count = int(queues.partition(":")[0], 16), int(retransmissions, 16)
                if state == _ESTABLISHED and waiting_bytes and count >= o.RETRANSMISSIONS:
                    dead[inode] = o.DeadLinkSeen(_address(peer), waiting_bytes, count)
    return dead


def _address(text: str) -> str:
    """Return address and port of their form in ``/proc/net/tcp``: words of four bytes in the machine's order, then the port."""
    host, _, port = text.partition(":")
    words = [int(host[first : first + 8], 16).to_bytes(4, sys.byteorder) for first in range(0, len(host), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None) or address
    return f"[{mapped}]:{int(port, 16)}" if mapped.version == 6 else f"{mapped}:{int(port, 16)}"


def _children(process: Path) -> list[int]:
    """Return the child processes of all threads of a process; those that cannot be read are left out."""
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
    """Return the rank in a process's environment; None if it has none, or cannot be read."""
    variables: dict[bytes, bytes] = {}
    with suppress(OSError):
        for variable in (process / "environ").read_bytes().split(b"\0"):
            name, _, value = variable.partition(b"=")
            variables[name] = value
    for name in _RANK:
        if (value := variables.get(name, b"")).isdigit():
            return int(value)
    return None
