"""``/api/run/ID``: a run in a page: its row, its starts, what it was made from, and which other views have something to show."""

from __future__ import annotations

import os
import time
import tomllib
from dataclasses import asdict
from pathlib import Path

from phalanx.fleet.control.fleet_file import path_in
from phalanx.observe.events import Event, RunStarted
from phalanx.observe.logs.masking import run_file_mask
from phalanx.observe.serving import read_serving
from phalanx.run.directory.lineage import read_lineage
from phalanx.run.directory.paths import RunDirectory, read_small_json
from phalanx.run.directory.regular_file import open_regular
from phalanx.watch.page.answer import Parameters
from phalanx.watch.page.places import Place
from phalanx.watch.page.views.runs import Runs
from phalanx.watch.series.run_series import RunSeries

_MOST_RUN_FILE_BYTES = 1 << 20
_MOST_STARTS = 500
_MOST_EVALUATIONS = 2000


def summary(runs: Runs, place: Place, _parameters: Parameters) -> dict[str, object]:
    """The run in a page."""
    directory, run = RunDirectory(place.path), runs.series(place)
    with run.lock:
        starts = list(run.starts)[-_MOST_STARTS:]
        evaluations = _evaluations(run)
    result = directory.finished_result()
    return asdict(runs.row(place)) | {
        "started_events": [_start(event) for event in starts],
        "environment": _environment(starts),
        "run_file": _masked(_text(directory.run_file)),
        "lineage": [
            asdict(origin) | {"text": str(origin)}
            for origin in read_lineage(read_small_json(directory.record))
        ],
        "result": None if result is None else result.to_json(),
        "evaluations": evaluations,
        "curves": run.curve_names(),
        "has": has(place),
        "serving": _serving(directory),
        "torn_lines": run.torn_lines,
        "dropped_lines": run.dropped_lines,
        "problem": run.problem,
    }


def _serving(directory: RunDirectory) -> list[dict[str, object]]:
    """What serves the run's weights, as the servers themselves say."""
    now = time.time()
    return [asdict(note) | {"silent": note.silent(now)} for note in read_serving(directory)]


def has(place: Place) -> dict[str, bool]:
    """Which views of a run have something to show."""
    directory = RunDirectory(place.path)
    return {
        "fleet": path_in(place.path).is_file(),
        "ranks": directory.ranks.is_file(),
        "logs": _filled(directory.logs),
        "profiles": _filled(directory.profiles),
        "checkpoints": _filled(directory.checkpoints),
    }


def _filled(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except OSError:
        return False


def _start(event: Event) -> dict[str, object]:
    body = event.body
    assert isinstance(body, RunStarted)
    return {"t": event.t, "attempt": event.attempt} | {
        name: value for name, value in asdict(body).items() if name != "environment"
    }


def _environment(starts: list[Event]) -> dict[str, object]:
    """What the newest start has recorded of code, versions and machine."""
    body = starts[-1].body if starts else None
    return dict(body.environment) if isinstance(body, RunStarted) else {}


def _evaluations(run: RunSeries) -> list[dict[str, object]]:
    found: list[dict[str, object]] = [
        {
            "step": body.step,
            "t": event.t,
            "loss": body.loss,
            "bits_per_byte": body.bits_per_byte,
            "sources": body.sources,
        }
        for event, body in run.evaluations
    ]
    return found[-_MOST_EVALUATIONS:]


def _masked(text: str) -> str:
    """Return the text of a run file without secrets."""
    try:
        table: dict[str, object] = tomllib.loads(text)
    except (ValueError, RecursionError):
        table = {}
    return run_file_mask(table)(text)


def _text(path: Path) -> str:
    """A file's text; what is longer than any run file is cut off. Empty if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(_MOST_RUN_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""
