"""Index of the runs below some folders, with a cache of their files' content; selection and order of a list; and removal of a run.

Everything in a row is in the run's own directory. Listing forty runs takes a few hundred small reads, listing
thousands some seconds. So the content is cached in an SQLite file, by the path of the run and the size and time of
each file; a changed file is read again.

The cache is optional: it may be deleted, damaged, of another version, or not writable, and then everything is read
again. Several processes may use it at once (write-ahead log; a process that finds it busy skips it).

A condition is NAME OPERATOR VALUE, as in ``loss<2``. A name with a dot is a field of the run file, any other one a
column. Several conditions in one text have "and" between them. ``=`` and ``!=`` compare numbers as numbers and everything else as text; ``~`` means that the text contains
the value. A run without the field or column does not match.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sqlite3
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from phalanx.run.directory.files import read_small, user_cache
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.run.fields import field_types, sections
from phalanx.run.read import RUN_FILE
from phalanx.run.spec import RunSpec
from phalanx.train.start.open_run import take_lock
from phalanx.version import __version__
from phalanx_watch.runs.probe import KernelLocks
from phalanx_watch.runs.row import ENDED, SUBMITTED, RowFacts, RunRow, read_facts, row_of

__all__ = ["RunIndex", "RunRow"]
REMOVED = ".removed-"
"""Prefix of a run directory while its files are being removed."""
_BUSY_S = 0.2
_DAY_S = 86_400
_MOST_NAMED = 500
"""Most runs that are queried by name: SQLite limits the values of a query."""
_SHAPE = f"{__version__}/2"
"""Version of the cached rows; other versions are ignored."""
_MADE = "CREATE TABLE IF NOT EXISTS runs (path TEXT PRIMARY KEY, shape TEXT, signature TEXT, facts BLOB) WITHOUT ROWID"


class RunIndex:
    """The runs in some folders; a folder contains run directories, or is one."""

    def __init__(self, folders: Sequence[Path], cache_path: Path | None = None) -> None:
        self.folders = tuple(folders)
        self._cache = _Cache(cache_path or user_cache() / "runs.sqlite")

    def rows(self) -> list[RunRow]:
        """Return the existing runs, sorted by name within each folder, with their states as of now.

        Unchanged ones come from a cache on disk, which is updated. A missing folder has none.
        """
        now, locks = time.time(), KernelLocks()
        paths = list(dict.fromkeys(found_in(self.folders)))
        cached = self._cache.read(map(os.path.abspath, paths))
        rows, fresh = [], []
        for path in paths:
            key, signature = os.path.abspath(path), _signature(path)
            facts = cached[key][1] if key in cached and cached[key][0] == signature else None
            if facts is None:
                facts = read_facts(path)
                fresh.append((key, signature, facts))
            if facts.row.path != str(path):  # the cache has absolute paths
                facts = replace(facts, row=replace(facts.row, path=str(path)))
            rows.append(row_of(facts, locks.holds(RunDirectory(path)), now))
        self._cache.write(fresh)
        return rows

    def row(self, run_id: str) -> RunRow | None:
        """Return the run of that id; None if there is none."""
        return next((row for row in self.rows() if row.id == run_id), None)


def found_in(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the run directories in some folders, sorted by name within each; a folder that is one yields itself.

    Unreadable folders and removed runs are skipped.
    """
    for folder in folders:
        if is_run(folder):
            yield folder
            continue
        with suppress(OSError):
            for name in sorted(os.listdir(folder)):
                if not name.startswith(REMOVED) and is_run(folder / name):
                    yield folder / name


def is_run(path: Path) -> bool:
    """Return True if ``path`` is a run directory, or that of a submitted run which has not begun."""
    return any((path / name).exists() for name in ("record.json", RUN_FILE, SUBMITTED))


def _signature(path: Path) -> str:
    """Return a text that changes with the size, time or inode of every file that ``read_facts`` reads."""
    directory = RunDirectory(path)
    files = (
        *(directory.run_file, directory.record, directory.events, directory.result, directory.checkpoints),
        *(path / "fleet.json", directory.labels, directory.logs, path / SUBMITTED, path / ENDED),
    )
    return " ".join(map(_stamp, files))


def _stamp(path: Path) -> str:
    """Return a text that changes with a file's size, time or inode; "-" if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return "-"
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ino}"


class _Cache:
    """Cached facts of runs, by absolute path. Its errors are not reported, since nothing is lost."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, keys: Iterable[str]) -> dict[str, tuple[str, RowFacts]]:
        """Return signature and facts of the cached runs among ``keys``; damaged entries are left out."""
        paths, facts_by_path = set(keys), {}
        for key, signature, facts in self._selected(paths):
            if key in paths:
                with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    facts_by_path[key] = (signature, msgspec.msgpack.decode(facts, type=RowFacts))
        return facts_by_path

    def _selected(self, paths: Collection[str]) -> list[tuple[str, str, bytes]]:
        """Return the cached rows of the present version; for up to ``_MOST_NAMED`` paths only theirs, else all.

        Empty if the cache is missing, busy or not readable. A damaged cache is deleted.
        """
        if not self._path.exists():
            return []
        query, values = "SELECT path, signature, facts FROM runs WHERE shape = ?", [_SHAPE]
        if len(paths) <= _MOST_NAMED:
            # The page queries one run at each of its steps, and the cache has every run that this user ever listed.
            query, values = f"{query} AND path IN ({','.join('?' * len(paths))})", [_SHAPE, *paths]
        try:
            with closing(self._open()) as base:
                return base.execute(query, values).fetchall()
        except sqlite3.OperationalError:  # locked, another schema, or unreadable
            return []
        except sqlite3.DatabaseError:
            self._remove()
            return []

    def write(self, entries: Sequence[tuple[str, str, RowFacts]]) -> None:
        """Store facts, and sweep the cache once a day. A busy or unwritable cache is left as it is; a damaged one is deleted."""
        if not entries:
            return
        rows = []
        for key, signature, facts in entries:
            with suppress(UnicodeEncodeError, OverflowError):  # a path that is no text is not cached
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
        """Open the cache, without waiting for the disk on writes."""
        base = sqlite3.connect(self._path, timeout=_BUSY_S)
        base.execute("PRAGMA journal_mode = WAL")
        base.execute("PRAGMA synchronous = OFF")
        return base

    def _remove(self) -> None:
        """Remove a damaged file; the next reader makes a new one."""
        for name in (self._path.name, f"{self._path.name}-wal", f"{self._path.name}-shm"):
            with suppress(OSError):
                self._path.with_name(name).unlink()


def _sweep(base: sqlite3.Connection, folders: Collection[str], day: int) -> None:
    """Once a day, delete cached runs of ``folders`` that no longer exist, and rows of other versions.
    ``user_version`` has the day of the last sweep.

    ``folders`` have just been read. Others are left alone: one may be on a disk that is not mounted, or on a file
    server that does not answer.
    """
    if base.execute("PRAGMA user_version").fetchone()[0] == day:
        return
    cached = base.execute("SELECT path, shape FROM runs").fetchall()
    stale = [
        (path,)
        for path, shape in cached
        if shape != _SHAPE or (os.path.dirname(path) in folders and not os.path.isdir(path))
    ]
    base.executemany("DELETE FROM runs WHERE path = ?", stale)
    base.execute(f"PRAGMA user_version = {day}")


# Conditions and order of a list.


COLUMNS = tuple(field.name for field in fields(RunRow))
HEADINGS: Mapping[str, str] = {
    "path": "run",
    "bits_per_byte": "bits/byte",
    "tokens_per_s": "tokens/s",
    "updated": "last event",
    "weights_sha256": "weights",
    "held_out_loss": "held out",
}
"""Table headings that differ from the column name; both are accepted."""
_NAMES = {heading: name for name, heading in HEADINGS.items()}
_CONDITION = re.compile(r"\s*([A-Za-z_][\w./ ]*?)\s*(<=|>=|!=|<|>|=|~)\s*(.*?)\s*", re.DOTALL)
_AND = re.compile(r"\s+and\s+(?=[A-Za-z_][\w./ ]*?\s*[<>=!~])")
_KINDS: Mapping[str, Any] = get_type_hints(RunRow)
_NUMERIC: Mapping[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


class SelectionError(ValueError):
    """An invalid condition or column name. The message lists the valid ones."""


@dataclass(frozen=True)
class Condition:
    """A condition on a run."""

    name: str
    operator: str
    value: str

    def holds(self, row: RunRow) -> bool:
        """Return True if the run satisfies the condition; False without a value.

        ``~`` is a substring, numbers compare as such, other values only for equality, without case.
        """
        actual = value_of(row, self.name)
        if actual is None:
            return False
        if self.operator == "~":
            return self.value.lower() in _text(actual).lower()
        if isinstance(actual, int | float) and not isinstance(actual, bool):
            try:
                return _NUMERIC[self.operator](float(actual), float(self.value))
            except ValueError:
                return self.operator == "!="
        if self.operator not in ("=", "!="):
            return False
        equal = _text(actual).lower() == self.value.lower()
        return equal if self.operator == "=" else not equal


def read_condition(text: str) -> Condition:
    """Parse a condition such as ``loss<2``, with one of < <= > >= = != ~.

    Raises ``SelectionError`` for another form, an unknown name, or a condition that no run can satisfy.
    """
    match = _CONDITION.fullmatch(text)
    if match is None or not match[3]:
        raise SelectionError(f"{text!r} is no condition: write NAME<VALUE, with one of < <= > >= = != ~")
    condition = Condition(checked_name(match[1]), match[2], match[3])
    _require_sense(condition)
    return condition


def read_conditions(text: str) -> list[Condition]:
    """Parse conditions with "and" between them, as in ``loss<2 and optimizer.lr=0.001``; none if the text is empty.

    Raises ``SelectionError``.
    """
    return [read_condition(part) for part in _AND.split(text)] if text.strip() else []


def _require_sense(condition: Condition) -> None:
    """Raise SelectionError for an order of what is no number, or a state that does not exist."""
    name, operator, value = condition.name, condition.operator, condition.value
    kind = _KINDS.get(name)
    if operator.rstrip("=") in ("<", ">"):
        if not _is_number(value):
            raise SelectionError(
                f"{name}{operator}{value}: {operator} compares numbers, and {value!r} is none"
            )
        if kind is not None and not {int, float} & {kind, *get_args(kind)}:
            raise SelectionError(f"{name}{operator}{value}: {name} is no number: use = != or ~")
    elif name == "state" and operator == "=" and value.lower() not in get_args(kind):
        raise SelectionError(f"there is no state {value!r}; there are {', '.join(get_args(kind))}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def checked_name(name: str) -> str:
    """Return the column or field of the run file that ``name`` or a heading names. Raises ``SelectionError``, with the nearest name."""
    if name in _NAMES:
        return _NAMES[name]
    names = (
        [f"{name}.{field}" for name, kind, _ in sections(RunSpec) if name for field in field_types(kind)]
        if "." in name
        else COLUMNS
    )
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, 1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    if "." in name:
        raise SelectionError(f"a run file has no field {name!r}{meant}; phalanx spec lists all fields")
    raise SelectionError(
        f"there is no column {name!r}{meant}; there are {', '.join(COLUMNS)}, and fields of the run file such as optimizer.lr"
    )


def value_of(row: RunRow, name: str) -> object:
    """Return the value of a column, or of a run-file field, of a run; None if it has none."""
    return _field(Path(row.path), name) if "." in name else getattr(row, name)


def selected(rows: Iterable[RunRow], conditions: Sequence[Condition], tags: Sequence[str]) -> list[RunRow]:
    """Return the runs that satisfy all conditions and have all tags."""
    return [
        row
        for row in rows
        if set(tags) <= set(row.tags) and all(condition.holds(row) for condition in conditions)
    ]


def ordered(rows: Sequence[RunRow], name: str, *, falling: bool) -> list[RunRow]:
    """Return the runs sorted by a column or run-file field; those without a value come last in either direction.

    Numbers sort by size if all are numbers, else values by their text. Raises ``SelectionError``.
    """
    name = checked_name(name)
    having = [
        (value, row) for row in rows if (value := value_of(row, name)) not in (None, "") and value == value
    ]
    shown = {row.path for _, row in having}
    numbers = all(isinstance(value, int | float) for value, _ in having)

    def key(pair: tuple[object, RunRow]) -> tuple[float, str]:
        value = pair[0]
        return (float(value), "") if numbers and isinstance(value, int | float) else (0.0, _text(value))

    in_order = [row for _, row in sorted(having, key=key, reverse=falling)]
    return in_order + [row for row in rows if row.path not in shown]


def _text(value: object) -> str:
    """Return a value as text: a table as ``key=value``, a list with commas."""
    if isinstance(value, Mapping):
        return " ".join(f"{key}={item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _field(path: Path, name: str) -> object:
    """Return a field of a run's run file by dotted name; None if it has none, or the file cannot be read."""
    try:
        table: object = tomllib.loads(read_small(RunDirectory(path).run_file).decode())
    except (OSError, ValueError, RecursionError):
        return None
    for part in name.split("."):
        table = table.get(part) if isinstance(table, dict) else None
    return table


# Removal.
#
# Other runs may continue from a run's checkpoints, and could not be computed again without it. A run in training is
# never removed. The directory is locked as a start locks it, and renamed before its files are deleted. If the removal
# is killed, the rest is not a run directory, and its name shows its origin.


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
        """Reasons not to remove the run: it may be running, others continue from it, or are inside it. Empty if there are none."""
        obstacles = []
        if self.row.state in ("running", "silent", "waiting"):
            obstacles.append(f"it may be running on another machine: its state is {self.row.state}")
        if self.descendants:
            obstacles.append(f"other runs continue from its checkpoints: {', '.join(self.descendants)}")
        if self.inside:
            obstacles.append(f"other runs are in it, and would be removed too: {', '.join(self.inside)}")
        return tuple(obstacles)


def removal(run_dir: Path, beside: Sequence[Path], together: Sequence[Path] = ()) -> Removal:
    """Return the consequences of removing a run, and remove nothing.

    Descendants are searched in its own folder and in the folders ``beside``.

    Runs in ``together`` are removed too, and do not count. Raises ``RunDirectoryError`` if it is a link or no run
    directory, or it or a run inside is being trained on this machine.
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
    """Lock a run directory, rename it, and delete it with its content; a link's target is deleted.

    Raises ``RunDirectoryError`` if it is being trained, and ``OSError``. What could not be deleted stays under the new
    name.
    """
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
    """Return the number of files and bytes below an entry, or of itself; links are not followed, vanished files not counted in bytes."""
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
