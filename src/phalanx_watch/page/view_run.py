"""Views of the list of runs (``/api/runs``, and ``/api/settings``, in which settings these differ) and of one run: ``/api/run/ID`` and
below it ``/why``, ``/checkpoints`` and ``/logs``.

A filter of the list has the conditions of ``phalanx runs list --where``, with "and" between them.
The summary of a run has its row, its starts, its origin, and the views that have content. Checkpoints are described from
their indexes; no tensor is read. Log lines are merged by time, filtered, and grouped if many processes log the same
line.
"""

from __future__ import annotations

import os
import re
import time
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from msgspec import UNSET, structs, to_builtins

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.format.manifest import Index, decode_index
from phalanx.checkpoint.tiers.store_standing import store_standing
from phalanx.fleet.control.fleet_file import path_in
from phalanx.observe.events import Event, RunStarted
from phalanx.observe.logs import read_lines
from phalanx.observe.logs.line import LEVELS, what_happened
from phalanx.observe.logs.masking import run_file_mask
from phalanx.observe.record.notes import read_serving
from phalanx.observe.sinks import Setting, hyperparameters
from phalanx.run.directory.files import files_below, open_regular
from phalanx.run.directory.paths import CHECKPOINT_INDEX, RunDirectory, read_small_json, step_folder
from phalanx.run.identity import all_fields, read_lineage
from phalanx.run.spec import RunSpec
from phalanx_watch.page.http import PageRequestError, Parameters
from phalanx_watch.page.runs import MOST_RUNS, PageRuns, RunPlace
from phalanx_watch.runs.index import RunRow, SelectionError, read_conditions, selected
from phalanx_watch.series.run_series import RunSeries
from phalanx_watch.why.reasons import reasons

_MOST_RUN_FILE_BYTES = 1 << 20
_MOST_STARTS = 500
_MOST_EVALUATIONS = 2000
_MOST_OF_PROMPT = 1000
"""Characters of a prompt that are shown."""
_MOST_TEXTS = 50
"""Newest steps of each sample."""


def summary(runs: PageRuns, place: RunPlace, _parameters: Parameters) -> dict[str, object]:
    """Return the run's row with its starts, environment, masked run file, lineage, result, evaluations, and what else there is of it."""
    directory, run = RunDirectory(place.path), runs.series(place)
    with run.lock:
        starts = list(run.starts)[-_MOST_STARTS:]
        evaluations = _evaluations(run)
        machines = run.machines
    result = directory.finished_result()
    now = time.time()
    body = starts[-1].body if starts else None
    text = _text(directory.run_file)
    try:
        table: dict[str, object] = tomllib.loads(text)
    except (ValueError, RecursionError):
        table = {}
    return asdict(runs.row(place)) | {
        "started_events": [_start(event) for event in starts],
        "environment": dict(body.environment) if isinstance(body, RunStarted) else {},
        "run_file": run_file_mask(table)(text),
        "lineage": [
            asdict(origin) | {"text": str(origin)}
            for origin in read_lineage(read_small_json(directory.record))
        ],
        "result": None if result is None else result.to_json(),
        "evaluations": evaluations,
        "curves": run.curve_names(),
        "machines": None
        if machines is None
        else {"nodes": machines.nodes, "least": machines.least_node, "most": machines.most_node},
        "has": has(place) | {"samples": bool(run.samples)},
        "serving": [asdict(note) | {"silent": note.silent(now)} for note in read_serving(directory)],
        "torn_lines": run.torn_lines,
        "dropped_lines": run.dropped_lines,
        "problem": run.problem,
    }


def has(place: RunPlace) -> dict[str, bool]:
    """Return which views of a run have content, by the existence of files and entries of folders."""
    directory = RunDirectory(place.path)
    return {
        "fleet": path_in(place.path).is_file(),
        "ranks": directory.ranks.is_file(),
        "logs": _filled(directory.logs),
        "profiles": _filled(directory.profiles),
        "checkpoints": _filled(directory.checkpoints),
    }


def _filled(folder: Path) -> bool:
    """Return True if a folder has an entry."""
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except OSError:
        return False


def _start(event: Event) -> dict[str, object]:
    """Return a start of the run as plain values, without its environment."""
    body = event.body
    assert isinstance(body, RunStarted)
    return {"t": event.t, "attempt": event.attempt} | {
        name: value for name, value in asdict(body).items() if name != "environment"
    }


def _evaluations(run: RunSeries) -> list[dict[str, object]]:
    """Return the newest ``_MOST_EVALUATIONS`` evaluations, the oldest first."""
    evaluations: list[dict[str, object]] = [
        {
            "step": body.step,
            "t": event.t,
            "loss": body.loss,
            "bits_per_byte": body.bits_per_byte,
            "sources": body.sources,
        }
        for event, body in run.evaluations
    ]
    return evaluations[-_MOST_EVALUATIONS:]


def samples_view(runs: PageRuns, place: RunPlace, _parameters: Parameters) -> dict[str, object]:
    """Return the samples of a run by name, in the order of its run file, and the texts of each, the newest step
    first.

    At most ``_MOST_TEXTS`` texts a sample. A step that was evaluated again counts once, by its newest text.
    """
    run = runs.series(place)
    with run.lock:
        samples = list(run.samples)
    texts: dict[str, dict[int, dict[str, object]]] = {}
    for event, body in reversed(samples):
        own = texts.setdefault(body.sample, {})
        if len(own) < _MOST_TEXTS:
            own.setdefault(
                body.step,
                {
                    "step": body.step,
                    "t": event.t,
                    "prompt": body.prompt[:_MOST_OF_PROMPT],
                    "text": body.text,
                    "tokens": len(body.tokens),
                    "temperature": body.temperature,
                },
            )
    return {
        "samples": [{"name": name, "texts": list(texts[name].values())} for name in reversed(texts)],
    }


def _text(path: Path) -> str:
    """Return a file's text, truncated to the size of a long run file. Empty if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(_MOST_RUN_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""


def why_view(_runs: PageRuns, place: RunPlace, _parameters: Parameters) -> dict[str, object]:
    """Return the reasons, with their evidence and the next command."""
    return {"reasons": reasons(RunDirectory(place.path), time.time())}


# Checkpoints.


_MOST = 500
_MOST_INDEX_BYTES = 64 << 20
_MOST_FILES = 4096


def checkpoints_view(runs: PageRuns, place: RunPlace, _parameters: Parameters) -> dict[str, object]:
    """Return the newest ``_MOST`` committed checkpoints, the newest first, from their indexes, and the state of the
    store's copies.

    ``verified`` is false for visible damage (a damaged index, a missing or short file), and null if only a full read
    can verify it (``phalanx checkpoint verify``). A folder that cannot be read is the ``problem``.
    """
    directory = RunDirectory(place.path)
    try:
        steps = directory.committed_steps()
    except OSError as error:
        return {
            "checkpoints": [],
            "left_out": 0,
            "store": None,
            "problem": f"{directory.checkpoints}: {error.strerror}",
        }
    spec = runs.spec(place)
    standing = None if spec is None else store_standing(spec, directory)
    copied = standing.newest if standing else None
    shown = steps[::-1][:_MOST]
    return {
        "checkpoints": [
            _described(directory.checkpoints, step, copied, standing.url if standing else "")
            for step in shown
        ],
        "left_out": len(steps) - len(shown),
        "store": None if standing is None else asdict(standing) | {"text": str(standing)},
        "verify": f"phalanx checkpoint verify {place.path}",
        "problem": "",
    }


def _described(root: Path, step: int, copied: int | None, url: str) -> dict[str, object]:
    """Return the row of a checkpoint: size, time, ranks, hash, where it is, and its visible damage.

    It is in the store at ``url`` if it is the step ``copied``. An unreadable index is the ``problem``, and its facts
    are None.
    """
    folder = step_folder(root, step)
    row: dict[str, object] = {
        "step": step,
        "path": str(folder),
        "where": ["disk", *([url] if copied == step else [])],
    }
    try:
        index, saved = _index(folder)
        problem = _shortfall(folder, index)
    except (CheckpointError, OSError) as error:
        return row | {
            "size_bytes": None,
            "saved": None,
            "ranks": None,
            "weights_sha256": None,
            "verified": False,
            "restorable": False,
            "problem": str(error)[:500],
        }
    return row | {
        "size_bytes": sum(ref.data_bytes for ref in index.catalogs),
        "saved": saved,
        "ranks": index.world_size,
        "weights_sha256": index.weights_sha256,
        "verified": False if problem else None,
        "restorable": not problem,
        "problem": problem,
    }


def _index(folder: Path) -> tuple[Index, float]:
    """Return the index of a checkpoint and the time at which it was written. Raises ``CheckpointError``, ``OSError``."""
    path = folder / CHECKPOINT_INDEX
    with open_regular(path) as file:
        saved = os.fstat(file.fileno()).st_mtime
        return decode_index(file.read(_MOST_INDEX_BYTES), str(path)), saved


def _shortfall(folder: Path, index: Index) -> str:
    """Return what is missing of a checkpoint, by file names and sizes; empty if nothing is, or if there are too many files."""
    for ref in index.catalogs:
        if not (folder / ref.file).is_file():
            return f"{folder / ref.file} is missing"
    if index.world_size > _MOST_FILES:
        return ""
    size = sum(path.stat().st_size for path in files_below(folder) if path.suffix == ".safetensors")
    expected = sum(ref.data_bytes for ref in index.catalogs)
    return (
        ""
        if size >= expected
        else f"its files hold {size:,} bytes of {expected:,}: some are missing or cut off"
    )


# Logs.


_MOST_LINES = 20_000
_MOST_RANK = 10_000_000
_LONGEST_TEXT = 20_000
_MOST_FOLLOWERS = 20


def logs_view(_runs: PageRuns, place: RunPlace, parameters: Parameters) -> dict[str, object]:
    """Return the newest ``last`` lines that pass the filters, oldest first, and the first failure, if any.

    With ``grouped``, lines that are alike are one with a count. ``more`` is True if older ones pass too.
    """
    directory = RunDirectory(place.path)
    last = parameters.integer("last", 500, 1, _MOST_LINES)
    lines = read_lines.read_lines(directory, query_of(parameters), last + 1)
    shown = lines[-last:]
    failure = read_lines.first_logged_failure(directory)
    return {
        "lines": [
            _line_facts(item.example)
            | {"count": item.count, "first": item.first, "last": item.last, "place": item.place}
            for item in read_lines.grouped(shown)
        ]
        if parameters.text("grouped") == "1"
        else [_line(item) for item in shown],
        "more": len(lines) > last,
        "first_failure": None
        if failure is None
        else _line(failure.line)
        | {
            "what": what_happened(failure.line.text)[:_LONGEST_TEXT],
            "recovered_step": read_lines.recovered_step(directory, failure.line),
            "evidence": list(failure.evidence),
            "followers": [_line(item) for item in failure.followers[:_MOST_FOLLOWERS]],
        },
    }


def query_of(parameters: Parameters) -> read_lines.LogQuery:
    """Return the log query of a request. Text is matched literally, because a regular expression could take forever.

    Raises ``PageRequestError`` for a rank, level or time that is none.
    """
    ranks = map(_rank, parameters.names("rank", most=1000))
    level = parameters.choice("level", LEVELS)
    return read_lines.LogQuery(
        ranks=tuple(range(rank, rank + 1) for rank in ranks),
        nodes=frozenset(parameters.names("node", most=1000)),
        level=level,
        since=parameters.number("since"),
        until=parameters.number("until"),
        grep=re.escape(parameters.text("grep", most=500)),
    )


def _rank(word: str) -> int:
    """Parse a rank of at most ``_MOST_RANK``. Raises ``PageRequestError``."""
    if not word.isdecimal() or len(word) > 9 or int(word) > _MOST_RANK:
        raise PageRequestError(f"rank={word[:50]!r}: give the numbers of ranks, with commas between them")
    return int(word)


def _line(line: read_lines.LogLine) -> dict[str, object]:
    """Return a log line as a group of one."""
    where = ", ".join(word for word in (line.process, line.node or "") if word)
    return _line_facts(line) | {"count": 1, "first": line.t, "last": line.t, "place": where}


def _line_facts(line: read_lines.LogLine) -> dict[str, object]:
    """Return a log line as plain values, with a long text cut."""
    text = line.text if len(line.text) <= _LONGEST_TEXT else f"{line.text[:_LONGEST_TEXT]} ..."
    shortened = structs.replace(line, text=text, goes_on=UNSET)
    facts: dict[str, object] = to_builtins(shortened)
    return facts


# The list of runs.


_MOST_COMPARED = 500
"""Runs whose run files are read for one view, the newest ones."""
_MOST_NAMES = 64
_NO_SETTING = ("name", "run_dir")
"""Fields that have columns of their own in a list."""
_OWNERS = ("run", "layout", "fleet")


def runs_view(runs: PageRuns, parameters: Parameters) -> dict[str, object]:
    """Return the rows of the runs that the filter ``where`` selects, and the number of all."""
    rows, total = _rows(runs, parameters)
    return {
        "folders": [str(folder) for folder in runs.folders],
        "runs": [asdict(row) for row in rows],
        "total": total,
    }


def settings_view(runs: PageRuns, parameters: Parameters) -> dict[str, object]:
    """Return the settings that differ between the newest runs of the filter, and the values of these and of ``names``.

    A run whose run file cannot be read has the value None, and differs from no other.
    ``differ`` lists the settings that belong to the run first, lists after single values. ``all`` lists the others that
    there are. ``values`` has only the first ``_MOST_NAMES`` of ``differ``; ``left_out`` counts the older runs that were
    not compared.
    """
    rows, _ = _rows(runs, parameters)
    compared = sorted(rows, key=lambda row: row.updated or 0.0, reverse=True)[:_MOST_COMPARED]
    tables = {row.id: _settings(Path(row.path)) for row in compared}
    paths = dict.fromkeys(path for table in tables.values() for path in table if path not in _NO_SETTING)
    values = {path: {run: table.get(path) for run, table in tables.items()} for path in paths}
    readable = [run for run, table in tables.items() if table]
    differ = sorted(
        (path for path in paths if len({str(values[path][run]) for run in readable}) > 1), key=_place
    )
    shown = dict.fromkeys((*differ[:_MOST_NAMES], *parameters.names("names", most=_MOST_NAMES)))
    return {
        "differ": differ,
        "all": sorted(set(paths) - set(differ)),
        "values": {path: values[path] for path in shown if path in values},
        "left_out": len(rows) - len(compared),
    }


def _rows(runs: PageRuns, parameters: Parameters) -> tuple[list[RunRow], int]:
    """Return the runs that pass the filter ``where``, at most ``MOST_RUNS``, and the number of all runs.

    Raises ``PageRequestError`` for a malformed filter.
    """
    rows = runs.rows()
    try:
        return selected(rows, read_conditions(parameters.text("where")), ())[:MOST_RUNS], len(rows)
    except SelectionError as error:
        raise PageRequestError(f"where: {error}") from None


def _settings(run_dir: Path) -> Mapping[str, Setting]:
    """Return the settings of a run's resolved run file by path, without secrets; empty if it cannot be read. Cached until the file
    changes."""
    try:
        status = RunDirectory(run_dir).run_file.stat()
    except OSError:
        return {}
    return _settings_at(run_dir, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4 * _MOST_COMPARED)
def _settings_at(run_dir: Path, _changed_ns: int, _size: int) -> Mapping[str, Setting]:
    """Return a run's settings, cached by its run file's time and size."""
    return hyperparameters(run_dir)


@lru_cache(maxsize=1)
def _defaults() -> dict[str, tuple[object, str]]:
    """Return the default and the owner of each field, by its path."""
    return dict(all_fields(RunSpec()))


def _place(path: str) -> tuple[int, bool, str]:
    """Return the sort key of a field: owner, then single values before tuples, then path."""
    # Lists come after the settings with one value: they are too long for a column, and no axis of a sweep.
    default, owner = _defaults().get(path, (None, "run"))
    return _OWNERS.index(owner), isinstance(default, tuple), path
