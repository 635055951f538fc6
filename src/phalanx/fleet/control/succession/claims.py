"""The register of claims: files in the run directory that say which coordinator leads, each made once and never changed.

``phalanx.fleet.core.succession`` decides when a claim is due and what it says; this keeps them, as ``fleet/claims/000-00000001.json`` and
so on: the start of the run, and the term. A file appears whole, under a name that nobody else has used, by a link (POSIX ``link``, which is
atomic on NFS too: RFC 1813, section 3.3.15), so of two processes on two machines that make the claim of one term, one gets it.

A file system that shows new names late, as NFS may for a minute, delays only how soon a superseded head notices; its next claim fails all
the same.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

import msgspec

from phalanx.fleet.core.succession import Claim, decode_claim, encode_claim
from phalanx.run.directory.files import read_small, sync, write_atomically
from phalanx.run.directory.paths import RunDirectory

KEPT = 8
"""Claims that are kept whole. Of older ones the name is left, so that no term is claimed twice."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Answers of a file system that has no links."""
_NAME = re.compile(r"(\d{3,})-(\d{8,})\.json")


class ClaimError(RuntimeError):
    """The newest claim cannot be read or made; the message says why."""


class ClaimRegister:
    """The claims of one start of a run."""

    def __init__(self, directory: RunDirectory, attempt: int) -> None:
        self._folder, self.attempt = directory.fleet / "claims", attempt

    def newest_name(self) -> tuple[int, int]:
        """The start and the term of the newest claim of all starts; the term is 0 if this start has made none. Raises ``OSError``."""
        return max([*self._names(), (self.attempt, 0)])

    def newest_term(self) -> int:
        """The highest term that was claimed, as far as this machine sees; 0 if none was. Raises ``OSError``."""
        return max((term for attempt, term in self._names() if attempt == self.attempt), default=0)

    def _names(self) -> list[tuple[int, int]]:
        """The claims that there are: the start of the run, and the term. Raises ``OSError``."""
        with suppress(FileNotFoundError):
            matches = filter(None, map(_NAME.fullmatch, os.listdir(self._folder)))
            return [(int(match[1]), int(match[2])) for match in matches]
        return []

    def newest(self) -> Claim | None:
        """The newest claim; None if none was made.

        Raises:
            ClaimError: It cannot be read. What it said of epochs is not known then, so nobody may lead on by the one before.
        """
        try:
            term = self.newest_term()
            return self.read(term) if term else None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ClaimError(f"cannot read the newest claim in {self._folder}: {error}") from error

    def read(self, term: int) -> Claim:
        """A claim of this start. Raises ``OSError``, ``msgspec.MsgspecError``."""
        return decode_claim(read_small(self._path(term)))

    def make(self, claim: Claim) -> bool:
        """Makes a claim, durable when this returns; False if another has made that of its term.

        Raises:
            ClaimError: The disk does not take it; the same call may be made again.
        """
        path = self._path(claim.term)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            made = _make_once(path, encode_claim(claim))
            sync(self._folder)
        except OSError as error:
            raise ClaimError(f"cannot make the claim {path}: {error.strerror}") from error
        old = self._path(claim.term - KEPT)
        with suppress(OSError):
            if made and old.exists():
                write_atomically(old, b"{}", durable=False)
        return made

    def _path(self, term: int) -> Path:
        return self._folder / f"{self.attempt:03d}-{term:08d}.json"


def _make_once(path: Path, content: bytes) -> bool:
    """Makes a file that nobody has made; True if it is this one's. Raises ``OSError``; the same call may be made again."""
    temporary = path.with_name(f".{path.name}.{int.from_bytes(os.urandom(7))}.tmp")
    try:
        temporary.write_bytes(content)
        sync(temporary)
        try:
            os.link(temporary, path)
        except OSError as error:
            if not path.exists():
                if error.errno not in _NO_LINKS:
                    raise
                _make_exclusively(path, content)
    except FileExistsError:
        pass
    finally:
        temporary.unlink(missing_ok=True)
    # It may be one's own though a call has failed: the answer to it was lost, or what came after it failed.
    return path.read_bytes() == content


def _make_exclusively(path: Path, content: bytes) -> None:
    """Makes a file where there are no links. Whoever reads it too early finds it unreadable, and reads it again."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)  # an empty claim would be a term that nobody can follow
        raise
