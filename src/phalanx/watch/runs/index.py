"""The runs below some folders: found, held by a process or not, listed through a cache, and removed.

Everything that a row shows lies in the run's own directory. To look at forty runs costs a few hundred small reads, to look at thousands some
seconds; so what was read is kept in an SQLite file, under the path of the run and the size and time of each file that was read. A file that
has changed is read again. The cache is only that: it may be deleted, damaged, of another version, or in a folder where nothing can be written;
then everything is read again. Several processes may use it at once (write-ahead log; who finds it busy goes without).

A start of a run locks the file ``lock`` of its directory (``flock``), and the kernel drops that lock with the last of its processes, however
they end. To try the lock would hold it for a moment, in which the run could be refused. So ``/proc/locks`` (proc(5)), the kernel's list, is
read. For a run on another machine, and where there is no such list, the answer is unknown.

A run whose checkpoints others go on from is their past: without it nobody can compute them again. A run that is being trained is never
removed. The directory is locked as a start of the run locks it, and renamed before its files go: a kill in the middle leaves a folder that is
no run directory any more, and says by its name what it was.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.run.directory.regular_file import read_small
from phalanx.run.read import RUN_FILE
from phalanx.train.start.open_run import take_lock
from phalanx.version import __version__
from phalanx.watch.runs.row import ENDED, SUBMITTED, RunFacts, RunRow, read_facts, row_of

# Locks.


_LOCK = re.compile(r"^\d+: FLOCK +\S+ +WRITE +(-?\d+) +([0-9a-f]+):([0-9a-f]+):(\d+) ", re.MULTILINE)
_HOLDER = re.compile(r"process (\d+) on (\S+)")


@dataclass(frozen=True)
class KernelLocks:
    """The exclusive ``flock`` locks of this machine: process, device (major, minor) and inode of each; ``None`` if they are not known."""

    held: frozenset[tuple[int, int, int, int]] | None = field(
        default_factory=lambda: _listed(Path("/proc/locks"))
    )

    def holds(self, directory: RunDirectory) -> bool | None:
        """True if a process of this machine holds the run directory, False if none of any does, ``None`` if that cannot be told."""
        try:
            status, text = (
                directory.lock.stat(),
                read_small(directory.lock).decode(errors="replace"),
            )
        except FileNotFoundError:
            return False
        except OSError:
            return None
        holder = _HOLDER.match(text)
        if holder is None or holder[2] != socket.gethostname() or self.held is None:
            return None
        device = os.major(status.st_dev), os.minor(status.st_dev)
        # Some file systems give other device numbers to stat than to the kernel's list: there the process tells.
        return any(
            inode == status.st_ino and ((major, minor) == device or process == int(holder[1]))
            for process, major, minor, inode in self.held
        )


def holder_of(directory: RunDirectory) -> int | None:
    """The process of this machine that took the lock of the run directory last; ``None`` if that was on another machine, or nobody knows."""
    try:
        holder = _HOLDER.match(read_small(directory.lock).decode(errors="replace"))
    except OSError:
        return None
    return int(holder[1]) if holder is not None and holder[2] == socket.gethostname() else None


def _listed(path: Path) -> frozenset[tuple[int, int, int, int]] | None:
    try:
        text = path.read_text()
    except OSError:
        return None
    found = _LOCK.findall(text)
    return frozenset((int(process), int(a, 16), int(b, 16), int(inode)) for process, a, b, inode in found)


# The index.


__all__ = ["RunIndex", "RunRow"]
REMOVED = ".removed-"
"""The name of a run directory begins so while its files are being removed."""
_BUSY_S = 0.2
_DAY_S = 86_400
_MOST_NAMED = 500
"""More runs are not looked for by name: SQLite bounds the values of a query."""
_SHAPE = f"{__version__}/2"
"""The version of what the cache holds: rows of another one are not read."""
_MADE = "CREATE TABLE IF NOT EXISTS runs (path TEXT PRIMARY KEY, shape TEXT, signature TEXT, facts BLOB) WITHOUT ROWID"


def default_cache() -> Path:
    """The file of the cache: in the user's folder for caches, ``XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "phalanx" / "runs.sqlite"


class RunIndex:
    """The runs in some folders; a folder is one that holds run directories, or a run directory itself."""

    def __init__(self, folders: Sequence[Path], cache_path: Path | None = None) -> None:
        self.folders = tuple(folders)
        self._cache = _Cache(cache_path or default_cache())

    def rows(self) -> list[RunRow]:
        """The runs that are there now, those of each folder by name. A folder that is missing has none."""
        now, locks = time.time(), KernelLocks()
        paths = list(dict.fromkeys(found_in(self.folders)))
        known = self._cache.read(map(os.path.abspath, paths))
        rows, fresh = [], []
        for path in paths:
            key, signature = os.path.abspath(path), _signature(path)
            facts = known[key][1] if key in known and known[key][0] == signature else None
            if facts is None:
                facts = read_facts(path)
                fresh.append((key, signature, facts))
            rows.append(row_of(_placed(facts, path), locks.holds(RunDirectory(path)), now))
        self._cache.write(fresh)
        return rows

    def row(self, run_id: str) -> RunRow | None:
        """The run of that id; ``None`` if there is none."""
        return next((row for row in self.rows() if row.id == run_id), None)


def found_in(folders: Iterable[Path]) -> Iterator[Path]:
    """The run directories in some folders, those of each by name."""
    for folder in folders:
        if is_run(folder):
            yield folder
            continue
        with suppress(OSError):
            for name in sorted(os.listdir(folder)):
                if not name.startswith(REMOVED) and is_run(folder / name):
                    yield folder / name


def is_run(path: Path) -> bool:
    """True if ``path`` is a run directory, or that of a run which was submitted and has not begun."""
    return any((path / name).exists() for name in ("record.json", RUN_FILE, SUBMITTED))


def _signature(path: Path) -> str:
    """What changes when a file that ``read_facts`` reads does: the size and time of each."""
    directory = RunDirectory(path)
    files = (
        *(directory.run_file, directory.record, directory.events, directory.result, directory.checkpoints),
        *(path / "fleet.json", directory.labels, directory.logs, path / SUBMITTED, path / ENDED),
    )
    return " ".join(map(_stamp, files))


def _stamp(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return "-"
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ino}"


def _placed(facts: RunFacts, path: Path) -> RunFacts:
    """The facts with the path as it was asked for: the cache knows runs by their absolute paths."""
    return facts if facts.row.path == str(path) else replace(facts, row=replace(facts.row, path=str(path)))


class _Cache:
    """What was read of runs, by absolute path; nothing that goes wrong with it is told to anybody, since nothing is lost."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, keys: Iterable[str]) -> dict[str, tuple[str, RunFacts]]:
        """Signature and facts of those that are known."""
        wanted, found = set(keys), {}
        for key, signature, facts in self._selected(wanted):
            if key in wanted:
                with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    found[key] = (signature, msgspec.msgpack.decode(facts, type=RunFacts))
        return found

    def _selected(self, wanted: Collection[str]) -> list[tuple[str, str, bytes]]:
        if not self._path.exists():
            return []
        query, values = "SELECT path, signature, facts FROM runs WHERE shape = ?", [_SHAPE]
        if len(wanted) <= _MOST_NAMED:
            # The page asks for one run at each of its steps, and the cache knows all that this user has ever listed.
            query, values = f"{query} AND path IN ({','.join('?' * len(wanted))})", [_SHAPE, *wanted]
        try:
            with closing(self._open()) as base:
                return base.execute(query, values).fetchall()
        except sqlite3.OperationalError:  # busy, of another shape, not readable
            return []
        except sqlite3.DatabaseError:
            self._remove()
            return []

    def write(self, entries: Sequence[tuple[str, str, RunFacts]]) -> None:
        """Keeps what was read."""
        if not entries:
            return
        rows = []
        for key, signature, facts in entries:
            with suppress(UnicodeEncodeError, OverflowError):  # a path that is no text: it is read each time
                key.encode()
                rows.append((key, _SHAPE, signature, msgspec.msgpack.encode(facts)))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open()) as base, base:
                base.execute(_MADE)
                base.executemany("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?)", rows)
                _sweep(base, {os.path.dirname(row[0]) for row in rows}, int(time.time() // _DAY_S))
        except sqlite3.OperationalError:
            return
        except sqlite3.DatabaseError:
            self._remove()
        except OSError:
            return

    def _open(self) -> sqlite3.Connection:
        base = sqlite3.connect(self._path, timeout=_BUSY_S)
        base.execute("PRAGMA journal_mode = WAL")
        base.execute("PRAGMA synchronous = OFF")
        return base

    def _remove(self) -> None:
        """Removes a damaged file; the next reader makes a new one."""
        for name in (self._path.name, f"{self._path.name}-wal", f"{self._path.name}-shm"):
            with suppress(OSError):
                self._path.with_name(name).unlink()


def _sweep(base: sqlite3.Connection, folders: Collection[str], day: int) -> None:
    """Once a day: forgets runs of ``folders`` that are no more, and what other versions have kept. The base's own ``user_version`` has the day of the last time.

    ``folders`` have just been read. Others are left alone: one may be on a disk that is away for a moment, or on a file server that never answers.
    """
    if base.execute("PRAGMA user_version").fetchone()[0] == day:
        return
    known = base.execute("SELECT path, shape FROM runs").fetchall()
    gone = [
        (path,)
        for path, shape in known
        if shape != _SHAPE or (os.path.dirname(path) in folders and not os.path.isdir(path))
    ]
    base.executemany("DELETE FROM runs WHERE path = ?", gone)
    base.execute(f"PRAGMA user_version = {day}")


# Removal.


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
