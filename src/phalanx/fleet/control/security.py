"""Authentication: secret tokens for every connection to a run's fleet, and mutual TLS if certificates are
given.

Without them, anyone who can reach the coordinator's port could end a run or send it false reports. There are
two: one to take part, and one to operate, so that a stolen agent token cannot stop the run. The run's
launcher makes them when the fleet is first started. They are in the run directory, readable by its owner
only. On every connection both sides prove that they know the token and never send it
(``phalanx.wire.messages``). If others can read the network traffic, add certificates: a folder with
``ca.pem``, ``node.pem`` and ``node.key``. Then both sides must show a certificate that the run's own
authority has signed.
"""

from __future__ import annotations

import os
import secrets
import ssl
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from phalanx.run.directory.files import read_small, sync

TokenRole = Literal["join", "operate"]
"""The use of a token: to take part with a node's agent and workers, or to drain nodes and stop the run."""
TOKEN_VARIABLES: dict[TokenRole, str] = {"join": "PHALANX_RUN_TOKEN", "operate": "PHALANX_OPERATOR_TOKEN"}
"""The environment variables through which a token reaches a process that does not see the run directory."""
_TOKEN_FILES: dict[TokenRole, str] = {"join": "fleet.token", "operate": "fleet.operator-token"}
_SHORTEST_TOKEN = 16


class SecurityError(RuntimeError):
    """A token or certificate is missing or unusable; the message names it and the remedy."""


@dataclass(frozen=True)
class Certificates:
    """The certificate and key of one side of a connection, and the authority that it trusts; all PEM."""

    folder: Path
    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    def server_context(self) -> ssl.SSLContext:
        """Return the TLS 1.3 context of a listening socket: peers need a certificate of our authority.

        Raises ``SecurityError`` for unusable files, as ``client_context`` does.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._loaded(context)

    def client_context(self, *, names_host: bool = False) -> ssl.SSLContext:
        """Return the TLS 1.3 context of an outgoing connection. Only with ``names_host`` must the server's
        certificate name its host.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = (
            names_host  # Nodes are dialed by address, and their authority is this run's own.
        )
        return self._loaded(context)

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        """Load authority, certificate and key into the context, for TLS 1.3; returns it. Raises ``SecurityError``."""
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        files = "ca.pem"
        try:
            context.load_verify_locations(cadata=self.authority.decode())
            files = "node.pem with node.key"
            context.load_cert_chain(self.folder / "node.pem", self.folder / "node.key")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise SecurityError(
                f"cannot use {files} in {self.folder}: {error}; give certificates of the run's authority, and the key of node.pem, as PEM"
            ) from error
        return context


def read_certificates(folder: Path) -> Certificates:
    """Read the certificates in ``folder``: ``ca.pem``, ``node.pem`` and ``node.key``.

    Raises ``SecurityError`` if one cannot be read, or TLS cannot use them. Whether the authority signed the
    certificate is not checked.
    """
    try:
        authority, certificate, key = (
            (folder / name).read_bytes() for name in ("ca.pem", "node.pem", "node.key")
        )
    except OSError as error:
        raise SecurityError(
            f"cannot read {error.filename}: {error.strerror}; a folder of certificates holds ca.pem, node.pem and node.key"
        ) from error
    certificates = Certificates(folder, authority, certificate, key)
    certificates.client_context()
    return certificates


@dataclass(frozen=True)
class Keyring:
    """The token of a role and all tokens before it.

    Some of those are still accepted for a while after a rotation.
    """

    token: str = field(default="", repr=False)
    earlier: tuple[tuple[str, float], ...] = field(default=(), repr=False)
    """(token, Unix time from which it is refused), the newest first.

    Refused ones stay, so that their holders can follow the rotation.
    """

    def accepted(self) -> tuple[str, ...]:
        """Return the earlier tokens that are accepted now."""
        now_s = time.time()
        return tuple(token for token, until_s in self.earlier if now_s < until_s)

    def follows(self, token: str) -> bool:
        """Return True if ``token`` was changed into this one, however many rotations ago."""
        return any(token == old for old, _ in self.earlier)


def run_token(run_dir: Path, role: TokenRole = "join") -> str:
    """Return the token of ``keyring``. Raises ``SecurityError`` as that does."""
    return keyring(run_dir, role).token


def keyring(run_dir: Path, role: TokenRole = "join") -> Keyring:
    """Return the tokens of a run for a role: from the environment, else from the run's file.

    If the file records that the environment's token was rotated, the file wins: a process cannot change the
    environment of its restarts. Raises ``SecurityError`` if there is none, it cannot be read, or it is too short to
    be a secret.
    """
    variable = TOKEN_VARIABLES[role]
    if not (token := os.environ.get(variable)):
        return read_keyring(run_dir, role)
    return keyring_after(_checked(token, f"the environment variable {variable}"), run_dir, role)


def keyring_after(token: str, run_dir: Path, role: TokenRole = "join") -> Keyring:
    """Return the tokens of a run's file if it holds ``token``, now or before a rotation; else ``token`` alone.

    The latter also if the file is missing or unusable. If it holds neither token, it was truncated or written
    by someone else. A process that took over such a token would be refused by the others.
    """
    with suppress(SecurityError):
        keys = read_keyring(run_dir, role)
        if keys.token == token or keys.follows(token):
            return keys
    return Keyring(token)


def read_keyring(run_dir: Path, role: TokenRole = "join") -> Keyring:
    """Read the tokens for a role from a run's file, ignoring the environment.

    The first line is the token. Further lines are earlier ones, each with the Unix time from which it is
    refused. Raises ``SecurityError`` if there is no file, it cannot be read or is malformed, or a token is too
    short to be a secret.
    """
    path = run_dir / _TOKEN_FILES[role]
    try:
        first, *older = read_small(path).decode().splitlines() or [""]
        # A token may contain spaces.
        earlier = [line.rsplit(maxsplit=1) for line in older if line.strip()]
        token = _checked(first.strip(), str(path))
        return Keyring(token, tuple((_checked(old, str(path)), float(until_s)) for old, until_s in earlier))
    except ValueError as error:
        raise SecurityError(f"{path} is no file of tokens: {error}") from error
    except FileNotFoundError:
        variable = TOKEN_VARIABLES[role]
        remedy = (
            f"a fleet cannot continue with another one. Restore it, give it in {variable}, or end what is left of the fleet and start the "
            "run again"
            if role == "join"
            else f"without it nobody can operate the fleet. Restore it, or give it in {variable}; agents train on meanwhile, and Ctrl-C of "
            "the command that trains, or SIGTERM to the coordinator, saves and ends the run"
        )
        raise SecurityError(
            f"there is no {path}: the command that starts a run makes it, and {remedy}"
        ) from None
    except OSError as error:
        raise SecurityError(
            f"cannot read the run's token {path}: {error.strerror}; run as the owner of the run directory, or give the "
            f"token in {TOKEN_VARIABLES[role]}"
        ) from error


def make_token(run_dir: Path, role: TokenRole = "join") -> str:
    """Return the token of a run that its launcher starts now: from the environment or the file, else a new one.

    A new token is written durably. Raises ``SecurityError`` if the token is unusable or cannot be written.
    """
    path = run_dir / _TOKEN_FILES[role]
    if not os.environ.get(TOKEN_VARIABLES[role]) and not path.exists():
        try:
            _write_keyring(path, Keyring(secrets.token_hex(32)))
        except OSError as error:
            raise SecurityError(f"cannot write the run's token {path}: {error.strerror}") from error
    return run_token(run_dir, role)


def require_rotatable(run_dir: Path, role: TokenRole, token: str) -> None:
    """Raise ``SecurityError`` unless the run's file exists and its current token is ``token``.

    A token that came from the environment can only be changed there.
    """
    path, variable = run_dir / _TOKEN_FILES[role], TOKEN_VARIABLES[role]
    if not path.exists():
        raise SecurityError(
            f"there is no {path}, in which others could find a new token: one that was given in {variable} is changed by starting "
            "the fleet again with another value"
        )
    if read_keyring(run_dir, role).token != token:
        raise SecurityError(
            f"the token in {path} is not the one in use, which was given in {variable}: it can only be changed there"
        )


def rotate_token(run_dir: Path, role: TokenRole, keys: Keyring, grace_s: float) -> Keyring:
    """Write a new token into the run's file, and return the keys with it. ``keys.token`` stays accepted for
    ``grace_s`` seconds.

    Older tokens are accepted no longer than that. The file is durable, unless the disk fails at the very last call
    (``_write_keyring``). Raises ``SecurityError`` as ``require_rotatable`` does, or if it cannot be written.
    """
    require_rotatable(run_dir, role, keys.token)
    path, until_s = run_dir / _TOKEN_FILES[role], time.time() + grace_s
    before = ((token, min(at_s, until_s)) for token, at_s in keys.earlier)
    new = Keyring(secrets.token_hex(32), ((keys.token, until_s), *before))
    try:
        _write_keyring(path, new, replace=True)
    except OSError as error:
        raise SecurityError(f"cannot write the run's token {path}: {error.strerror}") from error
    return new


def require_two_tokens(join: str, operate: str) -> None:
    """Raise ``SecurityError`` if agents and operators of a run have the same token: each could then do what
    the other may.
    """
    if join == operate:
        raise SecurityError(
            f"the tokens of agents and of operators are the same: give {TOKEN_VARIABLES['operate']} another value than "
            f"{TOKEN_VARIABLES['join']}"
        )


def _write_keyring(path: Path, keys: Keyring, *, replace: bool = False) -> None:
    """Write tokens to a file readable by its owner only. With ``replace``, replace the file; otherwise keep one
    that exists.

    The file gets its name once it is complete and on disk. Raises ``OSError``; the previous tokens then stay
    valid. If only the sync of the folder fails, the new ones are valid, but a power cut may bring the earlier
    file back. That failure is raised only without ``replace``.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o600), "w") as file:
            file.write(
                keys.token + "\n" + "".join(f"{token} {until_s!r}\n" for token, until_s in keys.earlier)
            )
            file.flush()
            os.fsync(file.fileno())
        if replace:
            temporary.replace(path)
        else:
            with suppress(FileExistsError):
                os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    with suppress(OSError) if replace else nullcontext():
        sync(path.parent)


def _checked(token: str, where: str) -> str:
    """Return the token; raises ``SecurityError`` if it is empty, too short or not printable ASCII."""
    if not token:
        raise SecurityError(
            f"{where} is empty (a power cut can leave that): end the rest of the fleet, remove it, and start the run again: a new "
            "token is made"
        )
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise SecurityError(
            f"the token in {where} is no token: it needs at least {_SHORTEST_TOKEN} printable ASCII characters"
        )
    return token
