"""Rank 0's look-out for requests for a profile: one ``stat`` a second, and all that is wrong with a request said once."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from phalanx.observe.profile.request import ProfileRequest, ProfileRequestError, read_request, request_path
from phalanx.run.directory.paths import RunDirectory

_LOOK_EVERY_S = 1.0


class ProfileDesk:
    """Takes requests on rank 0.

    Args:
        directory: Of the run.
        warn: Tells people about requests that are not followed.
        look_pause_s: Least time between two looks at the disk.
    """

    def __init__(
        self, directory: RunDirectory, warn: Callable[[str], None], look_pause_s: float = _LOOK_EVERY_S
    ) -> None:
        self._directory, self._warn, self._look_pause_s = directory, warn, look_pause_s
        self._path = request_path(directory)
        self._look_at_s = 0.0
        self._refused: tuple[int, int] | None = None
        """The file that was refused and could not be removed, by inode and time of its last change."""
        self._waiting: ProfileRequest | None = None

    def pending(self) -> bool:
        """True if a request waits to be taken. Looks at the disk once in ``look_pause_s`` at most."""
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
        """The request that waits, which is nobody's concern any more afterwards."""
        taken, self._waiting = self._waiting, None
        return taken

    def _read(self, seen: tuple[int, int]) -> ProfileRequest | None:
        try:
            found = read_request(self._directory, time.time())
        except (ProfileRequestError, OSError) as error:
            self._warn(f"the request for a profile in {self._path} is ignored: {error}")
            self._refused, found = seen, None
        with suppress(OSError):  # a folder, or a disk that cannot be written: it is remembered as refused
            self._path.unlink()
        if found is not None:
            self._refused = seen
        return found
