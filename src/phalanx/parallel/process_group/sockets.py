"""Sockets of this process: which it has open, and how fast its connections to other machines are.

The kernel counts, for each TCP connection, the bytes that the peer has acknowledged and the time during which some were not
(``tcpi_busy_time``, tcp_info in linux/tcp.h). Their quotient is the rate of the link while it was used, whatever the process did
between its messages. Ranks of a synchronous run all wait for the slowest link, so no time of theirs shows which one that is; this rate does.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

_TCP_INFO = 11
"""``TCP_INFO`` of linux/tcp.h; ``socket`` has it on Linux alone."""
_TCP_INFO_BYTES = 192
_ACKNOWLEDGED = struct.Struct("=Q")
_ACKNOWLEDGED_AT = 120
_TIMES = struct.Struct("=QQ")
"""Microseconds: with bytes that are not acknowledged, and of these those in which the receiver's window was full."""
_TIMES_AT = 168
_LEAST_BYTES = 1 << 20
"""The time is counted in ticks of the kernel, up to 10 ms each; a megabyte takes some ticks at 10 Gbit/s."""


def open_sockets() -> list[tuple[int, int]]:
    """Return descriptor and inode of every socket of this process. Those that close meanwhile are left out."""
    sockets = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since it was listed
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                sockets.append((int(name), int(target[8:-1])))
    return sockets


def duplicate_connection(number: int, inode: int) -> socket.socket | None:
    """Return a duplicate of a descriptor; ``None`` if it is not an open Internet connection with this inode."""
    try:
        duplicate = os.dup(number)
    except OSError:
        return None
    # The number may belong to another file by now.
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        return None
    is_same = os.fstat(connection.fileno()).st_ino == inode
    if (
        not is_same
        or connection.family not in (socket.AF_INET, socket.AF_INET6)
        or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ):
        connection.close()
        return None
    return connection


class LinkMeter:
    """Rate at which this process has sent to other machines since the last reading."""

    def __init__(self) -> None:
        """Read the counters of all connections as they are now."""
        self._before = dict(_sent())

    def read(self) -> dict[str, float]:
        """Return ``link_bytes_per_s``: of all connections to other addresses that have sent a megabyte since the last call, the
        greatest rate. Empty if there is none, or no such counters.

        The greatest, because a slow machine slows down the connections of all others to it, but only its own are all slow.
        """
        before, self._before = self._before, dict(_sent())
        rates = [
            (acknowledged - before[inode][0]) / (busy_s - before[inode][1])
            for inode, (acknowledged, busy_s) in self._before.items()
            if inode in before
            and acknowledged - before[inode][0] >= _LEAST_BYTES
            and busy_s > before[inode][1]
        ]
        return {"link_bytes_per_s": max(rates)} if rates else {}


def _sent() -> Iterator[tuple[int, tuple[int, float]]]:
    """Yield, of each connection to another address, its inode, the acknowledged bytes, and the seconds in which some were not."""
    with suppress(OSError):  # no /proc
        for number, inode in open_sockets():
            connection = duplicate_connection(number, inode)
            if connection is None:
                continue
            with connection, suppress(OSError):  # no longer connected
                if connection.getpeername()[0] == connection.getsockname()[0]:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _TCP_INFO_BYTES)
                if len(info) == _TCP_INFO_BYTES:  # Linux 4.10 and later
                    busy_us, full_us = _TIMES.unpack_from(info, _TIMES_AT)
                    yield (
                        inode,
                        (_ACKNOWLEDGED.unpack_from(info, _ACKNOWLEDGED_AT)[0], (busy_us - full_us) / 1e6),
                    )
