"""A port at which peers prove themselves: accept thread, doorway, optional TLS, handshake, then one thread for each connection.

Connections block in threads of their own, since bulk bytes have no place in an event loop. Anyone who reaches the port can open connections
and send nothing. So those that have not proven themselves do not count among the connections that are served; the handshake as a whole has one deadline; and if
all their places are taken, the one that has waited longest is ended to make room, one from an address that has never proven itself
first. An honest client needs a place for the time of two messages only. A failure before the proof is logged for debugging alone: strangers must not fill the log.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from phalanx.hardware.local.network import family_of, join_address
from phalanx.wire.connection import FramedConnection, SealedConnection, authenticate
from phalanx.wire.messages import WireError

_log = logging.getLogger(__name__)
HANDSHAKE_S = 5.0
_PAUSE_S = 0.2
_BACKLOG = 1024
_KNOWN_HOSTS = 1 << 16


@dataclass(eq=False)
class Newcomer:
    """A connection during its handshake."""

    connection: socket.socket
    """Replaced by the TLS socket around it, once there is one."""
    host: str
    arrived_s: float = field(default_factory=time.monotonic)


class Doorway:
    """The connections of one port that have not proven themselves yet; for all of its threads."""

    def __init__(self, places: int) -> None:
        """``places`` is the most connections that may be in their handshake at once."""
        self._places = places
        self._lock = threading.Lock()
        self._waiting: OrderedDict[Newcomer, None] = OrderedDict()
        self._proven_hosts: OrderedDict[str, None] = OrderedDict()
        """Hosts that have proven themselves, the latest last."""

    def enter(self, connection: socket.socket, host: str) -> Newcomer:
        """Give a new connection a place, and return it as a newcomer.

        If there is no place, shut the oldest newcomer, if possible of a host that has never proven itself.
        """
        newcomer = Newcomer(connection, host)
        with self._lock:
            if len(self._waiting) >= self._places:
                strangers = (waiting for waiting in self._waiting if waiting.host not in self._proven_hosts)
                oldest = next(strangers, None) or next(iter(self._waiting))
                del self._waiting[oldest]
                shut(oldest.connection)
            self._waiting[newcomer] = None
        return newcomer

    def leave(self, newcomer: Newcomer, *, proven: bool) -> None:
        """Free the place. A host that has ``proven`` itself is remembered, as one of the latest 65,536.

        A second call frees nothing, and forgets no host.
        """
        with self._lock:
            self._waiting.pop(newcomer, None)
            if proven:
                self._proven_hosts[newcomer.host] = None
                self._proven_hosts.move_to_end(newcomer.host)
                if len(self._proven_hosts) > _KNOWN_HOSTS:
                    self._proven_hosts.popitem(last=False)

    def close(self) -> None:
        """End all newcomers' connections."""
        with self._lock:
            for newcomer in self._waiting:
                shut(newcomer.connection)


def shut(connection: socket.socket) -> None:
    """End a connection, which wakes every thread that waits on it."""
    with suppress(OSError):  # it has ended by itself
        connection.shutdown(socket.SHUT_RDWR)


class ProvenPort:
    """Serves peers from construction until ``close``; ``name`` is the port's in threads and logs."""

    def __init__(
        self,
        serve: Callable[[SealedConnection], None],
        name: str,
        purpose: str,
        token: str,
        *,
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
        most_newcomers: int = 64,
        handshake_timeout_s: float = HANDSHAKE_S,
    ) -> None:
        """Listen on any free port of ``host`` (see ``port``).

        Args:
            serve: Called with each proven connection, in a thread of its own. The connection ends with the call.
            name: The port's, in threads and logs.
            purpose: Purpose of the proof: one for another port is worth nothing here.
            token: The token that both ends must know.
            host: The address to listen at.
            tls: For TLS.
            most_newcomers: Connections during their handshake.
            handshake_timeout_s: Limit of a whole handshake, TLS included.

        Raises OSError if the port cannot be had.
        """
        self._serve_peer, self._name, self._purpose, self._tls = serve, name, purpose, tls
        self._token: str = token
        self._earlier: Callable[[], Sequence[str]] = tuple
        self._handshake_timeout_s = handshake_timeout_s
        self._doorway = Doorway(most_newcomers)
        self._open: set[socket.socket] = set()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._listener = socket.create_server((host, 0), family=family_of(host), backlog=_BACKLOG)
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def change_token(self, token: str, earlier: Callable[[], Sequence[str]]) -> None:
        """Require ``token`` from now on, or one of those that ``earlier`` returns at the time."""
        self._token, self._earlier = token, earlier

    @property
    def port(self) -> int:
        """The port number that the system chose."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """End all connections and stop listening. Returns once the listening thread has ended; serving threads may
        still run.
        """
        with self._lock:
            self._closed.set()
            for connection in self._open:
                shut(connection)
        self._doorway.close()
        shut(self._listener)
        self._thread.join()
        self._listener.close()
        # Break the reference cycle of owner and callback, so that memory and descriptors of both are freed at once.
        self._serve_peer = _refuse

    def _accept(self) -> None:
        """Accept connections until closed, each served in a thread of its own.

        A failure to accept, or to start a thread, is logged and followed by a pause of 0.2 s.
        """
        while not self._closed.is_set():
            try:
                connection, address = self._listener.accept()
            except OSError as error:  # for example no free descriptor: others may be closed in a moment
                if not self._closed.wait(_PAUSE_S):
                    _log.warning("%s: cannot accept connections: %s", self._name, error)
                continue
            newcomer = self._doorway.enter(connection, address[0])
            peer = join_address(*address[:2])
            try:
                threading.Thread(
                    target=self._serve, args=(newcomer, peer), name=self._name, daemon=True
                ).start()
            except RuntimeError as error:
                _log.warning("%s: %s: no thread can be started for it: %s", self._name, peer, error)
                self._doorway.leave(newcomer, proven=False)
                connection.close()
                self._closed.wait(_PAUSE_S)

    def _serve(self, newcomer: Newcomer, peer: str) -> None:
        """Authenticate a newcomer within the time limit and call ``serve`` with its connection; close it
        afterwards.

        A broken connection is logged, as a warning only if the peer had proven itself, and not once the port is
        closed.
        """
        level = logging.DEBUG
        try:
            with self._secured(newcomer) as connection, self._listed(connection):
                raw = FramedConnection(connection, peer)
                raw.set_deadline(newcomer.arrived_s + self._handshake_timeout_s - time.monotonic())
                seals = authenticate(raw, self._token, "server", self._purpose, self._earlier())
                self._doorway.leave(newcomer, proven=True)
                level = logging.WARNING
                raw.set_timeout(None)
                self._serve_peer(SealedConnection(raw, seals))
        except (WireError, OSError) as error:
            if not self._closed.is_set():
                _log.log(level, "%s: connection closed: %s", self._name, error)
        finally:
            self._doorway.leave(newcomer, proven=False)
            with suppress(OSError):
                newcomer.connection.close()

    def _secured(self, newcomer: Newcomer) -> socket.socket:
        """Return the newcomer's connection, after a TLS handshake if there is a context. Raises ``OSError``, also
        after the time limit.
        """
        newcomer.connection.settimeout(self._handshake_timeout_s)
        newcomer.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            secured = self._tls.wrap_socket(
                newcomer.connection, server_side=True, do_handshake_on_connect=False
            )
            newcomer.connection = secured
            secured.do_handshake()  # its timeout covers the complete handshake
        return newcomer.connection

    @contextmanager
    def _listed(self, connection: socket.socket) -> Iterator[None]:
        """List a connection among those that ``close`` ends. Raises WireError if the port is closing."""
        with self._lock:
            if self._closed.is_set():
                raise WireError("the port is closing")
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)


def _refuse(peer: SealedConnection) -> None:
    raise WireError(f"{peer.peer}: the port is closed")
