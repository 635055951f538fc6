"""A connection between two processes that have layers of one model: sealed messages, and behind them raw numbers in sealed pieces.

Whoever sits in between can read states and pages, and cut the connection, but cannot change a bit (``phalanx.serve.workers.sealed_wire``). A machine that
vanishes is noticed by the kernel, which asks an idle connection for a sign of life, within half a minute.
"""

from __future__ import annotations

import socket

from phalanx.checkpoint.snapshot.wire import Wire, secured_client, secured_server
from phalanx.run.token_proof import Role
from phalanx.serve.stages import messages as m
from phalanx.serve.workers.sealed_wire import SealedWire

PROOF_S = 20.0
_PIECE_BYTES = 8 << 20
_ALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000))


class StageLink:
    """One end of a connection after the proof; of one thread, but for ``ended``. Methods raise WireError where it breaks."""

    def __init__(self, connection: socket.socket, token: str, role: Role, peer: str) -> None:
        """Proves to each other that both know ``token``. Raises RefusedError and WireError."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _ALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        secured = (
            secured_client(connection, None, "") if role == "client" else secured_server(connection, None)
        )
        wire = Wire(secured, peer)
        wire.set_deadline(PROOF_S)
        self._connection = secured
        self._sealed = SealedWire(wire, token, role, m.PURPOSE)
        wire.set_timeout(None)  # a step may take long, and between two there may be hours

    @property
    def peer(self) -> str:
        """Who is at the other end, for people."""
        return self._sealed.peer

    def say(self, message: m.FromStage | m.ToStage, body: memoryview | bytes = b"") -> None:
        """Sends a message and the raw bytes that it announces."""
        self._sealed.send(m.encode(message))
        view = memoryview(body)
        for begin in range(0, len(view), _PIECE_BYTES):
            self._sealed.send(bytes(view[begin : begin + _PIECE_BYTES]))

    def hear(self) -> bytes:
        """The next message, encoded."""
        return self._sealed.receive()

    def body(self, nbytes: int) -> bytearray:
        """The raw bytes that the last message has announced."""
        found = bytearray()
        while len(found) < nbytes:
            found += self._sealed.receive()
        return found

    def ended(self) -> bool:
        """Whether the other side is gone, also while nobody says anything; from any thread."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Ends the connection."""
        self._sealed.raw.close()
