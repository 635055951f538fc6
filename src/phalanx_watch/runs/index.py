"""The runs below some folders, with a cache of what their files contain; and which of them a list shows, in which order.

Everything that a row shows is in the run's own directory. To look at forty runs costs a few hundred small reads, to look at thousands some
seconds; so what was read is kept in an SQLite file, under the path of the run and the size and time of each file that was read. A file that
has changed is read again. The cache is only that: it may be deleted, damaged, of another version, or in a folder where nothing can be written;
then everything is read again. Several processes may use it at once (write-ahead log; a process that finds it busy does without).

A condition is NAME OPERATOR VALUE, as in ``loss<2``. A name with a dot is a field of the run file, any other one a column. ``=`` and ``!=``
compare numbers as numbers and everything else as text, ``~`` means that the text contains the value. A run that lacks the field or column
does not fit.
"""

from __future__ import annotations

import difflib
import os
import re
import sqlite3
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from phalanx.run.directory.files import read_small
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.fields import field_types, sections
from phalanx.run.read import RUN_FILE
from phalanx.run.spec import RunSpec
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
"""Headings of columns in tables, where they are other than the names; both are accepted."""
_NAMES = {heading: name for name, heading in HEADINGS.items()}
_CONDITION = re.compile(r"\s*([A-Za-z_][\w./ ]*?)\s*(<=|>=|!=|<|>|=|~)\s*(.*?)\s*", re.DOTALL)
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
    """A condition or the name of a column cannot be read; the message says what there is."""


@dataclass(frozen=True)
class Condition:
    """A demand on a run."""

    name: str
    operator: str
    value: str

    def holds(self, row: RunRow) -> bool:
        """True if the run fits."""
        found = value_of(row, self.name)
        if found is None:
            return False
        if self.operator == "~":
            return self.value.lower() in _text(found).lower()
        if isinstance(found, int | float) and not isinstance(found, bool):
            try:
                return _NUMERIC[self.operator](float(found), float(self.value))
            except ValueError:
                return self.operator == "!="
        if self.operator not in ("=", "!="):
            return False
        equal = _text(found).lower() == self.value.lower()
        return equal if self.operator == "=" else not equal


def read_condition(text: str) -> Condition:
    """Reads a condition. Raises ``SelectionError``."""
    match = _CONDITION.fullmatch(text)
    if match is None or not match[3]:
        raise SelectionError(f"{text!r} is no condition: write NAME<VALUE, with one of < <= > >= = != ~")
    condition = Condition(checked_name(match[1]), match[2], match[3])
    _require_sense(condition)
    return condition


def _require_sense(condition: Condition) -> None:
    """Raise SelectionError for a condition that no run can fit, with whatever files."""
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
    """Return the name of a column that ``name`` or its heading names, or of a field of the run file. Raises ``SelectionError``."""
    if name in _NAMES:
        return _NAMES[name]
    names = _run_fields() if "." in name else COLUMNS
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, 1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    if "." in name:
        raise SelectionError(f"a run file has no field {name!r}{meant}; phalanx spec lists all fields")
    raise SelectionError(
        f"there is no column {name!r}{meant}; there are {', '.join(COLUMNS)}, and fields of the run file such as optimizer.lr"
    )


def _run_fields() -> list[str]:
    """Return the dotted path of every field of a run file that is in a section."""
    return [f"{name}.{field}" for name, kind, _ in sections(RunSpec) if name for field in field_types(kind)]


def value_of(row: RunRow, name: str) -> object:
    """The value of a column, or of a field of the run file, of a run; ``None`` if it has none."""
    return _field(Path(row.path), name) if "." in name else getattr(row, name)


def selected(rows: Iterable[RunRow], conditions: Sequence[Condition], tags: Sequence[str]) -> list[RunRow]:
    """The runs that fit all conditions and have all tags."""
    return [
        row
        for row in rows
        if set(tags) <= set(row.tags) and all(condition.holds(row) for condition in conditions)
    ]


def ordered(rows: Sequence[RunRow], name: str, *, falling: bool) -> list[RunRow]:
    """The runs by a column, or by a field of the run file; those without a value come last. Raises ``SelectionError``."""
    name = checked_name(name)
    having = [
        (value, row) for row in rows if (value := value_of(row, name)) not in (None, "") and value == value
    ]
    shown = {row.path for _, row in having}
    numbers = all(isinstance(value, int | float) for value, _ in having)

    def key(one: tuple[object, RunRow]) -> tuple[float, str]:
        value = one[0]
        return (float(value), "") if numbers and isinstance(value, int | float) else (0.0, _text(value))

    in_order = [row for _, row in sorted(having, key=key, reverse=falling)]
    return in_order + [row for row in rows if row.path not in shown]


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _field(path: Path, name: str) -> object:
    try:
        table: object = tomllib.loads(read_small(RunDirectory(path).run_file).decode())
    except (OSError, ValueError, RecursionError):
        return None
    for part in name.split("."):
        table = table.get(part) if isinstance(table, dict) else None
    return table
