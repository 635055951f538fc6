"""Sealed messages on a proven connection: each carries the HMAC of its number and content, under a key that its handshake has made.

Whoever sits in between can cut the connection, and read it, but can neither alter, add, repeat nor swap a message. The proof and the seals
are those of the fleet's control plane (``phalanx.run.peers.token_proof``).
"""

from __future__ import annotations

import struct
from threading import Lock

from phalanx.checkpoint.snapshot.wire import Wire, WireError, authenticate
from phalanx.run.peers.token_proof import SEAL_BYTES, ForgedError, Role

LENGTH = struct.Struct("<I")
LONGEST_MESSAGE_BYTES = 16 << 20


class SealedWire:
    """A connection after its proof. ``send`` may be called from any thread, ``receive`` from one."""

    def __init__(self, wire: Wire, token: str, role: Role, purpose: str) -> None:
        """Proves to each other that both know ``token``. Raises RefusedError and WireError, as ``authenticate`` does."""
        self.raw = wire
        """For raw bytes, which carry no seal: a sealed message has to hold their digest."""
        seals = authenticate(wire, token, role, purpose=purpose)
        self._outgoing, self._incoming, self._lock = seals.outgoing, seals.incoming, Lock()

    @property
    def peer(self) -> str:
        """Who is at the other end, for people."""
        return self.raw.peer

    def send(self, body: bytes) -> None:
        """Sends a message. Raises WireError."""
        with self._lock:  # seals are numbered in the order on the wire
            sealed = self._outgoing.close(body)
            self.raw.send(LENGTH.pack(len(sealed)) + sealed)

    def receive(self) -> bytes:
        """The next message. Raises WireError, also for one that was altered."""
        (length,) = LENGTH.unpack(self.raw.receive(LENGTH.size))
        if not SEAL_BYTES <= length <= LONGEST_MESSAGE_BYTES:
            raise WireError(f"{self.peer}: announces a message of {length:,} bytes")
        try:
            return self._incoming.open(self.raw.receive(length))
        except ForgedError as error:
            raise WireError(f"{self.peer}: {error}") from error
