"""Authentication: a secret token for every connection to a run's fleet, and mutual TLS if certificates are given.

Without it, everybody who can reach the coordinator's port could end a run or send it false reports. The token is made when the fleet is
first started and lies in the run directory, readable by its owner only; on every connection both sides prove that they know it, and never
send it (``phalanx.run.token_proof``). On a network that others can listen to, give certificates too: a folder with ``ca.pem``,
``node.pem`` and ``node.key``. Then both sides must show a certificate that the run's own authority has signed.
"""

from __future__ import annotations

import os
import secrets
import ssl
from dataclasses import dataclass, field
from pathlib import Path

TOKEN_VARIABLE = "PHALANX_RUN_TOKEN"
"""The environment variable through which a token reaches an agent that does not see the run directory."""
_TOKEN_FILE = "fleet.token"
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


def run_token(run_dir: Path) -> str:
    """The token of a run: from the environment, else from its directory, where it is made on the first call.

    Raises:
        SecurityError: It cannot be read or made, or is too short to be a secret.
    """
    if given := os.environ.get(TOKEN_VARIABLE):
        return _checked(given, f"the environment variable {TOKEN_VARIABLE}")
    path = run_dir / _TOKEN_FILE
    try:
        _make(path)
        return _checked(path.read_text().strip(), str(path))
    except OSError as error:
        raise SecurityError(
            f"cannot read the run's token {path}: {error.strerror}; run as the owner of the run directory, or give the "
            f"token in {TOKEN_VARIABLE}"
        ) from error


def _make(path: Path) -> None:
    """Writes a new token unless there is one; two processes that start together end up with the same."""
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.touch(mode=0o600)
    try:
        temporary.write_text(secrets.token_hex(32) + "\n")
        os.link(temporary, path)  # fails if another was quicker
    except FileExistsError:
        pass
    finally:
        temporary.unlink(missing_ok=True)


def _checked(token: str, where: str) -> str:
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise SecurityError(
            f"the token in {where} is no token: it needs at least {_SHORTEST_TOKEN} printable ASCII characters"
        )
    return token
