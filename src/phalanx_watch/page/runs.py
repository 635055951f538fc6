"""Runs of the page, each with a URL-safe identifier, and the readers and series that stay open between requests.

A request names a run only by its identifier, which is looked up here: no path of a request is ever joined to a
folder. Two runs with the same name have different identifiers, which end with a digest of the full path.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from phalanx.model.facts.shape import count
from phalanx.observe.events import Event
from phalanx.observe.rank_stream import RankStream
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.spec import RunSpec
from phalanx_watch.page.http import PageRequestError, not_found
from phalanx_watch.runs.index import RunIndex, RunRow, found_in
from phalanx_watch.runs.row import run_id
from phalanx_watch.series.run_series import RunSeries, thinned_events

MOST_RUNS = 20_000
_MOST_STREAMS, _MOST_STORIES = 16, 32
_STALE_S = 2.0
USUAL_BYTES = 512 << 20
"""Default limit on the memory of all series together."""


@dataclass(frozen=True)
class RunPlace:
    """A run directory and its identifier."""

    id: str
    path: Path


GIVES_WAY_S = 0.3
"""Seconds without a request before runs are read ahead: two threads that compete for Python's lock are slower than
one after the other.
"""
_LOOK_S = 0.05


class PageRuns:
    """The runs below some folders. Request threads share one."""

    def __init__(
        self,
        folders: Sequence[Path],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with nothing read of the runs in ``folders``."""
        self.folders = tuple(Path(os.path.abspath(folder)) for folder in folders)
        self._clock, self._requested_s = clock, -math.inf
        self._lock = threading.Lock()
        self._places: dict[str, RunPlace] = {}
        self._looked_s = -math.inf
        self._series = SeriesCache()
        self._thinned = KeptStories()
        # Kept between requests: to index a rank stream of days again takes longer than to draw it.
        self.rank_stream = lru_cache(_MOST_STREAMS)(_opened_stream)

    def places(self) -> list[RunPlace]:
        """Return all runs, sorted by name within each folder, at most ``MOST_RUNS``. Folders are read again after ``_STALE_S``."""
        with self._lock:
            if time.monotonic() - self._looked_s > _STALE_S:
                places = [RunPlace(run_id(path), path) for path in islice(found_in(self.folders), MOST_RUNS)]
                self._places = {place.id: place for place in places}
                self._looked_s = time.monotonic()
            return list(self._places.values())

    def _place(self, identifier: str) -> RunPlace | None:
        """Return the run of an identifier; None if there is none. For an unknown one, folders read over ``_STALE_S`` ago are read again."""
        if identifier not in self._places:
            self.places()
        return self._places.get(identifier)

    def place(self, identifier: str) -> RunPlace:
        """Return the run of an identifier. Raises ``PageRequestError``."""
        place = self._place(identifier)
        if place is None:
            raise not_found(f"there is no run {identifier[:100]!r} here (any more)")
        return place

    def watched(self, identifiers: Sequence[str], most: int) -> list[RunPlace]:
        """Return the runs of the identifiers, without those that do not exist; without identifiers, the first ``most`` of all runs."""
        if not identifiers:
            return self.places()[:most]
        return [place for identifier in identifiers if (place := self._place(identifier)) is not None]

    def rows(self) -> list[RunRow]:
        """Return the rows of all runs, sorted by name within each folder."""
        return RunIndex(self.folders).rows()

    def row(self, place: RunPlace) -> RunRow:
        """Return a run's row in the list. Raises ``PageRequestError`` if its directory is gone."""
        rows = RunIndex([place.path]).rows()
        if not rows:
            raise not_found(f"{place.path} is no run directory any more")
        return rows[0]

    def news(self, place: RunPlace) -> dict[str, object]:
        """Return the notification of a changed run; with state "gone" if its directory is."""
        try:
            row = self.row(place)
        except PageRequestError:
            return {"id": place.id, "kind": "changed", "step": None, "state": "gone", "updated": None}
        return {
            "id": place.id,
            "kind": "changed",
            "step": row.step,
            "state": row.state,
            "updated": row.updated,
        }

    def series(self, place: RunPlace) -> RunSeries:
        """Return the run's numbers, refreshed from its file."""
        self._requested_s = self._clock()
        return self._series.get(place.path)

    def read_ahead(self, until: Callable[[], bool], sleep: Callable[[float], None] = time.sleep) -> None:
        """Read runs that were not requested yet, the newest first, until the cache is full or ``until()``.

        It takes half of the time, and pauses for ``GIVES_WAY_S`` after each request.
        """
        rows = sorted(RunIndex(self.folders).rows(), key=lambda row: row.updated or 0.0, reverse=True)
        for path in (Path(row.path) for row in rows):
            while not (until() or self._series.full):
                if self._clock() - self._requested_s < GIVES_WAY_S:
                    sleep(_LOOK_S)
                    continue
                began_s = self._clock()
                unread = self._series.get(path).unread
                sleep(self._clock() - began_s)
                if unread is None:
                    break

    def thinned(self, place: RunPlace) -> list[Event]:
        """Return the events that the run's accounts depend on, cached. Raises ``PageRequestError`` (404) if its file cannot be read."""
        run = self.series(place)
        try:
            return self._thinned.of(place.id, run)
        except OSError as error:
            raise PageRequestError(f"cannot read {error.filename}: {error.strerror}", 404) from None

    def spec(self, place: RunPlace) -> RunSpec | None:
        """Return the run's resolved run file; None if it cannot be read."""
        try:
            return read_resolved(RunDirectory(place.path))
        except (RunDirectoryError, OSError):
            return None

    def flops_per_token(self, place: RunPlace) -> float | None:
        """Return the model FLOP of a training token, with full attention as MFU counts it; None if unknown."""
        spec = self.spec(place)
        return None if spec is None else _flops_per_token(spec)


def _opened_stream(path: Path) -> tuple[RankStream, threading.Lock]:
    """Return the stream of a file of ranks' numbers, and the lock with which one thread at a time uses it. Raises ``RankStreamError``."""
    return RankStream(path), threading.Lock()


class KeptStories:
    """Cache of the thinned events of recently requested runs, until their files grow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[tuple[int, int], list[Event]]] = OrderedDict()

    def of(self, identifier: str, run: RunSeries) -> list[Event]:
        """Return the thinned events of a run, cached until the run changes. Raises ``OSError``."""
        version = run.version
        with self._lock:
            kept = self._kept.get(identifier)
        if kept is not None and kept[0] == version:
            return kept[1]
        events = thinned_events(run)
        with self._lock:
            self._kept[identifier] = version, events
            self._kept.move_to_end(identifier)
            while len(self._kept) > _MOST_STORIES:
                self._kept.popitem(last=False)
        return events


@lru_cache(maxsize=256)
def _flops_per_token(spec: RunSpec) -> float | None:
    """Return the model FLOP of a training token; None if they cannot be counted."""
    try:
        return float(count(spec.model, spec.train.seq_len).flops_per_token)
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return None


class SeriesCache:
    """Cache of series by run directory; the least recently used ones are evicted above ``most_bytes`` in total."""

    def __init__(self, most_bytes: int = USUAL_BYTES) -> None:
        """Begin with an empty cache. A single series may take more than ``most_bytes``."""
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._by_path: OrderedDict[Path, RunSeries] = OrderedDict()

    def get(self, path: Path) -> RunSeries:
        """Return the series of the run in ``path``, refreshed for a limited time, so perhaps not to its end. The least recently used are
        dropped if all are too large.
        """
        with self._lock:
            series = self._by_path.get(path)
            if series is None:
                series = self._by_path[path] = RunSeries(path)
            self._by_path.move_to_end(path)
        series.refresh()
        self._drop_old()
        return series

    @property
    def full(self) -> bool:
        """True if another series might evict one."""
        return self.nbytes > 0.8 * self._most_bytes

    @property
    def nbytes(self) -> int:
        """Approximate bytes of all series."""
        with self._lock:
            return sum(series.nbytes for series in self._by_path.values())

    def _drop_old(self) -> None:
        """Drop the least recently used series until the others fit; the last one stays."""
        with self._lock:
            sizes = [series.nbytes for series in self._by_path.values()]
            total = sum(sizes)
            for size in sizes:
                if total <= self._most_bytes or len(self._by_path) == 1:
                    return
                self._by_path.popitem(last=False)
                total -= size
