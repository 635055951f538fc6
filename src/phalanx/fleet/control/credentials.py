"""Streams between the processes of a fleet, and the credentials that each end proves when a stream begins.

A stream carries frames over TCP, under mutual TLS if there are certificates. A client greets with facts about
itself, none of them secret. The server refuses it before the handshake if it belongs to another run, or to
another start of this run. The handshake proves both facts and the token (``phalanx.wire.messages``,
``phalanx.run.identity``). Every frame after that is sealed. An empty frame is its sender's last.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from phalanx.fleet.control import security
from phalanx.fleet.core.messages import PROTOCOL_VERSION
from phalanx.hardware.local.network import NEXT_ADDRESS_S, split_address
from phalanx.process.this_process import host_name
from phalanx.run.identity import FencingToken, fencing_token, identity
from phalanx.run.spec import RunSpec
from phalanx.version import __version__
from phalanx.wire import messages as wire

# Streams, and the messages of their handshake.

Method = Literal["Attach", "Operate"]
"""Purpose of a stream: that of an agent, or one request of an operator."""
RefusalCode = Literal["unauthenticated", "another start", "malformed"]
Facts = tuple[tuple[str, str], ...]
END = b""
_LONGEST_HANDSHAKE_BYTES = 1 << 16
_CONNECT_S, _TLS_HANDSHAKE_S = 20.0, 30.0
_KEEP_ALIVE = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 60_000))
"""A half-open connection is detected within these times; a busy machine must not be mistaken for one."""


class Greeting(Struct, frozen=True, tag=True):
    """The first message of a client."""

    method: Method
    facts: Annotated[Facts, Meta(max_length=16)]


class Proof(Struct, frozen=True, tag=True):
    """A step of the handshake."""

    body: Annotated[bytes, Meta(max_length=64)]


class TurnedAway(Struct, frozen=True, tag=True):
    """The server's refusal; it ends the stream."""

    code: RefusalCode
    reason: str


HandshakeMessage = Greeting | Proof | TurnedAway
_HANDSHAKE: wire.MessageDecoder[HandshakeMessage] = wire.MessageDecoder(HandshakeMessage)


class TurnedAwayError(wire.WireError):
    """The server has refused the stream."""

    def __init__(self, refusal: TurnedAway) -> None:
        super().__init__(f"{refusal.code}: {refusal.reason}")
        self.code = refusal.code


class HandshakeStream:
    """The messages of a stream until both ends have proven themselves. Methods raise WireError."""

    def __init__(self, frames: wire.FrameStream) -> None:
        self.frames = frames

    async def send(self, message: HandshakeMessage) -> None:
        """Send a message."""
        await self.frames.send(wire.encode(message), _LONGEST_HANDSHAKE_BYTES)

    async def receive(self) -> HandshakeMessage:
        """Return the next handshake message. Raises ``TurnedAwayError`` if it is a refusal, and ``WireError`` if it
        is malformed, too long, or the stream ends.
        """
        message = _HANDSHAKE.decode(await self.frames.receive(_LONGEST_HANDSHAKE_BYTES))
        if isinstance(message, TurnedAway):
            raise TurnedAwayError(message)
        return message

    async def write(self, body: bytes) -> None:
        """Send a step of the proof."""
        await self.send(Proof(body))

    async def read(self) -> bytes:
        """Return the next step of the proof; empty if the peer sent something else."""
        message = await self.receive()
        return message.body if isinstance(message, Proof) else b""


async def connect(address: str, certificates: security.Certificates | None) -> wire.FrameStream:
    """Connect to "host:port", over TLS if certificates are given; the server's must name its host.

    Raises ``EndedError`` if it cannot be reached within the connect timeout, the address is malformed, or the
    certificates are unusable meanwhile.
    """
    host, port = split_address(address)
    try:
        tls = None if certificates is None else certificates.client_context(names_host=True)
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(
                host, int(port), ssl=tls, happy_eyeballs_delay=NEXT_ADDRESS_S
            )
    except TimeoutError:
        raise wire.EndedError(f"unavailable: no connection within {_CONNECT_S:g} s") from None
    except (OSError, security.SecurityError, ValueError) as error:
        raise wire.EndedError(f"unavailable: {error or type(error).__name__}") from error
    _notice_half_open(writer.get_extra_info("socket"))
    return wire.FrameStream(reader, writer)


async def accepted(connection: socket.socket, tls: ssl.SSLContext | None) -> wire.FrameStream:
    """Return the stream of an accepted connection, after its TLS handshake. Raises OSError."""
    _notice_half_open(connection)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=None if tls is None else _TLS_HANDSHAKE_S
    )
    return wire.FrameStream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


def _notice_half_open(connection: socket.socket) -> None:
    """Set the socket options: TCP_NODELAY, and keep-alive probes that end a connection to a dead machine."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# Credentials of one process of a fleet: its secrets and names.

HANDSHAKE_S = 120.0
"""Limit of the whole handshake of a stream.

When thousands of agents return at once to a busy machine, each waits for its turn. An agent that gives up and
dials again makes the others wait longer.
"""
_SOFTWARE, _CLOCK = "phalanx-software", "phalanx-clock"
CLOCK_APART_S = 30.0
"""A machine whose clock is further from the coordinator's is refused: its events and logs would be in the
wrong order, and certificates might be invalid. A clock that is behind gets ``HANDSHAKE_S`` more, since a busy
coordinator may read the greeting so late.
"""


@cache
def software() -> str:
    """Return "Phalanx VERSION with torch VERSION" ("none" without torch) of this machine, without importing torch;
    cached.
    """
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return f"Phalanx {__version__} with torch {torch}"


class Refusal(NamedTuple):
    """Reason for refusing a client before the handshake."""

    kind: str
    """Key for the count of refusals."""
    code: RefusalCode
    reason: str
    host: str = ""
    """Host whose clock is apart."""
    ahead_s: float = 0.0
    """Seconds by which its clock is ahead of this machine's; negative if it is behind."""


@dataclass(frozen=True)
class Credentials:
    """Secrets and names that both sides of a connection must know: the run, its token, its start, and
    certificates for TLS.
    """

    run: str
    """The run's identity."""
    token: str = field(repr=False)
    fencing: FencingToken
    """The start of the run that this process belongs to."""
    certificates: security.Certificates | None = None
    operator_token: str = field(default="", repr=False)
    """For the requests of operators; agents have none."""
    earlier: security.Keyring = field(default_factory=security.Keyring, repr=False)
    """The agents' tokens before a rotation, which a server accepts for a while."""
    earlier_operators: security.Keyring = field(default_factory=security.Keyring, repr=False)
    """The operators' tokens before a rotation, likewise."""
    handshake_timeout_s: float = HANDSHAKE_S
    """Limit of the whole handshake of a stream."""

    def with_keys(self, join: security.Keyring) -> Credentials:
        """Return the same credentials after a rotation of the tokens."""
        return replace(self, token=join.token, earlier=join)

    def accepted_names(self) -> frozenset[str]:
        """Return the names of the tokens with which agents may be attached now."""
        return frozenset(map(wire.token_name, (self.token, *self.earlier.accepted())))

    def facts(self) -> Facts:
        """Return the facts that a client sends in its greeting: protocol version, run, start, host and software,
        clock.

        None of them is secret.
        """
        start = f"{self.fencing.attempt} {self.fencing.run_file_sha256}"
        return (
            ("phalanx-version", str(PROTOCOL_VERSION)),
            ("phalanx-run", self.run),
            ("phalanx-start", start),
            (_SOFTWARE, f"{host_name()} has {software()}"),
            (_CLOCK, f"{time.time():.3f}"),
        )

    def refusal(self, facts: Facts, method: Method) -> Refusal | None:
        """Return why a client is refused before the handshake of a stream of ``method``, or None if it is not.

        It is refused for another protocol version, run or start. Agents ("Attach") are also refused for other
        software or a clock too far off.
        """
        fields = dict(facts)
        if fields.get("phalanx-version") != str(PROTOCOL_VERSION):
            return Refusal(
                "other version",
                "unauthenticated",
                f"version {fields.get('phalanx-version')} of the messages, not {PROTOCOL_VERSION}: install the same Phalanx",
            )
        if fields.get("phalanx-run") != self.run:
            return Refusal("another run", "another start", f"this is another run, {self.run[:12]}")
        if fields.get("phalanx-start") != dict(self.facts())["phalanx-start"]:
            return Refusal("another start", "another start", f"the fleet is of another start: {self.fencing}")
        peer_software = fields.get(_SOFTWARE, "a host has unknown software")
        # An operator's machine may have no torch. An agent with another torch would compute other bits.
        if method == "Attach" and not peer_software.endswith(f" has {software()}"):
            reason = f"{peer_software}, and the coordinator {software()}: install the same on every node"
            return Refusal("other software", "unauthenticated", reason)
        return _clock_apart(fields.get(_CLOCK, ""), host_in(facts)) if method == "Attach" else None

    async def prove(self, stream: HandshakeStream, method: Method, role: wire.Role) -> wire.Seals:
        """Run the mutual proof of the token over the first messages of a stream, and return its seals.

        ``method`` chooses the operators' or the agents' token; a server also accepts earlier ones within their
        grace. Raises ``UnprovenError`` if this process has no such token, or the peer does not know it or is
        too slow, and other ``WireError``s of the stream.
        """
        operates = method == "Operate"
        token = self.operator_token if operates else self.token
        earlier = (self.earlier_operators if operates else self.earlier).accepted()
        if not token:
            raise wire.UnprovenError(f"has met a process without a token for {method}")
        # The facts that both ends have in common; host, software and clock differ between them.
        common = ((name, value) for name, value in self.facts() if name not in (_SOFTWARE, _CLOCK))
        shared_facts = ", ".join(f"{name} {value}" for name, value in common)
        purpose = f"phalanx {method}, {shared_facts}"
        timeout_s = self.handshake_timeout_s
        return await wire.authenticate(
            stream.write, lambda _: stream.read(), token, role, purpose, timeout_s, earlier
        )


def host_in(facts: Facts) -> str:
    """Return the host name among a client's facts; empty if there is none."""
    software = dict(facts).get(_SOFTWARE, "")
    return software.partition(" has ")[0] if " has " in software else ""


def _clock_apart(clock_text: str, host: str) -> Refusal | None:
    """Return the refusal of a machine whose clock is too far from this one's; None if it is close enough.

    ``clock_text`` is in Unix seconds; one that is not a finite number is not refused. The handshake may delay it,
    so more lag than lead is allowed.
    """
    try:
        ahead_s = float(clock_text) - time.time()
    except ValueError:
        return None
    if not math.isfinite(ahead_s) or -CLOCK_APART_S - HANDSHAKE_S <= ahead_s <= CLOCK_APART_S:
        return None
    direction = "ahead of" if ahead_s > 0 else "behind"
    reason = (
        f"the clock of {host} is {abs(ahead_s):.0f} s {direction} the coordinator's: set it (chrony, ntpd)"
    )
    return Refusal("clock apart", "unauthenticated", reason, host, ahead_s)


def credentials_of(
    run_dir: Path,
    spec: RunSpec,
    attempt: int,
    certificates: Path | None,
    roles: Sequence[security.TokenRole] = ("join", "operate"),
) -> Credentials:
    """Return the credentials of the start ``attempt`` of a run, with the tokens of these roles; a coordinator has
    both.

    Reads tokens and, if a folder is given, certificates. Raises ``SecurityError`` if one is missing or unusable, or
    both roles have the same token.
    """
    own_certificates = security.read_certificates(certificates) if certificates else None
    join = security.keyring(run_dir) if "join" in roles else security.Keyring()
    operate = security.keyring(run_dir, "operate") if "operate" in roles else security.Keyring()
    if join.token and operate.token:
        security.require_two_tokens(join.token, operate.token)
    start = fencing_token(spec, attempt)
    return Credentials(identity(spec), join.token, start, own_certificates, operate.token, join, operate)
