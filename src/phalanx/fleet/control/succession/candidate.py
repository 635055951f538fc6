"""A candidate: a process on a node's machine that stands to succeed a lost coordinator, and leads the fleet
if it is elected.

It listens on a free port and writes its address into ``fleet/candidates`` of the run directory, where agents
without a coordinator look. Agents that attach are its voters; it sends no orders. Once most have attached it
claims the next term, takes over the previous reign's journal, and becomes the coordinator on the same
streams. If another is quicker, or too few attach, it withdraws, and the agents look elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import urllib.parse
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from phalanx.fleet.control.coordinator import Coordinator, Elected, run_coordinator
from phalanx.fleet.control.credentials import Credentials, credentials_of
from phalanx.fleet.control.fleet_file import ClaimRegister, path_in
from phalanx.fleet.control.succession.reign import (
    FIRST_REIGN,
    CoordinatorArgs,
    candidates_in,
    exit_code_of,
    nonce,
    only_coordinator,
    succeed,
)
from phalanx.fleet.control.transport import AgentLink, FleetServer, raise_descriptor_limit
from phalanx.fleet.control.turn import Inbox
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.decide import initial_state
from phalanx.fleet.core.settings import settings_of
from phalanx.fleet.core.succession import Candidacy, Claim, succeeding
from phalanx.hardware.local.network import join_address
from phalanx.observe.logs.capture import capture_output
from phalanx.process.arguments import parsed
from phalanx.process.child import die_with_parent
from phalanx.process.exit_codes import EXIT_NOT_ELECTED
from phalanx.run.directory.files import read_small, write_atomically
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.spec import RunSpec
from phalanx.train.start.open_run import take_lock

_STANDS_FOR, _STANDS_AT_LEAST_S = 2, 30.0
"""A candidate withdraws after this multiple of ``fleet.succession_s``, or this many seconds: an agent may
need 20 s to drop the lost address.
"""
_LOOK_S, _STALE_S = 0.5, 5.0
"""Another candidate has died if its file is older than this candidate's by so many seconds."""
_DEAD_S = 120.0
_ALONE_S = 10.0
"""A candidate that has had too few voters for this long yields to a coordinator that is seen at work."""


class _Address(msgspec.Struct, frozen=True):
    """The content of a candidate's file."""

    node: str
    address: str
    attempt: int
    """The start of the run."""
    term: int
    """The newest claim when it stood."""


def _standing(directory: RunDirectory) -> list[tuple[_Address, float]]:
    """Return the registered candidates, also dead ones, each with its last sign of life (by the file system's clock).

    Unreadable files are left out.
    """
    candidates: list[tuple[_Address, float]] = []
    for path in sorted(candidates_in(directory).glob("*.json")):
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            content = msgspec.json.decode(read_small(path), type=_Address)
            candidates.append((content, path.stat().st_mtime))
    return candidates


def candidate_addresses(directory: RunDirectory, attempt: int, node: str) -> list[str]:
    """Return the addresses ("host:port") of this start's candidates; that of ``node`` comes first.

    A candidate without a sign of life for two minutes, by this machine's clock, is left out: dialing a dead
    machine takes long. Empty if the candidates' folder cannot be read.
    """
    with suppress(OSError):
        candidates = sorted(_standing(directory), key=lambda candidate: candidate[0].node != node)
        oldest_s = time.time() - _DEAD_S
        return [
            content.address for content, at_s in candidates if content.attempt == attempt and at_s > oldest_s
        ]
    return []


class Candidate:
    """One candidacy: the server, and the voters' reports so far."""

    def __init__(
        self,
        args: CoordinatorArgs,
        spec: RunSpec,
        credentials: Credentials,
        register: ClaimRegister,
        claim: Claim,
    ) -> None:
        """Set up a candidate to succeed the maker of ``claim``; nothing listens yet."""
        self._args, self._spec, self._directory = args, spec, RunDirectory(args.run_dir)
        self._register, self._candidacy = register, Candidacy(claim)
        self._server = FleetServer(credentials, self)
        self._inbox = Inbox()

    # --- handlers of the server

    def on_report(self, report: m.AgentMessage) -> None:
        """Count an agent's report as its vote, unless it finished the run, and keep the report for the coordinator.

        Flight records are dropped.
        """
        if not isinstance(report, m.RunFinished):  # The only report without its sender's name.
            self._candidacy.record_heartbeat(report.node, time.monotonic())
        if isinstance(report, m.Heartbeat):
            self._inbox.heartbeats[report.node] = report
        elif not isinstance(report, m.Recorded):
            self._inbox.add(report)

    def on_disconnect(self, link: AgentLink) -> None:
        """Keep the end of an agent's stream for the coordinator."""
        self._inbox.add(m.Disconnected(link.node, link.incarnation))

    async def on_operation(self, operation: m.OperatorRequest) -> str:  # noqa: ARG002
        """Refuse the request: nobody leads yet."""
        return "refused: the coordinator is lost, and this node is only a candidate to succeed it; try again in a moment"

    def log(self, line: str) -> None:
        """Write a line into this process's log."""
        print(time.strftime("%H:%M:%S"), line, flush=True)

    # --- the election

    async def stand_and_lead(self) -> int:
        """Stand, and if elected lock the run and coordinate it to its end; return the exit code.

        ``EXIT_NOT_ELECTED`` if it is not elected. If the run directory cannot be locked, it leads without: a lost
        machine may still have the lock. Raises ``JournalError`` if another process coordinates in this reign.
        """
        elected = await self.stand()
        if elected is None:
            return EXIT_NOT_ELECTED
        args = replace(self._args, reign=elected.reign.claim.reign)
        # If the lost machine still holds the lock, as far as the file system knows, no other process gets it
        # either.
        with suppress(RunDirectoryError, OSError):
            take_lock(self._directory.lock)
        with only_coordinator(self._directory, args.reign):
            return await Coordinator(args, self._spec, self._server.credentials, elected).run()

    async def stand(self) -> Elected | None:
        """Listen and register as a candidate until elected, or withdraw and return None.

        Withdraws after the longer of 30 s and twice ``fleet.succession_s``, for a reason of ``_yields``, or if
        another claims first. The registration is removed in any case. Once elected, makes the claim and takes
        over the state. Raises as ``FleetServer.start``, ``ClaimRegister.make`` and ``succeed`` do, and
        ``OSError`` if it cannot register.
        """
        fleet, before = self._spec.fleet, self._candidacy.claim
        port = await self._server.start(self._args.listening_on, 0)
        address = join_address(self._args.host, port)
        file = candidates_in(self._directory) / f"{urllib.parse.quote(self._args.node, safe='')}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        content = _Address(self._args.node, address, self._args.attempt, before.term)
        write_atomically(file, msgspec.json.encode(content))
        stood_s = file.stat().st_mtime
        self.log(
            f"candidate at {address} to succeed {before.node or 'the coordinator'}, reign {before.reign}"
        )
        until_s = time.monotonic() + max(_STANDS_AT_LEAST_S, _STANDS_FOR * fleet.succession_s)
        try:
            while not self._candidacy.is_elected(time.monotonic(), fleet.lease_s):
                reason = "too few nodes have come" if time.monotonic() > until_s else ""
                if reason := reason or await asyncio.to_thread(self._yields, file, stood_s):
                    await self._withdraw(reason)
                    return None
                await asyncio.sleep(_LOOK_S)
            claim = succeeding(before, self._args.node, nonce())
            if not await asyncio.to_thread(self._register.make, claim):
                await self._withdraw("another was quicker")
                return None
        finally:
            file.unlink(missing_ok=True)
        self.log(f"elected: leads in reign {claim.reign}, by claim {claim.term}")
        return await self._take_over(before, claim, port)

    def _yields(self, file: Path, stood_s: float) -> str:
        """Return why this candidate gives way, or an empty text. Also touches ``file``, its registration, as a sign
        of life.

        It yields to a later claim or start, to a live candidate earlier among the voters, or if the coordinator
        writes fleet.json again. ``stood_s`` and all times are of the file system's clock. If the directory cannot
        be read, it stays.
        """
        claim = self._candidacy.claim
        with suppress(OSError, RunDirectoryError):
            if self._register.newest_term() > claim.term:
                return "another leads"
            if self._directory.newest_attempt() > self._args.attempt:
                return "the run was started again"
            if not file.exists():
                return "a coordinator has begun to lead, and removed the candidates"
            os.utime(file)
            own_s, before = file.stat().st_mtime, claim.voters[: claim.voters.index(self._args.node)]
            for other, at_s in _standing(self._directory):
                if other.node in before and other.term == claim.term and own_s - at_s < _STALE_S:
                    return f"{other.node} is a candidate too, and comes before it"
            # A coordinator that is cut off from most nodes writes too; but then most agents have attached
            # here before this.
            if own_s - stood_s > _ALONE_S and path_in(self._args.run_dir).stat().st_mtime > stood_s:
                return "the coordinator is back, and too few nodes have come"
        return ""

    async def _withdraw(self, reason: str) -> None:
        """Log why, and stop listening."""
        self.log(f"withdraws: {reason}")
        await self._server.stop()

    async def _take_over(self, before: Claim, claim: Claim, port: int) -> Elected:
        """Restore the state for the new reign in a thread, and return it with this candidate's server and queued
        reports.

        Raises as ``succeed`` does.
        """
        empty = initial_state(settings_of(self._spec), time.time(), self._server.credentials.fencing)
        reign = await asyncio.to_thread(succeed, self._register, before, claim, empty)
        return Elected(reign, self._server, port, self._inbox)


def run_candidate(args: CoordinatorArgs) -> int:
    """Stand as a candidate in this process, and if elected lead the run to its end. Return the exit code.

    ``EXIT_NOT_ELECTED`` if it withdraws, the run has ended, or ``args.term`` is not the newest claim. A node that holds
    the newest claim already leads at once. Otherwise returns and raises as ``run_coordinator`` does.
    """
    directory = RunDirectory(args.run_dir)
    register = ClaimRegister(directory, args.attempt)
    claim = register.newest()
    if claim is None or claim.ended is not None:
        return EXIT_NOT_ELECTED
    if claim.node == args.node and claim.reign > FIRST_REIGN:
        return run_coordinator(replace(args, reign=claim.reign))
    if claim.term != args.term:
        return EXIT_NOT_ELECTED
    spec = read_resolved(directory)
    raise_descriptor_limit(spec.fleet.nodes + spec.fleet.spares)
    credentials = credentials_of(args.run_dir, spec, args.attempt, args.certificates)
    return asyncio.run(Candidate(args, spec, credentials, register, claim).stand_and_lead())


def main() -> int:
    """Run a candidate as the process that an agent starts: parse its arguments and return the exit code.

    Ignores SIGINT, and dies with its parent.
    """
    die_with_parent()
    capture_output(os.environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    args = parsed(CoordinatorArgs, "phalanx.fleet.control.succession.candidate")
    return exit_code_of(lambda: run_candidate(args), args, f"coordinator-{args.node}")


if __name__ == "__main__":
    sys.exit(main())
