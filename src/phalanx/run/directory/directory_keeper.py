"""The keeper of the small files of a run directory while a fleet runs: ``record.json`` and the resolved run file.

A start of a run on a damaged one is refused, since nobody then knows which data the run was trained on, or which run it is. A fleet that
runs does know: its coordinator, and its launcher before it starts a process again, remember the last good content, tell of the damage by name,
and write the file anew, before a process that begins has to read it. A file that says the same in other words is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from phalanx.run.directory.durable import write_atomically
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.directory.regular_file import read_small
from phalanx.run.spec import RunSpec


class DirectoryKeeper:
    """Remembers the small files of a run directory, and mends them."""

    def __init__(self, directory: RunDirectory) -> None:
        self._checks: dict[Path, Callable[[], object]] = {
            directory.record: directory.read_record,
            directory.run_file: self._require_same_run,
        }
        self._directory = directory
        self._kept: dict[Path, bytes] = {}
        self._spec: RunSpec | None = None

    def look(self) -> list[str]:
        """Looks at the files, and writes anew which of them is damaged or gone; returns what to tell.

        A file that was damaged before this process first saw it stays as it is. Raises ``OSError`` if one cannot be read or written.
        """
        return [told for path, check in self._checks.items() if (told := self._look_at(path, check))]

    def _require_same_run(self) -> None:
        """Raises ``RunDirectoryError`` if the run file cannot be read, or describes another run: an empty one has every default."""
        found = read_resolved(self._directory)
        if self._spec not in (None, found):
            raise RunDirectoryError("another run")
        self._spec = found

    def _look_at(self, path: Path, check: Callable[[], object]) -> str:
        kept = self._kept.get(path)
        try:
            found = read_small(path)
            if found == kept:
                return ""
            check()
        except FileNotFoundError:
            what = f"{path} was removed"
        except RunDirectoryError:
            what = f"{path} was damaged or changed"
        else:
            self._kept[path] = found
            return ""
        if kept is None:
            return ""
        write_atomically(path, kept)
        return f"{what}; it has been written anew as it was"
