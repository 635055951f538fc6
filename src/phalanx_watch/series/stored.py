"""Keeps what was read of a long event file in the user's folder for caches, so that the next server does not read it all again.

A kept file holds the columns as they are in memory, the offsets of all lines that are no steps, and the place up to which the file was
read. Whether it is still the same file is checked as it is for a file that is followed: by its inode, its first bytes and its length. The
cache is only that: it may be deleted or damaged, and a folder where nothing can be written is done without.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from phalanx.run.directory.files import write_atomically
from phalanx_watch.series.run_series import USUAL_BUDGET_S, RunSeries, SeriesState

# The series of runs that were looked at lately, within a bound of memory.

USUAL_BYTES = 512 << 20


class SeriesCache:
    """Gives out series by run directory; the ones that nobody asked for longest go when all together take more than ``most_bytes``."""

    def __init__(self, most_bytes: int = USUAL_BYTES, stored: StoredSeries | None = None) -> None:
        """
        Args:
            most_bytes: For all series together; one alone may take more.
            stored: Where series of long files are kept between two servers.
        """
        self._most_bytes, self._stored = most_bytes, stored
        self._lock = threading.Lock()
        self._held: OrderedDict[Path, RunSeries] = OrderedDict()
        self._saved_bytes: dict[Path, int] = {}

    def get(self, path: Path, budget_s: float = USUAL_BUDGET_S) -> RunSeries:
        """The series of the run in ``path``, refreshed for about ``budget_s`` seconds."""
        with self._lock:
            found = self._held.get(path)
            if found is None:
                found = self._held[path] = RunSeries(path)
                self._saved_bytes[path] = 0
            self._held.move_to_end(path)
        with found.lock:
            if self._stored is not None and found.version == (0, 0):
                self._stored.load(found)
            found.refresh(budget_s)
            self._save(path, found)
        self._drop_old()
        return found

    def _save(self, path: Path, run: RunSeries) -> None:
        """Keeps a series of which much text was parsed since, once it was read to its end."""
        read = run.parsed_bytes  # what an index has told is told again as fast
        least = max(WORTH_BYTES, 1.5 * self._saved_bytes.get(path, 0))
        if self._stored is None or run.unread is not None or read < least:
            return
        self._saved_bytes[path] = read
        self._stored.save(run)

    @property
    def full(self) -> bool:
        """True if another series might push one out."""
        return self.nbytes > 0.8 * self._most_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that all series here take, about."""
        with self._lock:
            return sum(series.nbytes for series in self._held.values())

    def _drop_old(self) -> None:
        with self._lock:
            sizes = [series.nbytes for series in self._held.values()]
            total = sum(sizes)
            for size in sizes:
                if total <= self._most_bytes or len(self._held) == 1:
                    return
                self._held.popitem(last=False)
                total -= size


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
