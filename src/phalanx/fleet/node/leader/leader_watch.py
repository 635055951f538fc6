"""An agent's watch over who leads: where the coordinator may be, and what to do when none says that it leads."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import NamedTuple

from phalanx.fleet.control.coordinator_link import CoordinatorLink
from phalanx.fleet.control.credentials import Credentials
from phalanx.fleet.control.fleet_file import FleetFileError, read_fleet_file
from phalanx.fleet.control.succession.candidate import candidate_addresses
from phalanx.fleet.node.agent_args import AgentArgs
from phalanx.fleet.node.leader.successor import Successor
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.identity import fencing_token, identity

# Whether a run was started again, or its directory belongs to another run now.
#
# A coordinator's word is not enough: that one may be of an earlier start, or no coordinator. The run directory decides.


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


def coordinator_addresses(args: AgentArgs) -> list[str]:
    """The address that this agent was given, and the one in fleet.json: a coordinator whose port was taken writes another one.

    Before them those of candidates, which stand if the coordinator is lost: to find that out takes long at its own address.
    """
    addresses = [*_candidates(args), args.coordinator]
    with suppress(FleetFileError):
        addresses.append(read_fleet_file(args.run_dir).coordinator)
    return list(dict.fromkeys(filter(None, addresses)))


async def look_for_leader(
    args: AgentArgs, link: CoordinatorLink, successor: Successor, patience_s: float
) -> str:
    """Looks whether a coordinator leads, and takes part in the succession if none does. Returns why the run is over, if it is.

    Args:
        args: The agent's.
        link: Its connection, which is given up if nobody leads at its other end.
        successor: The candidate of this node.
        patience_s: ``fleet.succession_s``.
    """
    now_s, led_s = time.monotonic(), link.led_s
    led = led_s is not None and (not patience_s or now_s - led_s <= patience_s)
    if led_s is not None and not led:
        # The stream is open, and whoever is there decides nothing, or its machine is gone.
        successor.alone_since_s = successor.alone_since_s or led_s
        link.drop(f"it has not said for {patience_s:g} s that it leads")
    elif not led and link.attached and link.address not in (found := _candidates(args)) and found:
        link.drop("a candidate stands to succeed it")
    return await successor.look(led=led, now_s=now_s)


def _candidates(args: AgentArgs) -> list[str]:
    return candidate_addresses(RunDirectory(args.run_dir), args.attempt, args.node)
