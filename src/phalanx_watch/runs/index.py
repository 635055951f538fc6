"""The runs below some folders, with a cache of what their files contain.

Everything that a row shows is in the run's own directory. To look at forty runs costs a few hundred small reads, to look at thousands some
seconds; so what was read is kept in an SQLite file, under the path of the run and the size and time of each file that was read. A file that
has changed is read again. The cache is only that: it may be deleted, damaged, of another version, or in a folder where nothing can be written;
then everything is read again. Several processes may use it at once (write-ahead log; a process that finds it busy does without).
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from phalanx.run.directory.paths import RunDirectory
from phalanx.run.read import RUN_FILE
from phalanx.version import __version__
from phalanx_watch.runs.probe import KernelLocks
from phalanx_watch.runs.row import ENDED, SUBMITTED, RunFacts, RunRow, read_facts, row_of

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
