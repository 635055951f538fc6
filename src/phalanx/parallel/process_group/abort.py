"""Aborts the collectives that a rank hangs in, so that its process can go on without a restart.

When a peer dies or stops, the others wait in a collective: on NCCL until somebody aborts the communicator, on gloo until the
group's timeout, because gloo's ``abort`` does nothing (PyTorch 2.13). What wakes gloo at once is the end of its
connections: ``Connections`` remembers which sockets the process had before it joined, and ``shut`` ends all that came
later, so that whoever waits in a collective or for the store gets an error within milliseconds. Listening sockets are
left alone; gloo ends the process when one of them fails. One wait is beyond reach: while a gloo group is made, a rank tries
to connect to a peer again and again until the group's timeout, even if the peer is gone; its agent then kills it.

``shut`` may be called from any thread, and more than once.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx.parallel.mesh.torch_compat import abort_nccl


@dataclass(frozen=True)
class Connections:
    """The sockets that a process had at some moment, by inode."""

    before: frozenset[int]

    @classmethod
    def now(cls) -> Connections:
        """The connections of now; to be called before joining a process group."""
        return cls(frozenset(inode for _, inode in _sockets()))

    def shut(self) -> int:
        """Ends every connection over IP made since; returns how many there were."""
        return sum(_shut(number) for number, inode in _sockets() if inode not in self.before)


def abort(connections: Connections, device: torch.device) -> None:
    """Aborts the collective that this process is in, or will enter before it leaves its groups."""
    if device.type == "cuda" and dist.is_initialized():
        abort_nccl()
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


def _shut(number: int) -> bool:
    try:
        mine = socket.socket(fileno=os.dup(number))
    except OSError:
        return False
    with mine:
        if mine.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if mine.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        try:
            mine.shutdown(socket.SHUT_RDWR)
        except OSError:  # not connected any more
            return False
        return True
