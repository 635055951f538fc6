"""The run directories below the folders that the page was given, each under an identifier that is safe in a URL.

A request names a run by its identifier alone, which is looked up here: no path of a request is ever joined to a folder. Two runs of
one name have different identifiers, since these end with a digest of the whole path.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_RUNS = 10_000
_DEPTH = 3
"""A run lies so many folders below a given one, at most: ``runs/``, a study in it, a run in that."""
_MOST_ENTRIES = 200_000
_STALE_S = 2.0
_SIGNS = ("record.json", "events.jsonl")
"""A folder with one of these is a run directory."""
_OTHERS = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Place:
    """A run directory and its identifier."""

    id: str
    path: Path
    folder: Path
    """The given folder that it was found in."""


def run_id(path: Path) -> str:
    """The identifier of a run directory: its name, as far as a URL takes it, and a digest of its path."""
    name = _OTHERS.sub("-", path.name).strip("-")[:60] or "run"
    return f"{name}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:10]}"


class Places:
    """Finds the runs in the folders, anew when the last look was more than two seconds ago."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(Path(os.path.abspath(folder)) for folder in folders)
        self._lock = threading.Lock()
        self._found: dict[str, Place] = {}
        self._looked_s = float("-inf")

    def all(self) -> list[Place]:
        """All runs, by path."""
        with self._lock:
            if time.monotonic() - self._looked_s > _STALE_S:
                found = (
                    Place(run_id(path), path, folder) for folder in self.folders for path in _runs_in(folder)
                )
                self._found = {place.id: place for place in found}
                self._looked_s = time.monotonic()
            return sorted(self._found.values(), key=lambda place: str(place.path))

    def get(self, identifier: str) -> Place | None:
        """The run of an identifier; ``None`` if there is none."""
        known = self._found.get(identifier)
        if known is not None:
            return known
        self.all()
        return self._found.get(identifier)


def _runs_in(folder: Path) -> Iterator[Path]:
    left = [MOST_RUNS, _MOST_ENTRIES]
    yield from _below(folder, _DEPTH, left)


def _below(folder: Path, depth: int, left: list[int]) -> Iterator[Path]:
    """The run directories in ``folder``, or itself; nothing is looked for inside of one. ``left`` counts runs and entries down."""
    if any(os.path.lexists(folder / sign) for sign in _SIGNS):
        if left[0] > 0:
            left[0] -= 1
            yield folder
        return
    if depth == 0:
        return
    try:
        with os.scandir(folder) as entries:
            inside = sorted(
                entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()
            )
    except OSError:
        return
    for name in inside:
        left[1] -= 1
        if left[1] < 0 or left[0] <= 0:
            return
        yield from _below(folder / name, depth - 1, left)
