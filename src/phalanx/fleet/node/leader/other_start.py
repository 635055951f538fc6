"""Whether a run was started again, or its directory belongs to another run now.

A coordinator's word is not enough: that one may be of an earlier start, or no coordinator. The run directory decides.
"""

from __future__ import annotations

from typing import NamedTuple

from phalanx.fleet.control.credentials import Credentials
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.identity import identity
from phalanx.run.peers.fencing import fencing_token


class OtherStart(NamedTuple):
    """A start of another run, or a newer one of this run."""

    attempt: int | None
    """The number of the newer start; None if it is another run."""
    reason: str


def other_start(directory: RunDirectory, own: Credentials) -> OtherStart | None:
    """The start that has taken the place of the one that ``own`` belongs to, if any has. Raises ``RunDirectoryError``."""
    spec, attempt = read_resolved(directory), directory.newest_attempt()
    if identity(spec) != own.run:
        return OtherStart(
            None,
            f"{directory.path} belongs to another run now ({identity(spec)[:12]}, not {own.run[:12]}), to which this node "
            "is of no use; start its agent again if it is to train that run",
        )
    found = fencing_token(spec, attempt)
    if attempt >= own.fencing.attempt and found != own.fencing:
        return OtherStart(attempt, f"the run was started again: from {own.fencing} on to {found}")
    return None
