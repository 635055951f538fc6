"""Aborts the collectives that a rank hangs in, so that its process can go on without a restart.

When a peer dies or stops, the others wait in a collective: on NCCL until somebody aborts the communicator, on gloo until the
group's timeout, because gloo's ``abort`` does nothing (PyTorch 2.13). What wakes gloo at once is the end of its
connections: ``Connections`` remembers which sockets the process had before it joined, and ``shut`` ends those that came
later, so that whoever waits in a collective or for the store gets an error within milliseconds. Connections of trackers and object
stores are left alone: those opened by name (``foreign``), and all that are opened once the groups are made (``settle``). Listening sockets
are left alone too; gloo ends the process when one of them fails. One wait is beyond reach: while a gloo group is made, a rank tries
to connect to a peer again and again until the group's timeout, even if the peer is gone; its agent then kills it.

``shut`` may be called from any thread, and more than once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from phalanx.hardware.local.device import on_gpu
from phalanx.parallel.mesh.torch_compat import abort_nccl


class Connections:
    """The connections over which a rank speaks to the other ranks of its epoch; made before it joins them."""

    def __init__(self) -> None:
        self._foreign = frozenset(inode for _, inode in _sockets())
        self._settled: frozenset[int] | None = None

    @contextmanager
    def foreign(self) -> Iterator[None]:
        """Connections that are opened inside are not the epoch's: a tracker's, say."""
        before = frozenset(inode for _, inode in _sockets())
        yield
        self._foreign |= frozenset(inode for _, inode in _sockets()) - before

    def settle(self) -> None:
        """Says that the ranks have made all of their connections: what is opened from now on is foreign."""
        self._settled = frozenset(inode for _, inode in _sockets()) - self._foreign

    def shut(self) -> int:
        """Ends every connection of the epoch; returns how many there were."""
        own = self._settled
        found = [(number, inode) for number, inode in _sockets() if inode not in self._foreign]
        return sum(_shut(number, inode) for number, inode in found if own is None or inode in own)


def abort(connections: Connections, device: torch.device) -> None:
    """Aborts the collective that this process is in, or will enter before it leaves its groups."""
    try:
        if on_gpu(device) and dist.is_initialized():
            abort_nccl()
    finally:  # also where NCCL's abort fails, because the main thread is making another group just now
        connections.shut()


def _sockets() -> list[tuple[int, int]]:
    """Descriptor and inode of every socket of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since it was listed
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found.append((int(name), int(target[8:-1])))
    return found


def _shut(number: int, inode: int) -> bool:
    try:
        copy = os.dup(number)
        mine = socket.socket(fileno=copy)
    except OSError:
        return False
    with mine:
        if os.fstat(copy).st_ino != inode:  # closed meanwhile, and its number given to another
            return False
        if mine.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if mine.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        try:
            mine.shutdown(socket.SHUT_RDWR)
        except OSError:  # not connected any more
            return False
        return True
