"""Removing a run: what would be lost, why it must not be, and doing it so that nothing half removed is taken for a run.

A run whose checkpoints others go on from is their past: without it nobody can compute them again. A run that is being trained is never
removed. The directory is locked as a start of the run locks it, and renamed before its files go: a kill in the middle leaves a folder that is
no run directory any more, and says by its name what it was.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.run.directory.files import read_small
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.train.start.open_run import take_lock
from phalanx_watch.runs.index import REMOVED, RunIndex, found_in
from phalanx_watch.runs.probe import KernelLocks
from phalanx_watch.runs.row import RunRow


@dataclass(frozen=True)
class Removal:
    """What the removal of a run would take away."""

    row: RunRow
    files: int
    size_bytes: int
    largest: tuple[tuple[str, int], ...]
    """The names in the run directory with the bytes below each, the largest first."""
    descendants: tuple[str, ...]
    """Directories of runs that go on from a checkpoint of this one, among those that were looked at."""
    inside: tuple[str, ...] = ()
    """Directories of other runs that lie in this one."""

    @property
    def obstacles(self) -> tuple[str, ...]:
        """What should keep one from it."""
        found = []
        if self.row.state in ("running", "silent", "waiting"):
            found.append(f"it may be running on another machine: its state is {self.row.state}")
        if self.descendants:
            found.append(f"other runs go on from its checkpoints: {', '.join(self.descendants)}")
        if self.inside:
            found.append(f"other runs lie in it, and would go with it: {', '.join(self.inside)}")
        return tuple(found)


def removal(run_dir: Path, beside: Sequence[Path], together: Sequence[Path] = ()) -> Removal:
    """What removing a run would take away; descendants are looked for in its own folder and in the folders ``beside``.

    Those in ``together`` go with it, and do not count.

    Raises ``RunDirectoryError`` if it is no run directory, or is being trained on this machine.
    """
    if run_dir.is_symlink():
        raise RunDirectoryError(f"{run_dir} is a link to {os.readlink(run_dir)}; name the directory itself")
    if not RunDirectory(run_dir).record.exists():
        raise RunDirectoryError(
            f"{run_dir} is no run directory: it has no record.json; remove it by hand if it is to go"
        )
    (row,) = RunIndex([run_dir]).rows()
    inside = [
        path for entry in sorted(run_dir.iterdir()) if not entry.is_symlink() for path in found_in([entry])
    ]
    locks = KernelLocks()
    for path in (run_dir, *inside):
        if locks.holds(RunDirectory(path)):
            holder = read_small(RunDirectory(path).lock).decode(errors="replace").strip()
            raise RunDirectoryError(f"{path} is being trained by {holder}; stop it first")
    sizes = {entry.name: _size(entry) for entry in os.scandir(run_dir)}
    by_size = sorted(((name, size) for name, (_, size) in sizes.items()), key=lambda one: -one[1])
    return Removal(
        row=row,
        files=sum(count for count, _ in sizes.values()),
        size_bytes=sum(size for _, size in sizes.values()),
        largest=tuple(by_size),
        descendants=tuple(_descendants(run_dir, beside, together)),
        inside=tuple(map(str, inside)),
    )


def remove(run_dir: Path) -> None:
    """Removes a run directory with all that is in it. Raises ``RunDirectoryError`` if it is being trained, ``OSError``."""
    lock = take_lock(RunDirectory(run_dir).lock)
    try:
        place = Path(os.path.realpath(run_dir))  # "." has no name
        gone = place.with_name(f"{REMOVED}{place.name}-{os.getpid()}")
        place.rename(gone)
        shutil.rmtree(gone)
    finally:
        os.close(lock)


def _descendants(run_dir: Path, beside: Sequence[Path], together: Sequence[Path]) -> list[str]:
    own = os.path.realpath(run_dir)
    going = {own, *map(os.path.realpath, together)}
    folders = [Path(os.path.dirname(own)), *beside]
    return [
        row.path
        for row in RunIndex(folders).rows()
        if os.path.realpath(row.path) not in going
        if any(os.path.realpath(origin.run_dir) == own for origin in row.lineage)
    ]


def _size(entry: os.DirEntry[str]) -> tuple[int, int]:
    """The files and bytes below an entry, links not followed."""
    if not entry.is_dir(follow_symlinks=False):
        return 1, entry.stat(follow_symlinks=False).st_size
    files = size = 0
    for folder, _, names in os.walk(entry.path):
        for name in names:
            files += 1
            try:
                size += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return files, size
