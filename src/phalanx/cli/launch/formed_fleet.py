"""The fleet that the last start of a submitted run has formed, told from that of an earlier start by the ages of their files."""

from __future__ import annotations

from pathlib import Path

from phalanx.fleet.control.fleet_file import FleetFile, FleetFileError, path_in, read_fleet_file
from phalanx.launch.engines.order import FOLDER
from phalanx.launch.engines.standing import log_of
from phalanx.launch.engines.submission import Submitted


def formed_fleet(run_dir: Path, made: Submitted) -> FleetFile | None:
    """Reads the fleet file of a run's last start; ``None`` if that start has formed no fleet yet."""
    # Written as a start begins, by nothing that happens to its fleet later: an older file of a fleet is that of an earlier start.
    mark = run_dir / FOLDER / ("nonce" if made.engine == "slurm" else "job.sh")
    try:
        seen = read_fleet_file(run_dir)
        return seen if path_in(run_dir).stat().st_mtime > mark.stat().st_mtime else None
    except (FleetFileError, OSError):
        return None


def leading_log(run_dir: Path, made: Submitted) -> Path:
    """The log of a job, or of the host that leads now: on hosts without a scheduler another may have succeeded the first."""
    first = log_of(run_dir, made)
    if made.engine == "ssh" and (fleet := formed_fleet(run_dir, made)) is not None:
        log = first.with_name(f"{fleet.leader}.log")
        return log if log.exists() else first
    return first
