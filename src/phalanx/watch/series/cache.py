"""The series of runs that were looked at lately, within a bound of memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from phalanx.watch.series.run_series import USUAL_BUDGET_S, RunSeries

USUAL_BYTES = 512 << 20


class SeriesCache:
    """Gives out series by run directory; the ones that nobody asked for longest go when all together take more than ``most_bytes``."""

    def __init__(self, most_bytes: int = USUAL_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[Path, RunSeries] = OrderedDict()

    def get(self, path: Path, budget_s: float = USUAL_BUDGET_S) -> RunSeries:
        """The series of the run in ``path``, refreshed for about ``budget_s`` seconds."""
        with self._lock:
            found = self._held.get(path)
            if found is None:
                found = self._held[path] = RunSeries(path)
            self._held.move_to_end(path)
        found.refresh(budget_s)
        self._drop_old()
        return found

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
