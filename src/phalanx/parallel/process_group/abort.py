"""Aborts the collectives that a rank hangs in, so that its process can continue without a restart.

When a peer dies or stops, the others wait in a collective: on NCCL until the communicator is aborted, on gloo until the group's
timeout. (gloo's ``abort`` does nothing in PyTorch 2.13.) But gloo returns at once when its connections end. ``Connections`` records
the sockets that the process had before it joined, and ends later ones. So an operation on a collective or the store raises within
milliseconds. Connections of trackers and object stores are left alone: those opened inside ``foreign``, and all opened after the
groups are made (``settle``). Listening sockets are left alone too, because gloo ends the process when one of them fails. One wait
cannot be aborted: while a gloo group is made, a rank retries to connect to a peer until the group's timeout, even if the peer is
dead. Its agent then kills it.

The way in which a connection ends matters. Gloo reports the end to operations that wait for their turn, but not to one whose bytes are in
flight (``Pair::signalException`` in gloo/transport/tcp/pair.cc, PyTorch 2.13). That one waits until the group's timeout, and no
later call wakes it. This happens in the middle of a message, and if a write fails before the end has been read. Writes fail after
``shutdown`` of that direction, and after a reset, which closing a connection with unread bytes sends to the peer. It also happens if a
message begins in the microseconds between the look at a connection and its end. The agent then kills the rank.

- ``interrupt`` shuts down the read direction if no bytes are in flight, and keeps a duplicate of the descriptor. So gloo's own
  ``close`` does not reach the peer, which gets its own order to leave.
- ``release`` ends the connections after the groups are destroyed.
- ``shut`` ends both directions at once: for connections that are still being made, for NCCL, and for injected link faults.

All of these may be called from any thread, and more than once.
"""

from __future__ import annotations

import fcntl
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
from phalanx.parallel.process_group.sockets import duplicate_connection, open_sockets
from phalanx.parallel.torch_compat import abort_nccl

_BUSY_S = 1.0
"""Seconds for which a connection with bytes in flight is not interrupted. A stopped peer never reads them."""
_FULL_BYTES = 4096
"""A send buffer with fewer unacknowledged bytes has room: it starts with 16 KiB (tcp_wmem in tcp(7)). Acknowledgments take up to 40 ms.
"""
_LOOK_S = 0.005
_READ_BYTES = 1 << 20


@dataclass
class _Duplicate:
    """A second descriptor of a connection between ranks."""

    socket: socket.socket
    is_interrupted: bool = False


class Connections:
    """Connections of a rank to the other ranks of its epoch. Create it before the rank joins them."""

    def __init__(self) -> None:
        """Note the sockets that this process has open already: they are not connections to ranks, and are never touched."""
        self._foreign = frozenset(inode for _, inode in open_sockets())
        self._settled: frozenset[int] | None = None
        self._lock = threading.Lock()
        self._duplicates: dict[int, _Duplicate] = {}
        """By the inode of the connection."""
        self._first_interrupt_s: float | None = None

    @contextmanager
    def foreign(self) -> Iterator[None]:
        """Context whose new connections do not belong to the epoch, such as those of a tracker."""
        before = frozenset(inode for _, inode in open_sockets())
        yield
        self._foreign |= frozenset(inode for _, inode in open_sockets()) - before

    def settle(self) -> None:
        """Declare that the ranks have made all of their connections. Those opened from now on are foreign."""
        self._settled = frozenset(inode for _, inode in open_sockets()) - self._foreign

    def shut(self) -> int:
        """End both directions of every connection of the epoch at once; return their number."""
        own = self._settled
        sockets = [(number, inode) for number, inode in open_sockets() if inode not in self._foreign]
        return sum(_shut(number, inode) for number, inode in sockets if own is None or inode in own)

    def interrupt(self) -> None:
        """Make gloo operations that wait for other ranks raise, by ending the receiving side of each connection. The
        other ranks notice nothing yet.

        A connection with bytes in flight is left alone for up to a second after the first call. Call it until all
        operations have returned. If the connections were never settled, all are shut down in both directions.
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
                    _discard(
                        duplicate.socket
                    )  # a peer may wait for room to write the remainder of its message
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
        """End the connections that ``interrupt`` and ``hold`` keep, after this rank has left its groups.

        Waits up to a second in total for peers that still send.
        """
        with self._lock:
            duplicates, self._duplicates = self._duplicates, {}
        until_s = time.monotonic() + _BUSY_S
        for duplicate in duplicates.values():
            with duplicate.socket as connection:
                # Closing a connection with unread bytes resets it. So wait for a peer to finish its message.
                while _discard(connection) and time.monotonic() < until_s:
                    time.sleep(_LOOK_S)
                with suppress(OSError):  # the peer has ended the connection
                    connection.shutdown(socket.SHUT_WR)

    def _duplicate(self) -> set[int]:
        """Duplicate each settled connection that gloo has open and that has no duplicate yet. Return the inodes of the
        settled connections that gloo has open.
        """
        own = self._settled or frozenset()
        numbers = {duplicate.socket.fileno() for duplicate in self._duplicates.values()}
        sockets = {
            inode: number for number, inode in open_sockets() if inode in own and number not in numbers
        }
        for inode in sockets.keys() - self._duplicates.keys():
            connection = duplicate_connection(sockets[inode], inode)
            if connection is not None:
                self._duplicates[inode] = _Duplicate(connection)
        return set(sockets)


def abort(connections: Connections, device: torch.device) -> None:
    """Abort the collective that this process is in, or will enter before it leaves its groups.

    Thread-safe. On GPUs it aborts NCCL's communicators and closes all connections. On CPUs it must be called until
    operations have returned.
    """
    if not on_gpu(device):
        connections.interrupt()
        return
    try:
        if dist.is_initialized():
            abort_nccl()
    finally:  # also if NCCL's abort fails because the main thread is making another group
        connections.shut()


def _shut(number: int, inode: int) -> bool:
    """Shut the connection down in both directions; return False if it is none or already closed."""
    connection = duplicate_connection(number, inode)
    if connection is None:
        return False
    with connection:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # no longer connected
            return False
        return True


def _is_idle(connection: socket.socket) -> bool:
    """Return True if no received bytes are unread and fewer than ``_FULL_BYTES`` sent ones are unacknowledged. Reads
    the socket's queues.
    """
    unacknowledged, unread = (
        struct.unpack("i", fcntl.ioctl(connection, request, struct.pack("i", 0)))[0]
        for request in (termios.TIOCOUTQ, termios.FIONREAD)
    )
    return not unread and unacknowledged < _FULL_BYTES


def _discard(connection: socket.socket) -> int:
    """Read and discard bytes that are there without waiting; return their number, also if the connection then fails."""
    nbytes = 0
    with suppress(OSError):
        while part := connection.recv(_READ_BYTES, socket.MSG_DONTWAIT):
            nbytes += len(part)
    return nbytes
