"""A run as a row of the list: how far it is, its newest numbers, and what is wrong with its directory."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx.fleet.control.fleet_file import path_in
from phalanx.observe.events import Event, Finished, Step, Stopped
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.spec import RunSpec
from phalanx.watch.page.newest import Newest, newest
from phalanx.watch.page.places import Place

State = Literal["running", "finished", "stopped", "failed", "silent", "waiting"]
SILENT_S = 120.0
"""A run that has said nothing for so long, and for ten of its steps, is silent."""


@dataclass(frozen=True)
class Row:
    """A run, as the list shows it; ``None`` and empty for what is not known."""

    id: str
    path: str
    name: str
    state: State
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    bits_per_byte: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    goodput: float | None = None
    started: float | None = None
    updated: float | None = None
    layout: dict[str, int] = field(default_factory=dict)
    ranks: int | None = None
    commit: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""
    weights_sha256: str = ""
    problems: tuple[str, ...] = ()


class Rows:
    """Makes rows, and keeps each until one of the files that it is made from changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[object, Row, float]] = {}

    def row(self, place: Place) -> Row:
        """The row of a run; of a directory that cannot be read, or is gone, one that says so."""
        sign = _sign(place)
        with self._lock:
            kept = self._kept.get(place.id)
        if kept is not None and kept[0] == sign:
            return _as_of(kept[1], kept[2], time.time())
        row, step_s = _make(place)
        with self._lock:
            self._kept[place.id] = sign, row, step_s
        return _as_of(row, step_s, time.time())


def _sign(place: Place) -> object:
    directory = RunDirectory(place.path)
    found: list[tuple[int, int, int] | None] = []
    for path in (directory.events, directory.result, directory.run_file, path_in(place.path)):
        try:
            seen = path.stat()
            found.append((seen.st_ino, seen.st_size, seen.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)


def _as_of(row: Row, step_s: float, now: float) -> Row:
    """The row at a time: a run that goes on by its last words may have fallen silent since."""
    if row.state != "running" or row.updated is None or now - row.updated < max(SILENT_S, 10 * step_s):
        return row
    return replace(row, state="silent")


def _make(place: Place) -> tuple[Row, float]:
    directory = RunDirectory(place.path)
    problems: list[str] = []
    seen, spec = Newest(), None
    try:
        seen = newest(directory.events)
        spec = _spec(directory, problems)
    except OSError as error:
        problems.append(f"{error.filename or directory.path}: {error.strerror}")
    step = seen.step.body if seen.step is not None and isinstance(seen.step.body, Step) else None
    result = directory.finished_result()
    row = Row(
        id=place.id,
        path=str(place.path),
        name=spec.name if spec is not None else place.path.name,
        state=_state(seen, finished=result is not None),
        step=result.step if result else step.step if step else None,
        steps=step.steps if step else spec.train.steps if spec else None,
        loss=result.loss if result else step.loss if step else None,
        bits_per_byte=result.bits_per_byte if result else step.bits_per_byte if step else None,
        tokens_per_s=result.tokens_per_s if result else step.tokens_per_s if step else None,
        mfu=result.mfu if result else step.mfu if step else None,
        goodput=step.goodput if step else None,
        started=seen.first.t if seen.first else None,
        updated=seen.last.t if seen.last else None,
        layout=seen.started.layout if seen.started else {},
        ranks=seen.started.ranks if seen.started else None,
        commit=_commit(seen),
        weights_sha256=result.weights_sha256 if result else "",
        problems=tuple(problems),
    )
    return row, step.step_s if step else 0.0


def _spec(directory: RunDirectory, problems: list[str]) -> RunSpec | None:
    try:
        return read_resolved(directory)
    except RunDirectoryError as error:
        problems.append(str(error)[:500])
        return None


def _state(seen: Newest, *, finished: bool) -> State:
    lived: Event | None = seen.lived
    if finished or (lived is not None and isinstance(lived.body, Finished)):
        return "finished"
    if lived is None:
        return "waiting"
    if isinstance(lived.body, Stopped):
        return "stopped"
    return "running"


def _commit(seen: Newest) -> str:
    code = seen.started.environment.get("code") if seen.started else None
    commit = code.get("git_commit") if isinstance(code, dict) else None
    return str(commit)[:40] if commit else ""
