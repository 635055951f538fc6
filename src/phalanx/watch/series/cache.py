"""The series of runs that were looked at lately, within a bound of memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from phalanx.watch.series.run_series import USUAL_BUDGET_S, RunSeries
from phalanx.watch.series.stored import WORTH_BYTES, StoredSeries

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
