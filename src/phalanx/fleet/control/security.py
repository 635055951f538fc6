"""Authentication: secret tokens for every connection to a run's fleet, and mutual TLS if certificates are given.

Without them, everybody who can reach the coordinator's port could end a run or send it false reports. There are two: one to take part,
and one to operate, so that whoever has got hold of an agent's cannot stop the run with it. The run's launcher makes them when the fleet
is first started, and they lie in the run directory, readable by its owner only; on every connection both sides prove that they know the
one that it takes, and never send it (``phalanx.run.token_proof``). On a network that others can listen to, give certificates too: a
folder with ``ca.pem``, ``node.pem`` and ``node.key``. Then both sides must show a certificate that the run's own authority has signed.
"""

from __future__ import annotations

import os
import secrets
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from phalanx.run.directory.durable import sync

TokenRole = Literal["join", "operate"]
"""The use of a token: to take part with a node's agent and workers, or to drain nodes and stop the run."""
TOKEN_VARIABLES: dict[TokenRole, str] = {"join": "PHALANX_RUN_TOKEN", "operate": "PHALANX_OPERATOR_TOKEN"}
"""The environment variables through which a token reaches a process that does not see the run directory."""
_TOKEN_FILES: dict[TokenRole, str] = {"join": "fleet.token", "operate": "fleet.operator-token"}
_SHORTEST_TOKEN = 16


class SecurityError(RuntimeError):
    """A token or certificate is missing or unusable; the message names it and says what to do."""


@dataclass(frozen=True)
class Certificates:
    """The certificate and key of one side of a connection, and the authority that it trusts; all PEM."""

    folder: Path
    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    def server_context(self) -> ssl.SSLContext:
        """The TLS context of a listening socket: only peers with a certificate of our authority are accepted."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._loaded(context)

    def client_context(self) -> ssl.SSLContext:
        """The TLS context of a connection to a peer's data port; the peer's certificate may name any host."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # nodes are dialled by address; their authority is this run's own
        return self._loaded(context)

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.authority.decode())
        context.load_cert_chain(self.folder / "node.pem", self.folder / "node.key")
        return context


def read_certificates(folder: Path) -> Certificates:
    """The certificates in ``folder``: ``ca.pem``, ``node.pem`` and ``node.key``. Raises ``SecurityError``."""
    try:
        authority, certificate, key = (
            (folder / name).read_bytes() for name in ("ca.pem", "node.pem", "node.key")
        )
    except OSError as error:
        raise SecurityError(
            f"cannot read {error.filename}: {error.strerror}; a folder of certificates holds ca.pem, node.pem and node.key"
        ) from error
    return Certificates(folder, authority, certificate, key)


def run_token(run_dir: Path, role: TokenRole = "join") -> str:
    """The token of a run for a role: from the environment, else from its directory. Only the run's launcher makes one.

    Raises:
        SecurityError: There is none, it cannot be read, or it is too short to be a secret.
    """
    variable, path = TOKEN_VARIABLES[role], run_dir / _TOKEN_FILES[role]
    if given := os.environ.get(variable):
        return _checked(given, f"the environment variable {variable}")
    try:
        return _checked(path.read_text().strip(), str(path))
    except FileNotFoundError:
        raise SecurityError(
            f"there is no {path}: the command that starts a run makes it, and a fleet cannot go on with another one. Put it back, give "
            f"it in {variable}, or end what is left of the fleet and start the run again"
        ) from None
    except OSError as error:
        raise SecurityError(
            f"cannot read the run's token {path}: {error.strerror}; run as the owner of the run directory, or give the "
            f"token in {variable}"
        ) from error


def make_token(run_dir: Path, role: TokenRole = "join") -> str:
    """The token of a run that its launcher starts now: the one that there is, else a new one, durable when this returns.

    Raises:
        SecurityError: As ``run_token`` does, or it cannot be written.
    """
    path = run_dir / _TOKEN_FILES[role]
    if not os.environ.get(TOKEN_VARIABLES[role]) and not path.exists():
        try:
            _write_token(path)
        except OSError as error:
            raise SecurityError(f"cannot write the run's token {path}: {error.strerror}") from error
    return run_token(run_dir, role)


def require_two_tokens(join: str, operate: str) -> None:
    """Raises ``SecurityError`` if agents and operators of a run have the same token, so that each may do what the other may."""
    if join == operate:
        raise SecurityError(
            f"the tokens of agents and of operators are the same: give {TOKEN_VARIABLES['operate']} another value than "
            f"{TOKEN_VARIABLES['join']}"
        )


def _write_token(path: Path) -> None:
    """Writes a new token unless somebody is quicker; it has its name once it is whole, on the disk, and readable by its owner only."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def _checked(token: str, where: str) -> str:
    if not token:
        raise SecurityError(
            f"{where} is empty (a power cut can leave that): end what is left of the fleet, remove it, and start the run again: a new "
            "token is made"
        )
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise SecurityError(
            f"the token in {where} is no token: it needs at least {_SHORTEST_TOKEN} printable ASCII characters"
        )
    return token
