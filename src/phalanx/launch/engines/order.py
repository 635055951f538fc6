"""What an engine is asked to start: a run, its files, the number of nodes, and what the run file says of the cluster.

The files of a start lie in ``RUN_DIR/launch``: ``run.toml`` (the run file with all overrides, frozen, so that what is queued is not what
somebody edits meanwhile), what was given to the engine, ``submitted.json``, the job's log, and a nonce by which every node shows that it
sees this folder and not one of its own of the same name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from phalanx.launch.engines.ports import USUAL_RANGE
from phalanx.launch.engines.tools import EngineError
from phalanx.run.spec import LaunchSpec

FOLDER = "launch"
"""The folder's name in a run directory."""
LEAD_EXIT = "lead-exit"
"""The file there with the exit code of the node that leads, once it has ended."""
_SPAN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([dhms])")
_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_SLURM_TIME = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?")


@dataclass(frozen=True)
class LaunchOrder:
    """A run to start on a cluster."""

    name: str
    run_dir: Path
    """Absolute, and the same on every node."""
    working_dir: Path
    """Where relative paths of the run file begin."""
    nodes: int
    """Nodes that hold ranks."""
    spares: int
    gpus_per_node: int
    """GPUs to ask for on each node; 0 for none."""
    port: int
    """TCP port of the coordinator; 0 for one that follows from the job."""
    python: str
    """The interpreter that runs Phalanx on the nodes."""
    launch: LaunchSpec
    taken_from: Path | None = None
    """The run that has given nodes for this one, and gets as many again at its end."""
    taken: int = 0
    """Number of those nodes."""
    connections: tuple[int, int] = USUAL_RANGE
    """The first and last port that the kernel gives to outgoing connections, which no coordinator should need."""
    restart_pauses_s: tuple[int, ...] = (1, 5, 15, 60, 120)
    """Pauses before the restarts of a killed agent on a host without a scheduler; one that is killed once more stays dead."""

    @property
    def folder(self) -> Path:
        """The folder of this start's files."""
        return self.run_dir / FOLDER

    @property
    def run_file(self) -> Path:
        """The frozen run file."""
        return self.folder / "run.toml"

    @property
    def nonce(self) -> Path:
        """The file that every node must see."""
        return self.folder / "nonce"

    @property
    def given(self) -> Path:
        """The verdict on the nodes that the engine gave."""
        return self.folder / "given"

    @property
    def all_nodes(self) -> int:
        """Nodes to ask for."""
        return self.nodes + self.spares

    @property
    def program(self) -> list[str]:
        """The words that run ``phalanx`` on a node."""
        return [self.python, "-m", "phalanx"]


def seconds_of(text: str) -> float:
    """Seconds of a time limit: 2d, 12h, 1h30m, or Slurm's MINUTES, HH:MM:SS and D-HH:MM:SS. Raises ``EngineError``."""
    spans = _SPAN.findall(text)
    if spans and not _SPAN.sub("", text).strip():
        return sum(float(number) * _SECONDS[unit] for number, unit in spans)
    match = _SLURM_TIME.fullmatch(text.strip())
    if match is None:
        raise EngineError(f"launch.time_limit: {text!r} is no time: write 2d, 12h, 90m or D-HH:MM:SS")
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:  # D-HH, D-HH:MM, D-HH:MM:SS
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # MINUTES, MINUTES:SECONDS
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return int(days or 0) * 86_400 + hours * 3_600 + minutes * 60 + seconds


def slurm_time(seconds: float) -> str:
    """A time as Slurm writes it: D-HH:MM:SS."""
    whole = int(seconds)
    return f"{whole // 86_400}-{whole % 86_400 // 3_600:02d}:{whole % 3_600 // 60:02d}:{whole % 60:02d}"
