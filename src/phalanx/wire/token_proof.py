"""Mutual proof that both ends of a connection know a run's token, and seals on the messages after it.

Challenge and response (ISO/IEC 9798-4, mutual authentication with a keyed hash): each side sends random bytes, and proves itself by
the HMAC-SHA256 (RFC 2104) of both sides' under the token, with its role and what the connection is for. The token never leaves the
process, and a proof is worth nothing on another connection. From the same random bytes both sides derive a key for each direction,
and every later message of a control connection carries a seal, the HMAC of its number and content: someone in between can cut
the connection, and read it, but can neither alter, add, repeat nor swap a message.

No I/O here: ``handshake`` yields the bytes to send and the number of bytes to receive, and the owner of the connection carries that out.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.wire.messages import ForgedError, UnprovenError

Role = Literal["client", "server"]
_MAGIC = b"PHXPROV1"
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
HELLO_BYTES = len(_MAGIC) + _NONCE_BYTES
SEAL_BYTES = 16


class Seal:
    """One direction of a connection: one end seals messages, the other opens them in the same order."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def close(self, body: bytes) -> bytes:
        """Return the next message, with its seal before it."""
        return self._next(body) + body

    def open(self, sealed: bytes) -> bytes:
        """Return the content of the next message. Raises ``ForgedError``; the connection is of no more use then."""
        seal, body = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._next(body)):
            raise ForgedError(f"message {self._number} of this connection was altered on its way, or added")
        return body

    def _next(self, body: bytes) -> bytes:
        self._number += 1
        return hmac.digest(self._key, self._number.to_bytes(8, "big") + body, "sha256")[:SEAL_BYTES]


@dataclass(frozen=True)
class Seals:
    """The seals of a connection whose ends have proven themselves."""

    outgoing: Seal
    incoming: Seal
    token_name: str = ""
    """The name of the token that both ends have proven (``token_name``)."""


def handshake(
    token: str, purpose: str, role: Role, earlier: Sequence[str] = ()
) -> Generator[bytes | int, bytes, Seals]:
    """Steps of a handshake: yields bytes to send (answer with anything), or the number of bytes to receive (answer with them).

    Args:
        token: The run's.
        purpose: Purpose of the connection, and its run; the same at both ends.
        earlier: Tokens before a rotation, which a server accepts of clients for a while; a client never uses one.
        role: Of this end. The client proves itself first, so that a server gives nothing to strangers, not even something to guess at.

    Raises:
        UnprovenError: The peer does not know the token, or speaks another protocol.
    """
    own = secrets.token_bytes(_NONCE_BYTES)
    yield _MAGIC + own
    hello = yield HELLO_BYTES
    if len(hello) != HELLO_BYTES or not hello.startswith(_MAGIC):
        raise UnprovenError("does not speak this version of the handshake")
    other = hello[len(_MAGIC) :]
    nonces = (own, other) if role == "client" else (other, own)

    def mac(token: str, label: str) -> bytes:
        return token_mac(token, label.encode(), purpose.encode(), *nonces)

    if role == "client":
        yield mac(token, "client")
    proof = yield _PROOF_BYTES
    prover, accepted = ("server", [token]) if role == "client" else ("client", [token, *earlier])
    proven = [candidate for candidate in accepted if hmac.compare_digest(proof, mac(candidate, prover))]
    if not proven:
        raise UnprovenError("does not know this run's token")
    token = proven[0]
    if role == "server":
        yield mac(token, "server")
    to_server, to_client = Seal(mac(token, "seals to the server")), Seal(mac(token, "seals to the client"))
    outgoing, incoming = (to_server, to_client) if role == "client" else (to_client, to_server)
    return Seals(outgoing, incoming, token_name(token))


def token_name(token: str) -> str:
    """Return a name that distinguishes one token from another, and reveals nothing else of it."""
    return token_mac(token, b"the name of the token").hex()[:16]


def token_mac(token: str, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of ``parts`` under a token, each part with its length, so that no two sequences of parts are alike."""
    framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(token.encode(), framed, "sha256")
