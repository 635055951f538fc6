"""The options of ``phalanx logs``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from phalanx.command.options import Argument, AsJson, Option
from phalanx.run.fields import NOT_NEGATIVE


@dataclass(frozen=True, kw_only=True)
class LogsOptions:
    run_dir: Annotated[Path, Argument()]
    ranks: Annotated[tuple[str, ...], Option("--rank", metavar="N|N-M")] = ()
    """Only these ranks; may be given again."""
    nodes: Annotated[tuple[str, ...], Option("--node")] = ()
    """Only this node; may be given again."""
    level: Literal["debug", "info", "warning", "error"] | None = None
    """Only lines as serious as this, or more."""
    since: Annotated[str | None, Option(metavar="AGO|TIME")] = None
    """Only later lines: 90s, 10m, 2h, 1d ago, or an ISO time."""
    until: Annotated[str | None, Option(metavar="AGO|TIME")] = None
    """Only earlier lines."""
    grep: Annotated[str | None, Option(metavar="REGEX")] = None
    """Only lines in which this is found, in upper or lower case."""
    attempt: Annotated[int | None, NOT_NEGATIVE] = None
    """Only of this start of the run."""
    grouped: bool = False
    """Equal lines of many ranks and nodes are one line with a count."""
    as_json: AsJson = False
    """Lines of JSON, for programs."""
    follow: Annotated[bool, Option("--follow", "-f")] = False
    """Go on until the run is complete, or the job has ended."""
    last: Annotated[int, NOT_NEGATIVE] = 50
    """Begin with so many lines; 0: all."""
    job: Annotated[bool | None, Option("--job/--lines")] = None
    """The log that the job has printed, or the lines of its processes. By default the job's, of a submitted run for which no other option is given."""
    engine: Annotated[Literal["kubernetes"] | None, Option("--on")] = None
    """RUN_DIR is the name of a job there, as phalanx submit has printed it."""
    namespace: str = ""
    """With --on kubernetes: not that of kubectl's context."""
    index: Annotated[int | None, NOT_NEGATIVE] = None
    """With --on kubernetes: the pod of this index; by default that which leads."""
