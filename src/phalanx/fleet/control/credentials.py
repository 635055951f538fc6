"""The credentials of one process of a fleet: the secrets and names that it shows and proves at the begin of every stream.

A client is sent away before the handshake if it says that it belongs to another run, or to another start of it; the handshake then
proves both that and the token (``phalanx.wire.messages``, ``phalanx.run.identity``).
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from phalanx.fleet.control.security import (
    Certificates,
    Keyring,
    TokenRole,
    keyring,
    read_certificates,
    require_two_tokens,
)
from phalanx.fleet.control.streams import Facts, HandshakeStream, Method, RefusalCode
from phalanx.fleet.core.messages import PROTOCOL_VERSION
from phalanx.run.identity import FencingToken, fencing_token, identity
from phalanx.run.spec import RunSpec
from phalanx.version import __version__
from phalanx.wire.messages import Role, Seals, UnprovenError, token_name
from phalanx.wire.stream import authenticate

HANDSHAKE_S = 120.0
"""For the whole handshake of a stream. Where thousands of agents come back at once to a busy machine, each waits for its turn; who gives up
and dials again makes the others wait longer."""
_SOFTWARE, _CLOCK = "phalanx-software", "phalanx-clock"
CLOCK_APART_S = 30.0
"""A machine whose clock is further from the coordinator's takes no part: its events and logs would lie in the wrong order, and certificates
might not hold. Of a clock that is behind, ``HANDSHAKE_S`` more are allowed: a busy coordinator may hear so late."""


@cache
def software() -> str:
    """The versions of Phalanx and of torch on this machine, found without importing torch."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return f"Phalanx {__version__} with torch {torch}"


class Refusal(NamedTuple):
    """Why a client is sent away before the handshake."""

    kind: str
    """For the count of refusals."""
    code: RefusalCode
    why: str
    host: str = ""
    """Whose clock is apart."""
    ahead_s: float = 0.0
    """By how much it is ahead of this machine's; negative if it is behind."""


@dataclass(frozen=True)
class Credentials:
    """The secrets and names that both sides of a connection must know: the run, its token, which start of it, and certificates for TLS."""

    run: str
    """The run's identity."""
    token: str = field(repr=False)
    fencing: FencingToken
    """The start of the run that this process belongs to."""
    certificates: Certificates | None = None
    operator_token: str = field(default="", repr=False)
    """For the requests of operators; agents have none."""
    earlier: Keyring = field(default_factory=Keyring, repr=False)
    """The agents' tokens before a rotation, which a server accepts for a while."""
    earlier_operators: Keyring = field(default_factory=Keyring, repr=False)
    """The operators' tokens before a rotation, likewise."""
    handshake_timeout_s: float = HANDSHAKE_S
    """Limit of the whole handshake of a stream."""

    def with_keys(self, join: Keyring, operate: Keyring | None = None) -> Credentials:
        """The same credentials after a rotation of the tokens."""
        changed = replace(self, token=join.token, earlier=join)
        return (
            changed
            if operate is None
            else replace(changed, operator_token=operate.token, earlier_operators=operate)
        )

    def accepted_names(self) -> frozenset[str]:
        """The names of the tokens with which agents may be attached now."""
        return frozenset(map(token_name, (self.token, *self.earlier.accepted())))

    def facts(self) -> Facts:
        """Return the facts that a client greets with: none of them secret."""
        start = f"{self.fencing.attempt} {self.fencing.run_file_sha256}"
        return (
            ("phalanx-version", str(PROTOCOL_VERSION)),
            ("phalanx-run", self.run),
            ("phalanx-start", start),
            (_SOFTWARE, f"{socket.gethostname()} has {software()}"),
            (_CLOCK, f"{time.time():.3f}"),
        )

    def refusal(self, facts: Facts, method: Method) -> Refusal | None:
        """Return why a client with these facts is refused before the handshake of a stream of ``method``, if it is."""
        given = dict(facts)
        if given.get("phalanx-version") != str(PROTOCOL_VERSION):
            return Refusal(
                "other version",
                "unauthenticated",
                f"version {given.get('phalanx-version')} of the messages, not {PROTOCOL_VERSION}: install the same Phalanx",
            )
        if given.get("phalanx-run") != self.run:
            return Refusal("another run", "another start", f"this is another run, {self.run[:12]}")
        if given.get("phalanx-start") != dict(self.facts())["phalanx-start"]:
            return Refusal("another start", "another start", f"the fleet is of another start: {self.fencing}")
        theirs = given.get(_SOFTWARE, "a host has unknown software")
        # An operator's machine may have no torch at all; an agent's workers would compute other bits.
        if method == "Attach" and not theirs.endswith(f" has {software()}"):
            why = f"{theirs}, and the coordinator {software()}: install the same on every node"
            return Refusal("other software", "unauthenticated", why)
        return _clock_apart(given.get(_CLOCK, ""), host_in(facts)) if method == "Attach" else None

    async def prove(self, stream: HandshakeStream, method: Method, role: Role) -> Seals:
        """Prove to each other, by the first messages of a stream of ``method``, that both ends know the token.

        Raises:
            UnprovenError: The peer does not know it, or did not answer in time.
        """
        operates = method == "Operate"
        token = self.operator_token if operates else self.token
        earlier = (self.earlier_operators if operates else self.earlier).accepted()
        if not token:
            raise UnprovenError(f"has met a process without a token for {method}")
        # The facts that both ends have in common; host, software and clock of either are its own.
        common = ((name, value) for name, value in self.facts() if name not in (_SOFTWARE, _CLOCK))
        shared_facts = ", ".join(f"{name} {value}" for name, value in common)
        purpose = f"phalanx {method}, {shared_facts}"
        timeout_s = self.handshake_timeout_s
        return await authenticate(
            stream.write, lambda _: stream.read(), token, role, purpose, timeout_s, earlier
        )


def host_in(facts: Facts) -> str:
    """Return the host name among a client's facts; empty if there is none."""
    software = dict(facts).get(_SOFTWARE, "")
    return software.partition(" has ")[0] if " has " in software else ""


def _clock_apart(said: str, host: str) -> Refusal | None:
    """The refusal of a machine for what its clock says (Unix seconds); None if it is not refused, or says no time."""
    try:
        ahead_s = float(said) - time.time()
    except ValueError:
        return None
    if not math.isfinite(ahead_s) or -CLOCK_APART_S - HANDSHAKE_S <= ahead_s <= CLOCK_APART_S:
        return None
    what = "ahead of" if ahead_s > 0 else "behind"
    why = f"the clock of {host} is {abs(ahead_s):.0f} s {what} the coordinator's: set it (chrony, ntpd)"
    return Refusal("clock apart", "unauthenticated", why, host, ahead_s)


def credentials_of(
    run_dir: Path,
    spec: RunSpec,
    attempt: int,
    certificates: Path | None,
    roles: Sequence[TokenRole] = ("join", "operate"),
) -> Credentials:
    """The credentials of the start ``attempt`` of a run, for a process with these roles (a coordinator has both).

    Raises ``SecurityError``.
    """
    shown = read_certificates(certificates) if certificates else None
    join = keyring(run_dir) if "join" in roles else Keyring()
    operate = keyring(run_dir, "operate") if "operate" in roles else Keyring()
    if join.token and operate.token:
        require_two_tokens(join.token, operate.token)
    start = fencing_token(spec, attempt)
    return Credentials(identity(spec), join.token, start, shown, operate.token, join, operate)
