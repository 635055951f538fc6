"""The fleet of the last start of a submitted run; the ages of the files exclude the fleet of an earlier
start.
"""

from __future__ import annotations

from pathlib import Path

from phalanx.fleet.control.fleet_file import FleetFile, FleetFileError, path_in, read_fleet_file
from phalanx.launch.engines.engine import SubmittedRun, log_of
from phalanx.launch.engines.order import FOLDER


def formed_fleet(run: SubmittedRun) -> FleetFile | None:
    """Return the fleet of a run's last start; ``None`` if that start has formed no fleet yet."""
    # A start writes this file first, and the fleet never changes it: an older fleet file is of an earlier
    # start.
    mark = run.run_dir / FOLDER / run.start_mark
    try:
        fleet = read_fleet_file(run.run_dir)
        return fleet if path_in(run.run_dir).stat().st_mtime > mark.stat().st_mtime else None
    except (FleetFileError, OSError):
        return None


def leading_log(run: SubmittedRun) -> Path:
    """Return the log of a job, or of the leading host: on hosts without a scheduler another may have succeeded the first."""
    first, fleet = log_of(run), formed_fleet(run) if run.has_hosts else None
    log = first if fleet is None else first.with_name(f"{fleet.leader}.log")
    return log if log.exists() else first
