"""An agent's watch over the leader: where the coordinator may be, whether the run was started again, and
succession after a loss.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx.fleet.control.coordinator_link import CoordinatorLink
from phalanx.fleet.control.credentials import Credentials
from phalanx.fleet.control.fleet_file import ClaimError, ClaimRegister, FleetFileError, read_fleet_file
from phalanx.fleet.control.succession.candidate import candidate_addresses
from phalanx.fleet.control.succession.reign import CoordinatorArgs
from phalanx.fleet.core.succession import Claim, stands_after_s
from phalanx.fleet.node.launcher import AgentArgs
from phalanx.observe.logs.child_output import ChildOutput
from phalanx.observe.logs.log_file import order_for
from phalanx.process.arguments import words_of
from phalanx.process.child import Child, describe_exit
from phalanx.process.exit_codes import EXIT_CANNOT_START, EXIT_NOT_ELECTED, EXIT_SUPERSEDED
from phalanx.process.restarts import Restarts
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.identity import fencing_token, identity
from phalanx.run.spec import ObserveSpec

# Succession of a lost coordinator: an agent that has been without one for too long starts a candidate. The
# candidate is a process of its own (``phalanx.fleet.control.succession.candidate``). If elected it becomes
# the coordinator, and is restarted if it then dies. The newest claim in the run directory decides the order
# of candidates. The agent's own work continues meanwhile.

_FINE = (0, EXIT_NOT_ELECTED, EXIT_SUPERSEDED)
_GOODBYE_S = 20.0
_LOOK_S = 5.0
"""After this time without a coordinator, the agent checks whether the run is over."""


@dataclass
class Successor:
    """The candidate of one node, or the coordinator that it has become."""

    args: AgentArgs
    """The agent's."""
    patience_s: float
    """``fleet.succession_s``."""
    observe: ObserveSpec
    log: Callable[[str], None]
    alone_since_s: float | None = None
    """Monotonic time since which the agent has had no coordinator."""
    _claim: Claim | None = None
    """The newest claim at the last check."""
    _child: Child | None = None
    _restarts: Restarts = field(default_factory=Restarts)
    _due_s: float = 0.0
    """Time at which a coordinator that died here is restarted; 0 for none."""
    _complaint: str = ""

    def __post_init__(self) -> None:
        self._may_lead = self.args.may_lead

    async def look(self, *, led: bool, now_s: float) -> str:
        """Start a candidate if it is this node's turn, and restart a coordinator that has died here when due.

        Return why the run is over if the newest claim states its end, else "". ``led``: the agent is attached to a
        coordinator that leads. ``now_s`` is the monotonic clock.
        """
        if led:
            self.alone_since_s = None
        elif self.alone_since_s is None:
            self.alone_since_s = now_s
        if self._child is not None:
            if self._child.exit_code() is not None:
                code = await asyncio.to_thread(self._child.end, _FINE)
                self._has_ended(code, now_s)
            return ""
        if self._due_s:
            if now_s >= self._due_s:
                self._start()
            return ""
        alone_since_s = self.alone_since_s
        if alone_since_s is None or now_s - alone_since_s < min(_LOOK_S, self.patience_s or _LOOK_S):
            return ""
        last_claim, claim = self._claim, await asyncio.to_thread(self._newest)
        if claim is None:
            return ""
        if claim.ended is not None:
            return claim.reason or f"the run is {claim.ended}"
        if last_claim is not None and last_claim.term != claim.term:
            self.alone_since_s = alone_since_s = now_s  # The maker of that claim leads, or did a moment ago.
        waits_s = stands_after_s(claim, self.args.node, self.patience_s)
        if waits_s is not None and now_s - alone_since_s >= waits_s and self._may_lead:
            self._start()
        return ""

    def _newest(self) -> Claim | None:
        """Return the newest claim.

        It is read only if its term is new, since every agent of a large fleet may look. None if there is none, or it
        cannot be read, which is logged once.
        """
        register, last_claim = ClaimRegister(RunDirectory(self.args.run_dir), self.args.attempt), self._claim
        try:
            if last_claim is None or register.newest_term() != last_claim.term:
                self._claim = register.newest()
            return self._claim
        except (ClaimError, OSError) as error:
            if str(error) != self._complaint:
                self.log(str(error))
            self._complaint = str(error)
            return None

    def _start(self) -> None:
        """Start a candidate for the newest claim as a child process; a failure is logged and counts as its death."""
        args, self._due_s = self.args, 0.0
        name = f"coordinator-{args.node}"
        path = RunDirectory(args.run_dir).named_log(args.attempt, name)
        self.log(f"no coordinator: this node is a candidate; its log is {path}")
        try:
            output = ChildOutput(
                order_for(path, name, args.attempt, self.observe, args.node), os.environ, self.log
            )
            candidate = CoordinatorArgs(
                args.run_dir,
                args.attempt,
                args.host,
                node=args.node,
                listen=args.listening_on,
                certificates=args.certificates,
                term=self._claim.term if self._claim else 0,
            )
            program = "phalanx.fleet.control.succession.candidate"
            command = [sys.executable, "-m", program, *words_of(candidate)]
            # In the agent's group: a kill of the group kills the node.
            self._child = Child.start(command, output=output, own_session=False, parent="its agent")
        except OSError as error:
            self.log(f"the candidate cannot be started: {error}")
            self._has_ended(1, time.monotonic())

    def _has_ended(self, code: int, now_s: float) -> None:
        """Handle the end of the process with exit ``code``.

        One that died is restarted after a pause, but not after ten deaths in a row. After a candidate's regular
        end, the node waits for its turn again; after EXIT_CANNOT_START it never stands again.
        """
        self._child = None
        self.alone_since_s = None if self.alone_since_s is None else now_s
        if code == EXIT_CANNOT_START:
            self.log("this node cannot lead: see the log of its candidate")
            self._may_lead = False
        elif code not in _FINE:
            pause_s = self._restarts.after_death()
            self.log(f"the candidate, or the coordinator that it had become, {describe_exit(code)}")
            self._due_s = 0.0 if pause_s is None else now_s + pause_s

    async def end(self, *, at_once: bool) -> None:
        """End the process, if any. Unless ``at_once``, first wait at most 20 s for it: it may notify the other
        nodes.
        """
        child, self._child = self._child, None
        if child is None:
            return
        if not at_once:
            try:
                async with asyncio.timeout(_GOODBYE_S):
                    await child.wait_in_loop()
            except TimeoutError:
                self.log("the coordinator on this node does not end: killed")
        await asyncio.to_thread(child.end, _FINE)


# Detects whether a run was started again, or its directory belongs to another run now. A coordinator's
# message is not enough: it may be of an earlier start, or not a coordinator. The run directory decides.


class OtherStart(NamedTuple):
    """A start of another run, or a newer one of this run."""

    attempt: int | None
    """The number of the newer start; None if it is another run."""
    reason: str


def other_start(directory: RunDirectory, own: Credentials) -> OtherStart | None:
    """Return the start that has replaced that of ``own``, or None.

    ``attempt`` is None if the directory belongs to another run. Raises ``RunDirectoryError``.
    """
    spec, attempt = read_resolved(directory), directory.newest_attempt()
    if identity(spec) != own.run:
        return OtherStart(
            None,
            f"{directory.path} belongs to another run now ({identity(spec)[:12]}, not {own.run[:12]}), which this node "
            "cannot join; start its agent again to train that run",
        )
    newest = fencing_token(spec, attempt)
    if attempt >= own.fencing.attempt and newest != own.fencing:
        return OtherStart(attempt, f"the run was started again: from {own.fencing} on to {newest}")
    return None


# Addresses at which a coordinator may be, and the search for one that leads.


def coordinator_addresses(args: AgentArgs) -> list[str]:
    """Return the addresses to dial, each once: candidates', the one given to this agent, and that in fleet.json.

    Candidates come first: they stand if the coordinator is lost, and detecting that takes long. An unreadable
    fleet.json is left out.
    """
    addresses = [*_candidates(args), args.coordinator]
    with suppress(FleetFileError):
        addresses.append(read_fleet_file(args.run_dir).coordinator)
    return list(dict.fromkeys(filter(None, addresses)))


async def look_for_leader(
    args: AgentArgs, link: CoordinatorLink, successor: Successor, patience_s: float
) -> str:
    """Check whether a coordinator leads, and take part in the succession if none does. Return why the run is over,
    or "".

    Drops ``link`` if its peer has sent no heartbeat for ``patience_s``, or does not lead while a candidate stands
    elsewhere. With ``patience_s`` 0 no candidate is started; the end of the run is still looked for.
    """
    now_s, led_s = time.monotonic(), link.led_s
    led = led_s is not None and (not patience_s or now_s - led_s <= patience_s)
    if led_s is not None and not led:
        # The stream is open, but its peer decides nothing, or that machine is lost.
        successor.alone_since_s = successor.alone_since_s or led_s
        link.drop(f"no leader heartbeat for {patience_s:g} s")
    elif not led and link.attached and link.address not in (candidates := _candidates(args)) and candidates:
        link.drop("a candidate for its succession is running")
    return await successor.look(led=led, now_s=now_s)


def _candidates(args: AgentArgs) -> list[str]:
    return candidate_addresses(RunDirectory(args.run_dir), args.attempt, args.node)
