"""Removal of a run: its consequences, its obstacles, and a removal that leaves no partial run.

Other runs may continue from a run's checkpoints, and could not be computed again without it. A run in training is
never removed. The directory is locked as a start locks it, and renamed before its files are deleted. If the removal
is killed, the rest is not a run directory, and its name shows its origin.
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
    """Consequences of removing a run."""

    row: RunRow
    files: int
    size_bytes: int
    largest: tuple[tuple[str, int], ...]
    """Names in the run directory with the bytes below each, the largest first."""
    descendants: tuple[str, ...]
    """Directories of runs that continue from a checkpoint of this one, in the searched folders."""
    inside: tuple[str, ...] = ()
    """Directories of other runs inside this one."""

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Reasons not to remove the run."""
        obstacles = []
        if self.row.state in ("running", "silent", "waiting"):
            obstacles.append(f"it may be running on another machine: its state is {self.row.state}")
        if self.descendants:
            obstacles.append(f"other runs continue from its checkpoints: {', '.join(self.descendants)}")
        if self.inside:
            obstacles.append(f"other runs lie in it, and would go with it: {', '.join(self.inside)}")
        return tuple(obstacles)


def removal(run_dir: Path, beside: Sequence[Path], together: Sequence[Path] = ()) -> Removal:
    """Return the consequences of removing a run. Descendants are searched in its own folder and in the folders
    ``beside``.

    Runs in ``together`` are removed too, and do not count. Raises ``RunDirectoryError`` if it is no run directory, or
    is being trained on this machine.
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
    by_size = sorted(((name, size) for name, (_, size) in sizes.items()), key=lambda pair: -pair[1])
    return Removal(
        row=row,
        files=sum(count for count, _ in sizes.values()),
        size_bytes=sum(size for _, size in sizes.values()),
        largest=tuple(by_size),
        descendants=tuple(_descendants(run_dir, beside, together)),
        inside=tuple(map(str, inside)),
    )


def remove(run_dir: Path) -> None:
    """Lock a run directory, rename it, and delete it with its content. Raises ``RunDirectoryError`` if it is being trained,
    ``OSError``."""
    lock = take_lock(RunDirectory(run_dir).lock)
    try:
        place = Path(os.path.realpath(run_dir))  # "." has no name
        removed_place = place.with_name(f"{REMOVED}{place.name}-{os.getpid()}")
        place.rename(removed_place)
        shutil.rmtree(removed_place)
    finally:
        os.close(lock)


def _descendants(run_dir: Path, beside: Sequence[Path], together: Sequence[Path]) -> list[str]:
    """Return the runs in the same folder and in ``beside`` that continue from this one, without those in ``together``."""
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
    """Return the number of files and bytes below an entry; links are not followed."""
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
