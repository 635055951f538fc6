"""The run directories in the folders that the page was given, each under an identifier that is safe in a URL.

A request names a run by its identifier alone, which is looked up here: no path of a request is ever joined to a folder. Two runs of
one name have different identifiers, since these end with a digest of the whole path.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from phalanx.watch.runs.index import found_in
from phalanx.watch.runs.row import run_id

MOST_RUNS = 20_000
_STALE_S = 2.0


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
