"""Keys of clients, kept as salted hashes in a file that only its owner reads.

Keys are 256 random bits, so one hash is enough: there is no dictionary to try. All lines are compared, each in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path


class KeyFileError(ValueError):
    """The file of keys cannot be used; the message says what to do."""


class Keys:
    """Whom the gateway lets in."""

    def __init__(self, hashes: list[tuple[str, str]]) -> None:
        self._hashes = hashes

    def admits(self, key: str) -> bool:
        found = False
        for salt, digest in self._hashes:
            found |= hmac.compare_digest(_hash(salt, key), digest)
        return found


def read_keys(file: Path) -> Keys:
    """The keys in ``file``. Raises KeyFileError."""
    try:
        mode = file.stat().st_mode
        lines = file.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(
            f"{file}: cannot be read ({error}); make one with phalanx serve --new-key"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise KeyFileError(f"{file}: others can read or write it; chmod 600 {file}")
    hashes = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        salt, _, digest = line.strip().partition(":")
        if len(digest) != 64:
            raise KeyFileError(
                f"{file}, line {number}: not SALT:SHA-256; make keys with phalanx serve --new-key"
            )
        hashes.append((salt, digest))
    if not hashes:
        raise KeyFileError(f"{file}: has no key; make one with phalanx serve --new-key {file}")
    return Keys(hashes)


def add_key(file: Path) -> str:
    """Makes a key, appends its hash to ``file``, and returns the key, which is kept nowhere."""
    key, salt = f"sk-{secrets.token_urlsafe(32)}", secrets.token_hex(16)
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "w") as out:
        out.write(f"{salt}:{_hash(salt, key)}\n")
    return key


def _hash(salt: str, key: str) -> str:
    return hashlib.sha256(f"{salt}:{key}".encode("utf-8", "surrogateescape")).hexdigest()
