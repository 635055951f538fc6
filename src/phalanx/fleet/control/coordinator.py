"""The coordinator: the shell around the pure core, with sockets, a clock and a write-ahead journal.

It queues messages of agents and operators, writes them to the journal and passes them to
``phalanx.fleet.core.decide.step``. It sends the resulting commands once the journal is on disk, so no node
acts on a decision that a restarted coordinator would not have. It keeps no other essential state, so ``kill
-9`` costs nothing. The next coordinator replays the journal, agents reconnect and describe themselves, and
training continues meanwhile. Heartbeats are collected and passed to the core once per tick, so 12,500 nodes
cost one line of the journal.

After each turn, and before anything is sent, the core's invariants are checked. If one is broken, the turn's
commands are dropped and the state is rebuilt from the nodes' reports (``phalanx.fleet.core.invariants``).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from phalanx.fleet.control import turn
from phalanx.fleet.control.coordinator_link import answers
from phalanx.fleet.control.credentials import Credentials, credentials_of
from phalanx.fleet.control.fleet_file import FleetFile, FleetFileError, fleet_file, read_fleet_file
from phalanx.fleet.control.inquiry import FailureInquiry, Inquiry
from phalanx.fleet.control.publisher import FleetSampler, Publisher
from phalanx.fleet.control.succession.journal import RENEW_BYTES, RETRY_S, PatientJournal
from phalanx.fleet.control.succession.reign import (
    HURRY_SIGNAL,
    CoordinatorArgs,
    Leadership,
    Reign,
    SupersededError,
    exit_code_of,
    forget_candidates,
    only_coordinator,
    reign_again,
    report_contradiction,
)
from phalanx.fleet.control.transport import AgentLink, FleetServer, TransportError, raise_descriptor_limit
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.decide import initial_state
from phalanx.fleet.core.epochs.epoch_plan import deliveries
from phalanx.fleet.core.invariants import JournalError, batch_line, first_line, reason, resync
from phalanx.fleet.core.settings import settings_of
from phalanx.fleet.core.state import FleetPhase, Incident
from phalanx.hardware.local.network import join_address, split_address
from phalanx.observe.logs.capture import capture_output
from phalanx.observe.metrics.endpoint import Endpoint
from phalanx.observe.metrics.exporter import RunSampler
from phalanx.process.arguments import parsed
from phalanx.process.child import die_with_parent
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.spec import RunSpec
from phalanx.wire.messages import token_name

# Address of a coordinator: a restarted one listens where the last one of this attempt did, so that agents
# find it.


async def listen(
    server: FleetServer, args: CoordinatorArgs, log: Callable[[str], None], *, restarted: bool
) -> int:
    """Listen, and return the port. If ``restarted``, prefer the port of the last coordinator of this attempt.

    If that port is taken by another program, log it and use a free one; agents read it from fleet.json. Raises
    ``TransportError`` if it cannot listen, or another coordinator of this run listens there.
    """
    host, port = args.listening_on, _port(args, restarted=restarted)
    try:
        return await server.start(host, port)
    except TransportError as error:
        if not restarted or not port:
            raise
        if await answers(join_address(args.host, port), server.credentials):
            raise TransportError(
                f"another coordinator of this run listens on {join_address(host, port)}; end it first"
            ) from error
        log(
            f"another program has taken {join_address(host, port)}; using a free port instead, see fleet.json"
        )
        return await server.start(host, 0)


def _port(args: CoordinatorArgs, *, restarted: bool) -> int:
    """Return the port from the arguments, else after a restart the one in fleet.json, else 0 (any).

    A fleet.json that cannot be read is ignored.
    """
    if restarted and not args.port:
        with suppress(FleetFileError, ValueError):
            return int(split_address(read_fleet_file(args.run_dir).coordinator)[1])
    return args.port


_LONGEST_TICK_S = 1.0
_UNSYNCED_BYTES = 1 << 20
_REST = 3.0
"""Pause after a turn, as a multiple of the core's time.

Messages accumulate meanwhile: a turn costs O(nodes), however few there are.
"""
_GOODBYE_S = 1.0


@dataclass
class Elected:
    """A won election: state that a candidate hands over to the coordinator that it becomes."""

    reign: Reign
    server: FleetServer
    port: int
    inbox: turn.Inbox
    """The events since it began to listen."""


class Coordinator:
    """The coordinator of one run, for one life of its process."""

    def __init__(
        self,
        args: CoordinatorArgs,
        spec: RunSpec,
        credentials: Credentials,
        elected: Elected | None = None,
        *,
        renew_journal_bytes: int = RENEW_BYTES,
    ) -> None:
        """Restore the state, or take over that of a candidate. Raises as ``reign_again`` does.

        Args:
            args: The arguments of its process.
            spec: The run.
            credentials: The secrets with which it admits agents and operators.
            elected: The server, events and reign that it takes over if it was a candidate.
            renew_journal_bytes: Size above which the journal is replaced by a short one.
        """
        self._args, self._spec, self._directory = args, spec, RunDirectory(args.run_dir)
        self._server = elected.server if elected else FleetServer(credentials, self)
        self._server.listener = self
        self._address, self._port_open = "", elected.port if elected else 0
        self._inbox = elected.inbox if elected else turn.Inbox()
        self._decided_in_s = 0.0
        """Processor time of the last turn's decisions."""
        self._inquiry: Inquiry | None = None
        """The inquiry into a hang that is in progress, if there is one."""
        self._rotation = turn.TokenRotation(args.run_dir, self._server, self._inbox)
        fleet = spec.fleet
        self._tick_s = min(_LONGEST_TICK_S, min(fleet.lease_s, fleet.confirm_s or fleet.lease_s) / 8)
        self._disk = turn.RunDisk(self._directory, self._tick_s, self.log)
        reign = elected.reign if elected else self._reign_again()
        self._journal = reign.journal
        self._writing = PatientJournal(reign.journal, self.log, renew_journal_bytes)
        self._lead = Leadership(reign.register, reign.claim, self._writing, fleet.succession_s)
        self._state, self._restarts, published_s = reign.restored
        self._failures = FailureInquiry(self._directory, args.attempt, fleet.workers_per_node)
        self._publisher = Publisher(
            self._directory,
            args.attempt,
            self._file,
            self.log,
            least_pause_s=self._tick_s,
            published_s=published_s,
            leads=self._lead.leads,
            on_epoch_left=lambda: self._failures.begin(self._publisher.warn),
        )
        self._endpoint = Endpoint(self._directory, spec.observe, args.attempt, "", args.host, self.log)
        self._clock_ahead_s = max(self._state.now_s, time.time()) - time.monotonic()

    def _reign_again(self) -> Reign:
        """Restore this coordinator's reign from its journal; raises as ``reign_again`` does."""
        settings = settings_of(self._spec, turn.first_step(self._spec, self._directory, self.log))
        empty = initial_state(settings, time.time(), self._server.credentials.fencing)
        return reign_again(self._args, empty, self.log)

    def _now_s(self) -> float:
        """Return Unix time that never steps back, and does not jump with the machine's clock while this
        process lives.
        """
        return time.monotonic() + self._clock_ahead_s

    # --- handlers of the server ------------------------------------------------------------------

    def on_report(self, report: m.AgentMessage) -> None:
        """Queue a report of an attached agent for the next turn; of heartbeats, only each node's last is kept.

        Flight records go to the inquiry in progress, and failures to the search for the first one.
        """
        if isinstance(report, m.Heartbeat):
            # The later heartbeat contains all of the earlier one.
            self._inbox.heartbeats[report.node] = report
            return
        if isinstance(report, m.Recorded):
            self._take_record(report)
            return
        self._failures.add(report)
        self._inbox.add(report)

    def _take_record(self, report: m.Recorded) -> None:
        """Add a flight record to the inquiry in progress, and wake the turn loop if that completes it.

        Without an inquiry the record is dropped. A refused record is logged.
        """
        if self._inquiry is None:
            return
        if trouble := self._inquiry.add(report):
            self.log(f"{report.node}: {trouble}")
        if self._inquiry.over(self._now_s()):
            self._inbox.wake.set()

    def on_disconnect(self, link: AgentLink) -> None:
        """Queue the end of an agent's stream."""
        self._inbox.add(m.Disconnected(link.node, link.incarnation))

    async def on_operation(self, operation: m.OperatorRequest) -> str:
        """Queue the event of an operator's request for the next turn, and return the answer for the operator.

        A rotation of tokens is done here. A request that is refused queues nothing.
        """
        if isinstance(operation, m.RotateTokens):
            return await self._rotation.rotate(operation.grace_s)
        text, event = turn.answer(operation, self._state, self._inbox, self._spec, self._args.node)
        if event is not None:
            self._inbox.add(event)
        return text

    def log(self, line: str) -> None:
        """Write a line into this process's log."""
        print(time.strftime("%H:%M:%S"), line, flush=True)

    # --- the loop --------------------------------------------------------------------------------

    async def run(self) -> int:
        """Run to the end of the run. Return the exit code: 0 if it finished or was stopped, 1 if it failed.

        SIGTERM saves and stops the run. Turns are repeated while the journal cannot be written. Publishes
        fleet.json and serves metrics meanwhile. Raises ``SupersededError`` if another coordinator leads the run
        now; nothing that this one decided meanwhile was sent.
        """
        port = self._port_open or await listen(
            self._server, self._args, self.log, restarted=bool(self._restarts)
        )
        self._address = join_address(self._args.host, port)
        # Before fleet.json names this process as the coordinator: a reader of the file may send the signal.
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._inbox.add, m.StopRun(never_at_once=True))
        loop.add_signal_handler(HURRY_SIGNAL, self._ask_to_end_at_once)
        await self._publisher.write_now(self._now_s())
        forget_candidates(self._directory)
        self.log(f"coordinates {self._args.run_dir} at {self._address}, start {self._restarts + 1}")
        credentials = self._server.credentials
        if (self._state.key or credentials.earlier.accepted()) and self._state.key != token_name(
            credentials.token
        ):
            # The previous coordinator was killed between the token file and its journal.
            self._inbox.add(turn.rekeyed(credentials))
        watching = asyncio.create_task(self._inbox.measure_deafness(self._tick_s))
        self._serve_metrics()
        while not self._over:
            await asyncio.sleep(min(_REST * self._decided_in_s, self._tick_s))
            # Not wait_for, which loses a cancellation that arrives with the wake
            # (https://github.com/python/cpython/issues/86296).
            with suppress(TimeoutError):
                async with asyncio.timeout(self._tick_s):
                    await self._inbox.wake.wait()
            self._inbox.wake.clear()
            try:
                await self._turn()
            except JournalError as error:
                self.log(f"{error}; no decisions until that succeeds")
                await asyncio.sleep(RETRY_S)
            except SupersededError:
                watching.cancel()
                self._endpoint.close()
                await self._server.stop()
                raise
        watching.cancel()
        await self._shut_down()
        return 1 if self._state.phase is FleetPhase.FAILED else 0

    def _serve_metrics(self) -> None:
        """Serve the fleet's and the run's metrics over HTTP until the endpoint is closed."""
        fleet = FleetSampler(lambda: self._publisher.newest, self._endpoint.run)
        self._endpoint.start(
            {"fleet": fleet.samples, "run": RunSampler(self._directory.path, self._endpoint.run).samples}
        )

    @property
    def _over(self) -> bool:
        return self._state.phase in (FleetPhase.FINISHED, FleetPhase.FAILED)

    def _ask_to_end_at_once(self) -> None:
        """Stop the run; at once if it is stopping already."""
        # A second request to stop must be recognizable, and the first may not have arrived yet.
        is_asked = self._state.stopping or self._inbox.holds(m.StopRun)
        self._inbox.add(*([m.StopRun()] if is_asked else [m.StopRun(), m.StopRun()]))

    # --- a turn ----------------------------------------------------------------------------------

    async def _turn(self) -> None:
        """Run one turn: journal the events since the last one, let the core decide, and send the commands.

        The journal is synced, and the next term claimed if due, before anything is sent. Afterwards publishes
        fleet.json and incidents, and renews a long journal. Raises ``JournalError`` and ``SupersededError``.
        """
        now_s = self._now_s()
        batch = self._journaled(now_s)
        # No await between the journal and the core: the journal holds exactly what the core has received.
        began_s = time.thread_time()
        decided = turn.decide(self._state, batch, now_s)
        self._state = decided.state
        if decided.contradiction is None:
            sending, self._inquiry = decided.sending, decided.inquiry or self._inquiry
        else:
            sending = await self._resync(decided, decided.contradiction)
        due = self._lead.is_due(self._state)
        self._decided_in_s = time.thread_time() - began_s
        if sending or self._journal.unsynced_bytes > _UNSYNCED_BYTES:
            await self._writing.synced()
        if due:
            await self._lead.claim_next_term(self._state)
        # Before any node gets a restore command.
        self._disk.set_aside(self._state, stored=bool(self._spec.checkpoint.store))
        # New agents come before any other command, and all agents now and then. Only at the end of a turn: a
        # coordinator that receives reports but cannot decide, because of its disk, does not lead.
        self._server.lead(self._lead.claim.reign, again=self._lead.is_heartbeat_due(now_s))
        for node, command in sending:
            self._server.send(node, command)
        self._server.drop_outdated(self._state.key)
        self._publisher.publish(self._state, now_s, over=self._over)
        await self._writing.renew(lambda: first_line(self._state, self._restarts))

    def _journaled(self, now_s: float) -> tuple[m.CoreEvent, ...]:
        """Write this turn's batch of events to the journal, and return it. Empties the inbox.

        If due, first looks for a successor and for committed checkpoints on disk. An inquiry that is over becomes an
        event. Raises ``SupersededError``, and ``JournalError``; the events then stay queued.
        """
        looks = now_s >= self._disk.due_s
        if looks:
            self._lead.look_for_successor()
        if self._inquiry is not None and self._inquiry.over(now_s):
            self._inbox.events.append(self._inquiry.finding())
            self._inquiry = None
        on_disk = self._look_at_disk(now_s) if looks else None
        batch = self._inbox.batch(on_disk)
        self._journal.append(batch_line(now_s, batch))
        # Only now: a batch that the journal refused is reported again.
        if on_disk is not None:
            self._disk.mark_reported(on_disk)
        self._inbox.clear()
        return batch

    def _look_at_disk(self, now_s: float) -> m.DiskHolds | None:
        """Mend damaged files, which is published, and return the committed steps if they have changed."""
        for text in self._disk.mend():
            self._publisher.publish_incident(Incident(now_s, self._state.epoch, "", text))
        return self._disk.look(now_s)

    async def _resync(
        self, decided: turn.TurnDecision, contradiction: Exception
    ) -> list[tuple[str, c.Command]]:
        """Replace a contradictory state by a rebuilt one. Return the commands that request every node's
        description.

        The journal that led to the contradiction is kept as evidence, and a new journal begins; waits until the disk
        takes it. No command that follows from the contradictory state is sent. Events behind the one that raised (a
        request to stop, a finished run) are decided next turn.
        """
        self._inbox.put_back(decided.undecided)
        evidence = report_contradiction(self._journal, contradiction, self.log)
        self._state, orders = resync(self._state, decided.before, reason(contradiction))
        self._inquiry = None
        # A replay of the old journal would lead through the contradictory state again.
        await self._writing.until_written(
            lambda: self._journal.replace_content(first_line(self._state, self._restarts), keep_as=evidence)
        )
        return list(deliveries(self._state, orders))

    def _file(self) -> FleetFile:
        """Return the content of fleet.json."""
        attached, refused = frozenset(self._server.links), self._server.refused
        run, claim = self._server.credentials.run, self._lead.claim
        return fleet_file(self._state, run, self._address, claim, attached, refused, self._restarts)

    async def _shut_down(self) -> None:
        """End the service: send every agent a Shutdown, write fleet.json, and close metrics, server and journal.

        Waits at most a second for the agents to disconnect, and half a second for queued messages.
        """
        self.log(f"the run is over: {self._state.phase}, {self._state.reason}")
        for node in list(self._server.links):
            self._server.send(node, c.Shutdown(self._state.reason))
        # While agents still disconnect: an agent that misses the message reads the end here.
        await self._publisher.write_now(self._now_s())
        deadline_s = time.monotonic() + _GOODBYE_S
        while self._server.links and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        self._endpoint.close()
        await self._server.stop()
        self._journal.close()


def run_coordinator(args: CoordinatorArgs) -> int:
    """Run the coordinator in this process to the end of the run. Return 0 if it finished or was stopped, 1 if it
    failed.

    Raises:
        RunDirectoryError: There is no run in the run directory.
        SecurityError: Token or certificates are missing.
        DescriptorLimitError: The system allows too few open files for the fleet.
        JournalError, ClaimError, TransportError: It cannot use its journal or the claims, or cannot listen.
        SupersededError: Another coordinator leads the run now.
        ValueError: No layout fits the fleet of the run file.

    Reads the resolved run file, raises the limit on open files, and locks the run for this process.
    """
    spec = read_resolved(RunDirectory(args.run_dir))
    raise_descriptor_limit(spec.fleet.nodes + spec.fleet.spares)
    credentials = credentials_of(args.run_dir, spec, args.attempt, args.certificates)
    with only_coordinator(RunDirectory(args.run_dir), args.reign):
        return asyncio.run(_coordinate(args, spec, credentials))


def main() -> int:
    """Run the coordinator as the process that a launcher starts: parse its arguments and return the exit code.

    Ignores SIGINT, and dies with its parent.
    """
    die_with_parent()
    capture_output(os.environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    args = parsed(CoordinatorArgs, "phalanx.fleet.control.coordinator")
    return exit_code_of(lambda: run_coordinator(args), args, "coordinator")


async def _coordinate(args: CoordinatorArgs, spec: RunSpec, credentials: Credentials) -> int:
    return await Coordinator(args, spec, credentials).run()


if __name__ == "__main__":
    sys.exit(main())
