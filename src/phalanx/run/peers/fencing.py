"""The fencing token of a fleet's processes: which start of a run they belong to, and the run file that it resolved.

Agents outlive a coordinator on another machine, so a run that is started again can find processes of its last start, with another
attempt number and perhaps other settings of the fleet. A fencing token (M. Kleppmann, "How to do distributed locking", 2016) tells
them apart: it rises with each start, it is journaled, and both sides of every control connection derive the keys of their messages from
it (``phalanx.fleet.control.transport``). So a coordinator and agents of different starts cannot say a word to each other.

``phalanx.run.identity`` tells runs apart, and leaves out what belongs to the fleet. This leaves out nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from phalanx.run.read import to_table
from phalanx.run.spec import RunSpec


@dataclass(frozen=True)
class FencingToken:
    """One start of a run."""

    attempt: int
    """The number of the start; its first epoch writes events and checkpoints under it."""
    run_file_sha256: str
    """SHA-256 (hex) over every field of the resolved run file, those of the fleet included."""

    def __str__(self) -> str:
        return f"attempt {self.attempt} with run file {self.run_file_sha256[:12]}"


def fencing_token(spec: RunSpec, attempt: int) -> FencingToken:
    """The token of the start ``attempt`` of the resolved run ``spec``."""
    canonical = json.dumps(to_table(spec), sort_keys=True, separators=(",", ":"))
    return FencingToken(attempt, hashlib.sha256(canonical.encode()).hexdigest())
