"""Views of all runs: ``/api/runs``, and ``/api/settings``, in which settings these runs differ.

A filter has the conditions of ``phalanx runs list --where``, with "and" between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from phalanx.observe.sinks import Setting, hyperparameters
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.identity import all_fields
from phalanx.run.spec import RunSpec
from phalanx_watch.page.http import PageRequestError, Parameters
from phalanx_watch.page.runs import MOST_RUNS, PageRuns
from phalanx_watch.runs.index import RunRow, SelectionError, read_conditions, selected

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

    ``differ`` lists the settings that belong to the run first, lists after single values. ``all`` lists the others that there are.
    """
    rows, _ = _rows(runs, parameters)
    compared = sorted(rows, key=lambda row: row.updated or 0.0, reverse=True)[:_MOST_COMPARED]
    tables = {row.id: _settings(Path(row.path)) for row in compared}
    paths = dict.fromkeys(path for table in tables.values() for path in table if path not in _NO_SETTING)
    values = {path: {run: table.get(path) for run, table in tables.items()} for path in paths}
    differ = sorted((path for path in paths if len(set(map(str, values[path].values()))) > 1), key=_place)
    shown = dict.fromkeys((*differ[:_MOST_NAMES], *parameters.names("names", most=_MOST_NAMES)))
    return {
        "differ": differ,
        "all": sorted(set(paths) - set(differ)),
        "values": {path: values[path] for path in shown if path in values},
        "left_out": len(rows) - len(compared),
    }


def _rows(runs: PageRuns, parameters: Parameters) -> tuple[list[RunRow], int]:
    """Return the runs that pass the filter ``where``, at most ``MOST_RUNS``, and the number of all. Raises ``PageRequestError``."""
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
    return hyperparameters(run_dir)


@lru_cache(maxsize=1)
def _defaults() -> dict[str, tuple[object, str]]:
    """Return the default and the owner of each field, by its path."""
    return dict(all_fields(RunSpec()))


def _place(path: str) -> tuple[int, bool, str]:
    # Lists come after the settings with one value: they are too long for a column, and no axis of a sweep.
    default, owner = _defaults().get(path, (None, "run"))
    return _OWNERS.index(owner), isinstance(default, tuple), path
