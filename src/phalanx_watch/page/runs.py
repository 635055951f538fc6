"""All runs that the page shows, each under an identifier that is safe in a URL, and the readers and series kept open between requests.

A request names a run by its identifier alone, which is looked up here: no path of a request is ever joined to a folder. Two runs of
one name have different identifiers, since these end with a digest of the whole path.

What was read of a long event file is also kept on disk, so that the next server does not read it all again.
A kept file holds the columns as they are in memory, the offsets of all lines that are no steps, and the place up to which the file was
read. Whether it is still the same file is checked as it is for a file that is followed: by its inode, its first bytes and its length. The
cache is only that: it may be deleted or damaged, and a folder where nothing can be written is done without.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import msgspec
import xxhash

from phalanx.model.facts.shape import count
from phalanx.observe.events import Event
from phalanx.observe.rank_stream import RankStream
from phalanx.run.directory.files import write_atomically
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.spec import RunSpec
from phalanx_watch.page.http import RequestError, not_found
from phalanx_watch.runs.index import RunIndex, RunRow, found_in
from phalanx_watch.runs.row import run_id
from phalanx_watch.series.run_series import USUAL_BUDGET_S, RunSeries, SeriesState, thinned_events

MOST_RUNS = 20_000
_STALE_S = 2.0
USUAL_BYTES = 512 << 20
"""A bound on the memory of all series together."""


@dataclass(frozen=True)
class Place:
    """A run directory and its identifier."""

    id: str
    path: Path


class Places:
    """Finds the runs in the folders, anew when the last look was more than two seconds ago."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(Path(os.path.abspath(folder)) for folder in folders)
        self._lock = threading.Lock()
        self._found: dict[str, Place] = {}
        self._looked_s = float("-inf")

    def all(self) -> list[Place]:
        """All runs, those of each folder by name."""
        with self._lock:
            if time.monotonic() - self._looked_s > _STALE_S:
                found = [Place(run_id(path), path) for path in islice(found_in(self.folders), MOST_RUNS)]
                self._found = {place.id: place for place in found}
                self._looked_s = time.monotonic()
            return list(self._found.values())

    def get(self, identifier: str) -> Place | None:
        """The run of an identifier; ``None`` if there is none."""
        known = self._found.get(identifier)
        if known is not None:
            return known
        self.all()
        return self._found.get(identifier)


# Kept between requests: to index a rank stream of days again takes longer than to draw it.


class RankStreams:
    """Open streams, each used by one thread at a time."""

    def __init__(self, most: int = 16) -> None:
        self._most, self._lock = most, threading.Lock()
        self._held: OrderedDict[Path, tuple[RankStream, threading.Lock]] = OrderedDict()

    def of(self, path: Path) -> tuple[RankStream, threading.Lock]:
        """The stream in a file, and the lock under which it is used. Raises ``RankStreamError``."""
        with self._lock:
            found = self._held.get(path)
            if found is None:
                found = self._held[path] = (RankStream(path), threading.Lock())
            self._held.move_to_end(path)
            while len(self._held) > self._most:
                self._held.popitem(last=False)  # its file is closed with it, when nobody uses it any more
        return found


GIVES_WAY_S = 0.3
"""Nobody has asked for so long before a run is read ahead: two threads that both want Python's lock are slower than one after the other."""
_LOOK_S = 0.05


class Runs:
    """The runs below some folders. Threads of requests share one."""

    def __init__(
        self,
        folders: Sequence[Path],
        most_series_bytes: int = USUAL_BYTES,
        stored: StoredSeries | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._asked_s = clock, -math.inf
        self._places = Places(folders)
        self._series = SeriesCache(most_series_bytes, stored)
        self._thinned = KeptStories()
        self.rank_streams = RankStreams()

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that the page was given."""
        return self._places.folders

    def places(self) -> list[Place]:
        """All runs, by path."""
        return self._places.all()

    def place(self, identifier: str) -> Place:
        """The run of an identifier. Raises ``RequestError``."""
        found = self._places.get(identifier)
        if found is None:
            raise not_found(f"there is no run {identifier[:100]!r} here (any more)")
        return found

    def watched(self, identifiers: Sequence[str], most: int) -> list[Place]:
        """The runs of the identifiers that there are; of none, all, ``most`` at most."""
        if not identifiers:
            return self.places()[:most]
        return [place for one in identifiers if (place := self._places.get(one)) is not None]

    def list_all(self) -> dict[str, object]:
        """The answer to ``/api/runs``."""
        rows = RunIndex(self.folders).rows()[:MOST_RUNS]
        return {"folders": [str(folder) for folder in self.folders], "runs": [asdict(row) for row in rows]}

    def row(self, place: Place) -> RunRow:
        """A run's row in the list. Raises ``RequestError`` if its directory is gone."""
        found = RunIndex([place.path]).rows()
        if not found:
            raise not_found(f"{place.path} is no run directory any more")
        return found[0]

    def news(self, place: Place) -> dict[str, object]:
        """What viewers are told when a run has changed."""
        try:
            row = self.row(place)
        except RequestError:
            return {"id": place.id, "kind": "changed", "step": None, "state": "gone", "updated": None}
        return {
            "id": place.id,
            "kind": "changed",
            "step": row.step,
            "state": row.state,
            "updated": row.updated,
        }

    def series(self, place: Place) -> RunSeries:
        """The run's numbers, as new as its file."""
        self._asked_s = self._clock()
        return self._series.get(place.path)

    def read_ahead(self, until: Callable[[], bool], sleep: Callable[[float], None] = time.sleep) -> None:
        """Reads runs that nobody has asked for yet, the newest first, until there is no more room or ``until()``.

        It takes half of the time, and none while people ask.
        """
        rows = sorted(RunIndex(self.folders).rows(), key=lambda row: row.updated or 0.0, reverse=True)
        for path in (Path(row.path) for row in rows):
            while not (until() or self._series.full):
                if self._clock() - self._asked_s < GIVES_WAY_S:
                    sleep(_LOOK_S)
                    continue
                began_s = self._clock()
                unread = self._series.get(path).unread
                sleep(self._clock() - began_s)
                if unread is None:
                    break

    def thinned(self, place: Place) -> list[Event]:
        """The events on which the run's accounts depend. Raises ``RequestError`` if its file cannot be read."""
        run = self.series(place)
        try:
            return self._thinned.of(place.id, run)
        except OSError as error:
            raise RequestError(f"cannot read {error.filename}: {error.strerror}", 404) from None

    def spec(self, place: Place) -> RunSpec | None:
        """The run's resolved run file; ``None`` if it cannot be read."""
        try:
            return read_resolved(RunDirectory(place.path))
        except (RunDirectoryError, OSError):
            return None

    def flops_per_token(self, place: Place) -> float | None:
        """Operations of the run's model for a training token, attention in full as MFU counts it; ``None`` if it is not known."""
        spec = self.spec(place)
        return None if spec is None else _flops_per_token(spec)


class KeptStories:
    """The thinned events of the runs that were asked for last, until their files grow."""

    def __init__(self, most: int = 32) -> None:
        self._most, self._lock = most, threading.Lock()
        self._kept: OrderedDict[str, tuple[tuple[int, int], list[Event]]] = OrderedDict()

    def of(self, identifier: str, run: RunSeries) -> list[Event]:
        """The thinned events of a run. Raises ``OSError``."""
        version = run.version
        with self._lock:
            kept = self._kept.get(identifier)
        if kept is not None and kept[0] == version:
            return kept[1]
        found = thinned_events(run)
        with self._lock:
            self._kept[identifier] = version, found
            self._kept.move_to_end(identifier)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return found


@lru_cache(maxsize=256)
def _flops_per_token(spec: RunSpec) -> float | None:
    try:
        return float(count(spec.model, spec.train.seq_len).flops_per_token)
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return None


# Series that are kept: of runs looked at lately in memory, of long event files in the user's folder for caches.


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
