"""The connections of a data port that have not proven themselves yet: few, for a short time, and none can lock others out.

Whoever reaches the port can open connections and say nothing. So these do not count among the connections that are served; the
handshake as a whole has one deadline; and when all places are taken, the connection that has waited longest is ended to make room,
one from an address that has never proven itself first. An honest client needs a place for the time of two messages only.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field

_KNOWN_HOSTS = 1 << 16


@dataclass(eq=False)
class Newcomer:
    """A connection during its handshake."""

    connection: socket.socket
    """Replaced by the TLS socket around it, once there is one."""
    host: str
    arrived_s: float = field(default_factory=time.monotonic)


class Doorway:
    """The newcomers of one port; for all of its threads."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._waiting: OrderedDict[Newcomer, None] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()
        """Hosts that have proven themselves, the latest last."""

    def enter(self, connection: socket.socket, host: str) -> Newcomer:
        """Gives a new connection a place; where there is none, another newcomer's connection is ended."""
        newcomer = Newcomer(connection, host)
        with self._lock:
            if len(self._waiting) >= self._places:
                strangers = (one for one in self._waiting if one.host not in self._known)
                oldest = next(strangers, None) or next(iter(self._waiting))
                del self._waiting[oldest]
                shut(oldest.connection)
            self._waiting[newcomer] = None
        return newcomer

    def leave(self, newcomer: Newcomer, *, proven: bool) -> None:
        """Gives the place back. Called once more, it does nothing."""
        with self._lock:
            self._waiting.pop(newcomer, None)
            if proven:
                self._known[newcomer.host] = None
                self._known.move_to_end(newcomer.host)
                if len(self._known) > _KNOWN_HOSTS:
                    self._known.popitem(last=False)

    def close(self) -> None:
        """Ends all newcomers' connections."""
        with self._lock:
            for newcomer in self._waiting:
                shut(newcomer.connection)


def shut(connection: socket.socket) -> None:
    """Ends a connection, and so wakes whoever waits on it."""
    with suppress(OSError):  # it has ended by itself
        connection.shutdown(socket.SHUT_RDWR)
