"""Aborts the collectives that a rank hangs in, so that its process can go on without a restart.

When a peer dies or stops, the others wait in a collective: on NCCL until somebody aborts the communicator, on gloo until the
group's timeout, because gloo's ``abort`` does nothing (PyTorch 2.13). What wakes gloo at once is the end of its
connections: ``Connections`` remembers which sockets the process had before it joined, and ends those that came
later, so that whoever waits in a collective or for the store gets an error within milliseconds. Connections of trackers and object
stores are left alone: those opened by name (``foreign``), and all that are opened once the groups are made (``settle``). Listening sockets
are left alone too; gloo ends the process when one of them fails. One wait is beyond reach: while a gloo group is made, a rank tries
to connect to a peer again and again until the group's timeout, even if the peer is gone; its agent then kills it.

How a connection ends matters. gloo reports its end to the operations that wait for their turn, but not to one whose bytes are under way
(``Pair::signalException`` in gloo/transport/tcp/pair.cc, PyTorch 2.13): that one waits until the group's timeout, and no later call wakes it.
It happens in the middle of a message, and if a write fails before the end has been read. Writes fail after ``shutdown`` of that
direction, and after a reset, which closing a connection with unread bytes sends to the peer. So ``interrupt`` ends the direction that is read,
where no bytes are under way, and keeps a duplicate of the descriptor. gloo's own ``close`` then does not reach the peer, which gets its
own order to leave. ``release`` ends the connections once the groups are gone. ``shut`` ends both directions at once: for connections that are
still being made, for NCCL, and for faults that cut a link.

All of these may be called from any thread, and more than once.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx.hardware.local.device import on_gpu
from phalanx.parallel.mesh.torch_compat import abort_nccl

_BUSY_S = 1.0
"""Seconds for which a connection whose bytes are under way is not interrupted. A stopped peer never takes them."""
_FULL_BYTES = 4096
"""A send buffer with fewer unacknowledged bytes has room: it begins with 16 KiB (tcp_wmem in tcp(7)). Acknowledgments come up to 40 ms late."""
_LOOK_S = 0.005
_READ_BYTES = 1 << 20


@dataclass
class _Duplicate:
    """A second descriptor of a connection between ranks."""

    socket: socket.socket
    is_interrupted: bool = False


class Connections:
    """The connections over which a rank speaks to the other ranks of its epoch; made before it joins them."""

    def __init__(self) -> None:
        self._foreign = frozenset(inode for _, inode in _sockets())
        self._settled: frozenset[int] | None = None
        self._lock = threading.Lock()
        self._duplicates: dict[int, _Duplicate] = {}
        """By the inode of the connection."""
        self._first_interrupt_s: float | None = None

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
        """End both directions of every connection of the epoch at once; return their number."""
        own = self._settled
        sockets = [(number, inode) for number, inode in _sockets() if inode not in self._foreign]
        return sum(_shut(number, inode) for number, inode in sockets if own is None or inode in own)

    def interrupt(self) -> None:
        """Wake the operations of gloo that wait for other ranks, with an error. The other ranks notice nothing yet.

        A connection whose bytes are under way is left alone for up to a second after the first call: call it until all have woken.
        """
        if self._settled is None:
            self.shut()
            return
        with self._lock:
            now_s = time.monotonic()
            self._first_interrupt_s = self._first_interrupt_s or now_s
            is_late = now_s - self._first_interrupt_s > _BUSY_S
            open_inodes = self._duplicate()
            for inode, duplicate in self._duplicates.items():
                if inode not in open_inodes:
                    _discard(duplicate.socket)  # a peer may wait for room to write the rest of its message
                elif not duplicate.is_interrupted and (is_late or _is_idle(duplicate.socket)):
                    duplicate.is_interrupted = True
                    with suppress(OSError):  # the peer has ended the connection
                        duplicate.socket.shutdown(socket.SHUT_RD)

    def hold(self) -> None:
        """Keep the connections between ranks open until ``release``, also when gloo closes them."""
        if self._settled is not None:
            with self._lock:
                self._duplicate()

    def release(self) -> None:
        """End the connections that ``interrupt`` and ``hold`` keep, after this rank has left its groups."""
        with self._lock:
            duplicates, self._duplicates = self._duplicates, {}
        until_s = time.monotonic() + _BUSY_S
        for duplicate in duplicates.values():
            with duplicate.socket as connection:
                # Closing a connection with unread bytes resets it. A peer in the middle of a message is let finish it.
                while _discard(connection) and time.monotonic() < until_s:
                    time.sleep(_LOOK_S)
                with suppress(OSError):  # the peer has ended the connection
                    connection.shutdown(socket.SHUT_WR)

    def _duplicate(self) -> set[int]:
        """Duplicate the descriptors that have no duplicate yet; return the inodes of the connections that gloo has open."""
        own = self._settled or frozenset()
        numbers = {duplicate.socket.fileno() for duplicate in self._duplicates.values()}
        sockets = {inode: number for number, inode in _sockets() if inode in own and number not in numbers}
        for inode in sockets.keys() - self._duplicates.keys():
            connection = _connection(sockets[inode], inode)
            if connection is not None:
                self._duplicates[inode] = _Duplicate(connection)
        return set(sockets)


def abort(connections: Connections, device: torch.device) -> None:
    """Aborts the collective that this process is in, or will enter before it leaves its groups."""
    if not on_gpu(device):
        connections.interrupt()
        return
    try:
        if dist.is_initialized():
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


def _connection(number: int, inode: int) -> socket.socket | None:
    """Return a duplicate of a descriptor; ``None`` if it is no open Internet connection, or no longer this inode."""
    try:
        connection = socket.socket(fileno=os.dup(number))
    except OSError:
        return None
    is_same = (
        os.fstat(connection.fileno()).st_ino == inode
    )  # else closed meanwhile, and its number given to another
    if (
        not is_same
        or connection.family not in (socket.AF_INET, socket.AF_INET6)
        or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ):
        connection.close()
        return None
    return connection


def _shut(number: int, inode: int) -> bool:
    connection = _connection(number, inode)
    if connection is None:
        return False
    with connection:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # not connected any more
            return False
        return True


def _is_idle(connection: socket.socket) -> bool:
    """Return True if no bytes wait here to be read, and none for room to be written."""
    unacknowledged, unread = (
        struct.unpack("i", fcntl.ioctl(connection, request, struct.pack("i", 0)))[0]
        for request in (termios.TIOCOUTQ, termios.FIONREAD)
    )
    return not unread and unacknowledged < _FULL_BYTES


def _discard(connection: socket.socket) -> int:
    """Read what has arrived; return the number of bytes."""
    nbytes = 0
    with suppress(OSError):
        while part := connection.recv(_READ_BYTES, socket.MSG_DONTWAIT):
            nbytes += len(part)
    return nbytes
