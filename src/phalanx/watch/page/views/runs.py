"""All runs that the page shows, and what is kept of them between requests."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from phalanx.model.facts.counts import count
from phalanx.observe.events import Event
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.spec import RunSpec
from phalanx.watch.page.answer import RequestError, not_found
from phalanx.watch.page.places import MOST_RUNS, Place, Places
from phalanx.watch.page.rank_streams import RankStreams
from phalanx.watch.runs.index import RunIndex, RunRow
from phalanx.watch.series.run_series import RunSeries
from phalanx.watch.series.stored import USUAL_BYTES, SeriesCache, StoredSeries
from phalanx.watch.series.thinned import thinned_events

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
