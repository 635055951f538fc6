"""A request for a profile of a run that is under way: a small file in its directory, which rank 0 looks for.

A requester writes ``profiles/request.json`` at once, by a rename; rank 0 takes it away when it has read it. Anybody who may write into the
run directory can put anything there, so what is read is bounded and checked field by field, and a link is not followed: a request can make a
run record itself for a few steps, and nothing else. It carries the time until which somebody waits for it; a request that a stopped run finds
days later is stale and records nothing.

The last section is rank 0's look-out for requests.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.run.directory.files import write_atomically
from phalanx.run.directory.paths import RunDirectory

MOST_STEPS = 20
"""Most steps of a profile: each costs megabytes, and time to look at."""
MOST_RANKS = 256
"""Most ranks of a profile."""
_MOST_BYTES = 16 << 10
_LONGEST_WAIT_S = 86_400.0
_NAME = re.compile(r"[0-9a-z][0-9a-z-]{0,63}")


class ProfileRequestError(ValueError):
    """A request that cannot be followed; the message has the reason."""


@dataclass(frozen=True)
class ProfileRequest:
    """A request to record steps."""

    name: str
    """The name of the profile, and of its folder: lower-case letters, digits and hyphens."""
    steps: int
    ranks: tuple[int, ...] | str
    """Ranks, or ``"all"``, or ``"auto"``: one for each place in the mesh, and the slowest that is known."""
    until_unix_s: float
    """The time until which somebody waits for it."""


def request_path(directory: RunDirectory) -> Path:
    """The file of the request."""
    return directory.profiles / "request.json"


def new_name(now_s: float | None = None) -> str:
    """A name that no other profile has: the time in UTC, and four digits against two requests at once."""
    clock = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_s))
    return f"{clock}-{secrets.token_hex(2)}"


def is_profile_name(name: str) -> bool:
    """True if ``name`` can be that of a profile, and so is a plain name of a folder."""
    return _NAME.fullmatch(name) is not None


def write_request(directory: RunDirectory, request: ProfileRequest) -> None:
    """Request a profile, in place of an earlier request that has not been read yet. Raises ``OSError``."""
    directory.profiles.mkdir(exist_ok=True)
    write_atomically(request_path(directory), (json.dumps(asdict(request)) + "\n").encode(), durable=False)


def read_request(directory: RunDirectory, now_s: float) -> ProfileRequest:
    """Return the request in the run directory. The file stays.

    Raises ``ProfileRequestError`` if it is stale at ``now_s`` (Unix seconds), no regular file or malformed, and
    ``OSError`` if it cannot be read, also for a link.
    """
    descriptor = os.open(request_path(directory), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ProfileRequestError("it is no regular file")
        content = os.read(descriptor, _MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    return _checked(content, now_s)


def _checked(content: bytes, now_s: float) -> ProfileRequest:
    """Return the request in ``content``. Raises ``ProfileRequestError`` if it is malformed, out of bounds, or stale."""
    if len(content) > _MOST_BYTES:
        raise ProfileRequestError(f"it is longer than {_MOST_BYTES:,} bytes")
    try:
        table = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ProfileRequestError(f"it is no JSON: {error}") from error
    if not isinstance(table, dict) or table.keys() != {"name", "steps", "ranks", "until_unix_s"}:
        raise ProfileRequestError("it must have the fields name, steps, ranks and until_unix_s")
    name, steps, until_s = table["name"], table["steps"], table["until_unix_s"]
    if not isinstance(name, str) or not is_profile_name(name):
        raise ProfileRequestError("its name must be lower-case letters, digits and hyphens, 64 at most")
    if type(steps) is not int or not 1 <= steps <= MOST_STEPS:
        raise ProfileRequestError(f"its steps must be a number from 1 to {MOST_STEPS}")
    if isinstance(until_s, bool) or not isinstance(until_s, int | float):
        raise ProfileRequestError("until_unix_s must be a time in seconds")
    if not now_s <= until_s <= now_s + _LONGEST_WAIT_S:
        raise ProfileRequestError("it is stale: nobody waits for it any more")
    return ProfileRequest(name, steps, _ranks(table["ranks"]), float(until_s))


def _ranks(value: object) -> tuple[int, ...] | str:
    """Return the field ``ranks``: "auto", "all", or the listed ranks, sorted and without duplicates. Raises
    ``ProfileRequestError`` for anything else.
    """
    if value in ("auto", "all"):
        return str(value)
    if not isinstance(value, list) or not 0 < len(value) <= MOST_RANKS:
        raise ProfileRequestError(f'its ranks must be "auto", "all", or a list of 1 to {MOST_RANKS} numbers')
    if not all(type(rank) is int and rank >= 0 for rank in value):
        raise ProfileRequestError("its ranks must be numbers from 0")
    return tuple(sorted(set(value)))


# Rank 0's polling for profile requests: at most one ``stat`` a second, and one warning for each refused request.


_LOOK_EVERY_S = 1.0


class ProfileDesk:
    """Desk that takes requests on rank 0.

    Args:
        directory: Of the run.
        warn: Receives a sentence on each request that is not followed.
        look_pause_s: Least time between two looks at the disk.
    """

    def __init__(
        self, directory: RunDirectory, warn: Callable[[str], None], look_pause_s: float = _LOOK_EVERY_S
    ) -> None:
        """Set up the desk; the disk is looked at once in ``look_pause_s`` seconds at most."""
        self._directory, self._warn, self._look_pause_s = directory, warn, look_pause_s
        self._path = request_path(directory)
        self._look_at_s = 0.0
        self._refused: tuple[int, int] | None = None
        """The file that was refused and could not be removed, by inode and time of its last change."""
        self._waiting: ProfileRequest | None = None

    def pending(self) -> bool:
        """Return True if a request waits to be taken. Looks at the disk once in ``look_pause_s`` seconds at most.

        A request is read and its file deleted; one that is refused is reported by ``warn``.
        """
        if self._waiting is not None:
            return True
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return False
        self._look_at_s = now_s + self._look_pause_s
        try:
            seen = self._path.lstat()
        except OSError:
            return False
        if (seen.st_ino, seen.st_mtime_ns) == self._refused:
            return False
        self._waiting = self._read((seen.st_ino, seen.st_mtime_ns))
        return self._waiting is not None

    def take(self) -> ProfileRequest | None:
        """Return the request that waits, and forget it; ``None`` if there is none."""
        taken, self._waiting = self._waiting, None
        return taken

    def _read(self, seen: tuple[int, int]) -> ProfileRequest | None:
        """Return the request and delete its file. If it cannot be read, warn and return None.

        If the file cannot be deleted, it is remembered and not read again.
        """
        try:
            request = read_request(self._directory, time.time())
        except (ProfileRequestError, OSError) as error:
            self._warn(f"the request for a profile in {self._path} is ignored: {error}")
            request = None
        try:
            self._path.unlink()
            self._refused = (
                None  # the next file may have the same inode, and be made within one tick of the clock
            )
        except OSError:  # a folder, or a disk that cannot be written: it is remembered as refused
            self._refused = seen
        return request
