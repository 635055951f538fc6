"""Keeps what was read of a long event file in the user's folder for caches, so that the next server does not read it all again.

A kept file holds the columns as they are in memory, the offsets of all lines that are no steps, and the place up to which the file was
read. Whether it is still the same file is checked as it is for a file that is followed: by its inode, its first bytes and its length. The
cache is only that: it may be deleted or damaged, and a folder where nothing can be written is done without.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from phalanx.run.directory.durable import write_atomically
from phalanx.watch.series.run_series import RunSeries, SeriesState

WORTH_BYTES = 4 << 20
"""Nothing is kept of a file shorter than this: it is read in no time."""
MOST_BYTES = 2 << 30
_SHAPE = b"phalanx-series-1"
_SEAL_BYTES = 8


def default_folder() -> Path:
    """The folder of the cache: below ``XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "phalanx" / "series"


class StoredSeries:
    """The cache in one folder."""

    def __init__(self, folder: Path, *, worth_bytes: int = WORTH_BYTES) -> None:
        """Nothing is kept of an event file shorter than ``worth_bytes``."""
        self._folder, self._worth_bytes = folder, worth_bytes

    def load(self, run: RunSeries) -> None:
        """Takes what is kept of the run, if it is of the file that lies there now."""
        try:
            content = self._path(run).read_bytes()
        except OSError:
            return
        body = content[len(_SHAPE) : -_SEAL_BYTES]
        seal = xxhash.xxh3_64_intdigest(body).to_bytes(_SEAL_BYTES, "little")
        if not content.startswith(_SHAPE) or content[-_SEAL_BYTES:] != seal:
            return
        with suppress(msgspec.MsgspecError, ValueError, KeyError, OSError):
            run.resume(msgspec.msgpack.decode(body, type=SeriesState))

    def save(self, run: RunSeries) -> None:
        """Keeps what was read of the run, and lets the oldest go where all together are too large."""
        state = run.state()
        if state.position.read_bytes < self._worth_bytes:
            return
        body = msgspec.msgpack.encode(state)
        seal = xxhash.xxh3_64_intdigest(body).to_bytes(_SEAL_BYTES, "little")
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self._path(run), _SHAPE + body + seal, mode=0o600, durable=False)
            self._make_room()

    def _path(self, run: RunSeries) -> Path:
        place = os.path.abspath(run.directory.path)
        return self._folder / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:32]}.columns"

    def _make_room(self) -> None:
        found = sorted(
            (entry.stat().st_mtime, entry.stat().st_size, entry) for entry in self._folder.glob("*.columns")
        )
        total = sum(size for _, size, _ in found)
        for _, size, entry in found:
            if total <= MOST_BYTES:
                return
            entry.unlink(missing_ok=True)
            total -= size
