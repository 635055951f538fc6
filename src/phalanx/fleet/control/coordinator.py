"""The coordinator: the shell around the pure core, with sockets, a clock and a write-ahead journal.

Messages of agents and operators are queued, written to the journal and passed to ``phalanx.fleet.core.decide.step``; the
commands that follow are sent once the journal is on disk, so that nobody is told anything that a restarted coordinator
would not know. It holds no other state of consequence, so ``kill -9`` costs nothing: the next one replays the journal,
agents reconnect and describe themselves, and training has gone on meanwhile. Heartbeats are collected and passed to the
core once per tick, so that 12,500 nodes cost one line of the journal.

After each turn, and before anything is sent, the core's invariants are checked; if one is broken, the turn's commands
are dropped and the state is rebuilt from what the nodes say (``phalanx.fleet.core.resync``).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.fleet.control.claims import ClaimError
from phalanx.fleet.control.coordinator_link import answers
from phalanx.fleet.control.coordinator_lock import only_coordinator
from phalanx.fleet.control.credentials import Credentials, credentials_of
from phalanx.fleet.control.descriptors import DescriptorLimitError, raise_descriptor_limit
from phalanx.fleet.control.distrust import record_distrust
from phalanx.fleet.control.failure_inquiry import WAIT_S, FailureInquiry
from phalanx.fleet.control.fleet_file import FleetFile, FleetFileError, fleet_file, read_fleet_file
from phalanx.fleet.control.fleet_metrics import FleetSampler
from phalanx.fleet.control.hang_inquiry import Inquiry
from phalanx.fleet.control.publisher import Publisher
from phalanx.fleet.control.reign import (
    FIRST_REIGN,
    Reign,
    SupersededError,
    forget_candidates,
    nonce,
    reign_again,
    require_leading,
)
from phalanx.fleet.control.restoration import report_contradiction
from phalanx.fleet.control.security import SecurityError, require_rotatable, rotate_token
from phalanx.fleet.control.transport import AgentLink, FleetServer, TransportError
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core import resize
from phalanx.fleet.core.decide import initial_state, step
from phalanx.fleet.core.epoch_plan import is_needed
from phalanx.fleet.core.invariants import Mark, check, mark
from phalanx.fleet.core.orders import Order, deliveries
from phalanx.fleet.core.replay import JournalError, batch_line, first_line
from phalanx.fleet.core.resync import reason, resync
from phalanx.fleet.core.settings import formation_of, settings_of
from phalanx.fleet.core.state import FleetPhase, Incident
from phalanx.fleet.core.succession import is_due, renewed
from phalanx.observe.logs.capture import capture_output
from phalanx.observe.metrics.endpoint import Endpoint
from phalanx.observe.metrics.run_samples import RunSampler
from phalanx.run.directory.directory_keeper import DirectoryKeeper
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved, step_of
from phalanx.run.spec import RunSpec
from phalanx.run.token_proof import token_name
from phalanx.train.lifecycle.ending import report_failure
from phalanx.train.lifecycle.worker import die_with_parent

_LONGEST_TICK_S = 1.0
_UNSYNCED_BYTES = 1 << 20
_RENEW_BYTES, _RENEW_AGAIN_BYTES = 64 << 20, 4 << 20
_RETRY_S = 1.0
_LEADS_PER_PATIENCE = 4
"""So many times in ``fleet.succession_s`` the coordinator says that it leads."""
_REST = 3.0
"""After a turn it rests for so many times what the core took, and meanwhile takes in more: a turn costs O(nodes), however little has come in."""
_GOODBYE_S = 1.0
HURRY_SIGNAL = signal.SIGUSR1
"""The launcher's request to end at once. To save and stop is SIGTERM, however often it comes: Slurm sends it to all processes of a job."""
EXIT_CANNOT_START = 78
"""The exit code of a coordinator that another start would not help: no token, no layout, too few open files (``EX_CONFIG``)."""
EXIT_SUPERSEDED = 79
"""The exit code of a coordinator that found that another one leads the run now."""


@dataclass(frozen=True)
class CoordinatorArgs:
    """The arguments with which a coordinator is started."""

    run_dir: Path
    attempt: int
    host: str
    """The host on which it listens and agents find it."""
    port: int
    node: str = ""
    """The node on whose machine it runs: it is never given back."""
    listen: str = ""
    """The address that it binds, if that is not ``host``: another name of the machine, or its address behind a translator."""
    reign: int = FIRST_REIGN
    """The number of the reign in which it led before, or is to be the first."""

    @property
    def listening_on(self) -> str:
        """The address that it binds."""
        return self.listen or self.host


@dataclass
class Elected:
    """A won election: what a candidate hands over to the coordinator that it becomes."""

    reign: Reign
    server: FleetServer
    port: int
    inbox: list[m.CoreEvent]
    """The events since it began to listen, in their order."""
    heartbeats: dict[str, m.Heartbeat]


class Coordinator:
    """The coordinator of one run, for one life of its process."""

    def __init__(
        self, args: CoordinatorArgs, spec: RunSpec, credentials: Credentials, elected: Elected | None = None
    ) -> None:
        """``elected`` is what it takes over if it was a candidate."""
        self._args, self._spec, self._directory = args, spec, RunDirectory(args.run_dir)
        self._server = elected.server if elected else FleetServer(credentials, self)
        self._server.listener = self
        self._credentials, self._address = credentials, ""
        self._port_open = elected.port if elected else 0
        self._inbox: list[m.CoreEvent] = elected.inbox if elected else []
        self._heartbeats: dict[str, m.Heartbeat] = elected.heartbeats if elected else {}
        self._wake = asyncio.Event()
        self._checkpoints: tuple[int, ...] = ()
        self._disk_complaint = ""
        self._disk_due_s = self._lead_due_s = 0.0
        self._deaf_s = 0.0
        """Time in which this process did not read messages, and of which the core has not been told."""
        self._decided_in_s = 0.0
        """Processor time of the last turn's decisions."""
        self._inquiry: Inquiry | None = None
        """The inquiry into a hang that is under way, if there is one."""
        self._rotation: asyncio.Task[str] | None = None
        """The last change of the tokens, which may be under way."""
        self._keeper = DirectoryKeeper(self._directory)
        fleet = spec.fleet
        self._tick_s = min(_LONGEST_TICK_S, min(fleet.lease_s, fleet.confirm_s or fleet.lease_s) / 8)
        self._renew_at_bytes = _RENEW_BYTES
        reign = elected.reign if elected else self._reign_again()
        self._register, self._claim, self._journal = reign.register, reign.claim, reign.journal
        self._state, self._restarts, published_s = reign.restored
        self._failures = FailureInquiry(self._directory, args.attempt, spec.fleet.workers_per_node)
        self._inquiring: asyncio.Task[None] | None = None
        self._publisher = Publisher(
            self._directory,
            args.attempt,
            self._file,
            self.log,
            least_pause_s=self._tick_s,
            published_s=published_s,
            leads=lambda: self._register.newest_term() <= self._claim.term,
            on_epoch_left=self._ask_what_failed,
        )
        self._endpoint = Endpoint(self._directory, spec.observe, args.attempt, "", args.host, self.log)
        self._clock_ahead_s = max(self._state.now_s, time.time()) - time.monotonic()

    def _reign_again(self) -> Reign:
        settings = settings_of(self._spec, _first_step(self._spec, self._directory, self.log))
        empty = initial_state(settings, time.time(), self._credentials.fencing)
        return reign_again(
            self._directory, self._args.attempt, self._args.reign, self._args.node, empty, self.log
        )

    def _now_s(self) -> float:
        """Unix time that neither steps back nor jumps with the machine's clock while this process lives."""
        return time.monotonic() + self._clock_ahead_s

    # --- handlers of the server ------------------------------------------------------------------

    def on_report(self, report: m.AgentMessage) -> None:
        """Queues a report of an attached agent."""
        if isinstance(report, m.Heartbeat):
            self._heartbeats[report.node] = report  # a later one contains all that an earlier one did
            return
        if isinstance(report, m.Recorded):
            self._take_record(report)
            return
        self._failures.heard(report)
        self._inbox.append(report)
        self._wake.set()

    def _ask_what_failed(self) -> None:
        if self._inquiring is None or self._inquiring.done():
            self._inquiring = asyncio.create_task(self._tell_first_failure())

    async def _tell_first_failure(self) -> None:
        """Tells which rank failed first, if any did, once the others have said that they failed too."""
        await asyncio.sleep(WAIT_S)
        heard = self._failures.taken()
        if heard and (found := await asyncio.to_thread(self._failures.finding, heard)):
            self._publisher.warn(found)

    def _take_record(self, report: m.Recorded) -> None:
        if self._inquiry is None:
            return
        if trouble := self._inquiry.add(report):
            self.log(f"{report.node}: {trouble}")
        if self._inquiry.over(self._now_s()):
            self._wake.set()

    def on_disconnect(self, link: AgentLink) -> None:
        """Queues the end of an agent's stream."""
        self._inbox.append(m.Disconnected(link.node, link.incarnation))
        self._wake.set()

    async def on_operation(self, operation: m.OperatorRequest) -> str:
        """Queues an operator's request; returns the answer for the operator."""
        if isinstance(operation, m.Drain | m.Admit) and operation.node not in self._state.nodes:
            known = ", ".join(sorted(self._state.nodes)[:20]) or "none yet"
            return f"there is no node {operation.node}; there are: {known}"
        if isinstance(operation, m.Drain) and is_needed(self._state, operation.node):
            return (
                f"refused: without {operation.node} too few nodes are left, and the fleet would only wait. phalanx fleet stop saves "
                "and ends the run; phalanx fleet add brings a drained node back"
            )
        if isinstance(operation, m.Drain) and operation.node in self._state.leaving:
            return f"refused: {operation.node} is being given back; phalanx fleet add keeps it"
        if isinstance(operation, m.Shrink):
            return self._shrink(operation)
        if isinstance(operation, m.Grow):
            return self._grow(operation.by)
        if isinstance(operation, m.RotateTokens):
            if self._rotation is not None and not self._rotation.done():
                return "refused: the tokens are being changed"
            self._rotation = asyncio.create_task(self._rotate(operation.grace_s))
            # Not ended with the operator's stream: this process goes by what is on disk.
            return await asyncio.shield(self._rotation)
        self._inbox.append(operation)
        self._wake.set()
        return "accepted"

    def _shrink(self, wish: m.Shrink) -> str:
        """Chooses the nodes to be given back; returns the answer for the operator, with their names."""
        unknown = [name for name in wish.nodes if name not in self._state.nodes]
        if unknown:
            return f"there is no node {', '.join(unknown)}; phalanx status RUN lists them"
        if self._args.node in wish.nodes:
            return f"refused: the coordinator runs on {self._args.node}, which therefore stays"
        if any(isinstance(event, m.GiveBack) for event in self._inbox):
            return "refused: another request of this kind is being decided; ask again"
        try:
            names = wish.nodes or resize.choose(self._state, wish.by, self._args.node)
            resize.require_enough(self._state, names)
        except resize.CannotShrinkError as error:
            return f"refused: {error}"
        self._inbox.append(m.GiveBack(names))
        self._wake.set()
        return " ".join(("accepted", *names))

    def _grow(self, by: int) -> str:
        """Lets ``by`` more nodes hold ranks; returns the answer for the operator."""
        if any(isinstance(event, m.Enlarge) for event in self._inbox):
            return "refused: another request of this kind is being decided; ask again"
        settings, fleet = self._state.settings, self._spec.fleet
        expected = settings.expected_nodes + by
        wanted = max(settings.wanted_nodes, expected - fleet.spares)
        formation = formation_of(replace(self._spec, fleet=replace(fleet, nodes=wanted)))
        if formation.largest(wanted * fleet.workers_per_node) <= self._state.ranks:
            return (
                f"refused: {wanted} nodes would hold no more than the {self._state.ranks} ranks of now; a replica needs more: phalanx show "
                "explains the layout"
            )
        self._inbox.append(m.Enlarge(wanted, expected, formation.legal, formation.fewer))
        self._wake.set()
        return "accepted"

    async def _rotate(self, grace_s: float) -> str:
        """Changes the run's tokens, on disk first; returns the answer for the operator."""
        held, run_dir = self._credentials, self._args.run_dir
        trouble = "refused"
        try:
            # Neither is changed if it is known that the other cannot be.
            await asyncio.to_thread(require_rotatable, run_dir, "operate", held.operator_token)
            await asyncio.to_thread(require_rotatable, run_dir, "join", held.token)
            # One after the other: each file is whole at any moment, and says by itself until when the token before is accepted.
            operate = await asyncio.to_thread(
                rotate_token, run_dir, "operate", held.earlier_operators, grace_s
            )
            self._take_keys(replace(held, operator_token=operate.token, earlier_operators=operate))
            trouble = "half done: the token of operators was changed, that of agents was not; ask again"
            join = await asyncio.to_thread(rotate_token, run_dir, "join", held.earlier, grace_s)
            self._take_keys(self._credentials.with_keys(join))
        except SecurityError as error:
            return f"{trouble}: {error}"
        self._tell_new_token()
        return "accepted"

    def _take_keys(self, credentials: Credentials) -> None:
        self._credentials = self._server.credentials = credentials

    def _tell_new_token(self) -> None:
        keys = self._credentials.earlier
        before = token_name(keys.earlier[0][0]) if keys.earlier else ""
        self._inbox.append(m.Rekeyed(token_name(keys.token), before))
        self._wake.set()

    def log(self, line: str) -> None:
        """Writes a line into this process's log."""
        print(time.strftime("%H:%M:%S"), line, flush=True)

    # --- the loop --------------------------------------------------------------------------------

    async def run(self) -> int:
        """Runs until the run is over. Returns the exit code: 0 if it finished or was stopped, 1 if it failed.

        Raises:
            SupersededError: Another coordinator leads the run now. Nothing was sent that follows from what this one decided meanwhile.
        """
        port = self._port_open or await self._listen()
        self._address = f"{self._args.host}:{port}"
        # Before fleet.json names this process as the coordinator: a reader of it may send the signal.
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._ask_to_stop)
        loop.add_signal_handler(HURRY_SIGNAL, self._ask_to_end_at_once)
        await self._publisher.write_now(self._now_s())
        forget_candidates(self._directory)
        self.log(f"coordinates {self._args.run_dir} at {self._address}, start {self._restarts + 1}")
        rotated = self._state.key or self._credentials.earlier.accepted()
        if rotated and self._state.key != token_name(self._credentials.token):
            self._tell_new_token()  # the coordinator before was killed between the file and its journal
        watching = asyncio.create_task(self._watch_itself())
        self._serve_metrics()
        while not self._over:
            await asyncio.sleep(min(_REST * self._decided_in_s, self._tick_s))
            # Not wait_for, which forgets a cancellation that comes with the wake (https://github.com/python/cpython/issues/86296).
            with suppress(TimeoutError):
                async with asyncio.timeout(self._tick_s):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._turn()
            except JournalError as error:
                self.log(f"{error}; decides nothing until it can")
                await asyncio.sleep(_RETRY_S)
            except SupersededError:
                watching.cancel()
                self._endpoint.close()
                await self._server.stop()
                raise
        watching.cancel()
        await self._shut_down()
        return 1 if self._state.phase is FleetPhase.FAILED else 0

    def _serve_metrics(self) -> None:
        fleet = FleetSampler(lambda: self._publisher.newest, self._endpoint.run)
        self._endpoint.start(
            {"fleet": fleet.samples, "run": RunSampler(self._directory.path, self._endpoint.run).samples}
        )

    async def _watch_itself(self) -> None:
        """Measures how long this process reads no messages: stopped, swapped out, starved, or busy with a turn.

        The time in which it waits for a disk does not count. A thread does that, and messages are read meanwhile.
        """
        while True:
            due_s = time.monotonic() + self._tick_s / 4
            await asyncio.sleep(self._tick_s / 4)
            late_s = time.monotonic() - due_s
            if late_s > self._tick_s / 2:
                self._deaf_s += late_s

    @property
    def _over(self) -> bool:
        return self._state.phase in (FleetPhase.FINISHED, FleetPhase.FAILED)

    async def _listen(self) -> int:
        """Listens where the last coordinator of this attempt did, so that agents find this one at the same address; returns the port.

        If another program has taken that port, a free one does: agents find it in fleet.json.
        """
        host, port = self._args.listening_on, self._port()
        try:
            return await self._server.start(host, port)
        except TransportError as error:
            if not self._restarts or not port:
                raise
            if await answers(f"{self._args.host}:{port}", self._credentials):
                raise TransportError(
                    f"another coordinator of this run listens on {host}:{port}; end it first"
                ) from error
            self.log(
                f"another program has taken {host}:{port}; a free port serves instead, and fleet.json says which"
            )
            return await self._server.start(host, 0)

    def _port(self) -> int:
        """The port that the arguments name, else that of the last coordinator of this attempt; 0 if neither is known."""
        if self._restarts and not self._args.port:
            with suppress(FleetFileError, ValueError):
                return int(read_fleet_file(self._args.run_dir).coordinator.rpartition(":")[2])
        return self._args.port

    def _ask_to_stop(self) -> None:
        if not self._is_asked_to_stop():
            self._inbox.append(m.StopRun())
            self._wake.set()

    def _ask_to_end_at_once(self) -> None:
        # A second request to stop says so, and the first may not have come yet.
        self._inbox += [m.StopRun()] if self._is_asked_to_stop() else [m.StopRun(), m.StopRun()]
        self._wake.set()

    def _is_asked_to_stop(self) -> bool:
        return self._state.stopping or any(isinstance(event, m.StopRun) for event in self._inbox)

    async def _turn(self) -> None:
        """One turn: journals what has come in since the last one, lets the core decide, and sends the commands."""
        now_s = self._now_s()
        if now_s >= self._disk_due_s:
            self._look_for_successor()
        if self._inquiry is not None and self._inquiry.over(now_s):
            self._inbox.append(self._inquiry.finding())
            self._inquiry = None
        batch = self._batch(now_s)
        self._journal.append(batch_line(now_s, batch))
        # Only now: a checkpoint that could not be written down is told again.
        self._checkpoints = next((e.steps for e in batch if isinstance(e, m.DiskHolds)), self._checkpoints)
        # No await between this and the core: what is in the journal is what the core has seen.
        self._inbox, self._heartbeats, self._deaf_s = [], {}, 0.0
        before, undecided, sending = mark(self._state), deque(batch), list[tuple[str, c.Command]]()
        began_s = time.thread_time()
        try:
            while undecided:
                sending += self._decide(undecided.popleft(), now_s)
            check(self._state, before)
        except Exception as error:
            # A state that contradicts itself may also make the core raise. No command that follows from it is sent; what
            # came in behind the event that raised (a request to stop, a run that has finished) is decided next turn.
            self._inbox[:0] = [event for event in undecided if not isinstance(event, m.Tick)]
            sending = await self._resync(before, error)
        due = is_due(self._claim, self._state)
        self._decided_in_s = time.thread_time() - began_s
        if sending or self._journal.unsynced_bytes > _UNSYNCED_BYTES:
            await self._synced()
        if due:
            await self._claim_anew()
        self._set_aside()
        self._say_who_leads(now_s)
        for node, command in sending:
            self._server.send(node, command)
        self._server.drop_outdated(self._state.key)
        self._publisher.publish(self._state, now_s, over=self._over)
        await self._renew()

    def _say_who_leads(self, now_s: float) -> None:
        """Tells agents that it leads: the new ones before any other command, all of them now and then.

        Only at the end of a turn. A coordinator that takes in reports and can decide nothing, for its disk, leads nobody.
        """
        patience_s = self._spec.fleet.succession_s
        again = bool(patience_s) and now_s >= self._lead_due_s
        if again:
            self._lead_due_s = now_s + patience_s / _LEADS_PER_PATIENCE
        self._server.lead(self._claim.reign, again=again)

    def _look_for_successor(self) -> None:
        """Raises ``SupersededError`` if another coordinator leads now, or the run was started again."""
        with suppress(OSError):  # tried again at the next look; a claim that is due finds out in any case
            require_leading(self._register, self._claim)
        with suppress(RunDirectoryError):
            if self._directory.newest_attempt() > self._args.attempt:
                raise SupersededError("the run was started again")

    async def _claim_anew(self) -> None:
        """Claims the next term, before anything is sent that follows from the present state. Raises ``SupersededError``."""
        await self._synced()
        claim = renewed(self._claim, self._state, nonce())

        def make() -> None:
            try:
                if not self._register.make(claim):
                    require_leading(self._register, self._claim)
                    raise SupersededError("superseded")
            except (ClaimError, OSError) as error:
                raise JournalError(str(error)) from error

        await self._until_written(make)
        self._claim = claim

    async def _resync(self, before: Mark, error: Exception) -> list[tuple[str, c.Command]]:
        """Replaces a contradictory state by a rebuilt one; returns the commands that ask every node to describe itself.

        The journal that led to the contradiction is kept as evidence, and a new journal begins.
        """
        kept = report_contradiction(self._journal, error, self.log)
        self._state, orders = resync(self._state, before, reason(error))
        self._inquiry = None
        # A replay of the old journal would lead through the contradictory state again.
        await self._until_written(
            lambda: self._journal.begin_anew(first_line(self._state, self._restarts), keep_as=kept)
        )
        return list(deliveries(self._state, orders))

    def _set_aside(self) -> None:
        """Sets aside the checkpoints that are not to be trusted, before any node is told to restore; their steps are saved again."""
        if self._state.condemned and self._state.distrust and self._spec.checkpoint.store:
            with suppress(OSError):  # written again at the next turn, for as long as they are on disk
                record_distrust(self._directory, self._state.distrust[-1].step)
        for saved in self._state.condemned:
            with suppress(CheckpointError, OSError):
                DiskTier(self._directory.checkpoints).set_aside(saved)

    def _batch(self, now_s: float) -> tuple[m.CoreEvent, ...]:
        events: list[m.CoreEvent] = []
        if self._deaf_s:
            events.append(m.StoodStill(self._deaf_s))
        if now_s >= self._disk_due_s:
            self._disk_due_s = now_s + self._tick_s
            self._keep_directory(now_s)
            checkpoints = self._committed()
            if checkpoints != self._checkpoints:
                events.append(m.DiskHolds(checkpoints))
        if self._heartbeats:
            events.append(m.Folded(tuple(self._heartbeats.values())))
        events += self._inbox
        return (*events, m.Tick())

    def _keep_directory(self, now_s: float) -> None:
        """Mends the run's record and run file if they were damaged, and tells that."""
        with suppress(OSError):  # tried again at the next look
            for told in self._keeper.look():
                self._publisher.tell(Incident(now_s, self._state.epoch, "", told))

    def _committed(self) -> tuple[int, ...]:
        """The committed steps on disk; those of the last look if the disk, or this process's open files, allow none now."""
        try:
            found = tuple(self._directory.committed_steps())
        except OSError as error:
            if str(error) != self._disk_complaint:
                self.log(f"cannot look for checkpoints: {error}; trying again")
            self._disk_complaint = str(error)
            return self._checkpoints
        self._disk_complaint = ""
        return found

    def _decide(self, event: m.CoreEvent, now_s: float) -> list[tuple[str, c.Command]]:
        orders: list[Order]
        self._state, orders = step(self._state, event, now_s)
        for order in orders:
            if isinstance(order.command, c.Diagnose):
                self._inquiry = Inquiry.into(self._state, order.command.silent_s, now_s)
        return list(deliveries(self._state, orders))

    async def _synced(self) -> None:
        """Waits until the journal is on disk."""
        await self._until_written(self._journal.sync)

    async def _renew(self) -> None:
        """Replaces a journal that has grown large. A disk that has no room for the new one is no reason to stop: the old one grows on."""
        if self._journal.size_bytes <= self._renew_at_bytes:
            return
        content = first_line(self._state, self._restarts)
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._journal.begin_anew, content)
        except JournalError as error:
            self.log(f"{error}; the old one is kept, and it is tried again later")
            self._renew_at_bytes = self._journal.size_bytes + _RENEW_AGAIN_BYTES
        else:
            self._renew_at_bytes = max(_RENEW_BYTES, 2 * self._journal.size_bytes)

    async def _until_written(self, write: Callable[[], None]) -> None:
        """Calls ``write`` in a thread until it succeeds; meanwhile nothing is sent, and the server goes on listening."""
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(None, write)
            except JournalError as error:
                self.log(f"{error}; sends nothing until it can")
                await asyncio.sleep(_RETRY_S)
            else:
                return

    def _file(self) -> FleetFile:
        attached, refused = frozenset(self._server.links), self._server.refused
        run = self._credentials.run
        return fleet_file(self._state, run, self._address, self._claim, attached, refused, self._restarts)

    async def _shut_down(self) -> None:
        """Tells every agent that the run is over, and gives it a moment to hang up."""
        self.log(f"the run is over: {self._state.phase}, {self._state.reason}")
        for node in list(self._server.links):
            self._server.send(node, c.Shutdown(self._state.reason))
        # While agents still hang up: whoever misses one of them sees why.
        await self._publisher.write_now(self._now_s())
        deadline_s = time.monotonic() + _GOODBYE_S
        while self._server.links and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        self._endpoint.close()
        await self._server.stop()
        self._journal.close()


def _first_step(spec: RunSpec, directory: RunDirectory, log: Callable[[str], None]) -> int:
    """The step that the run begins with if nothing is on disk: of the newest copy in its store, or of its parent; 0 for another run."""
    if spec.checkpoint.store and not directory.committed_steps():
        # The client of stores, only where there is one.
        from phalanx.checkpoint.tiers.object_tier import ObjectTier
        from phalanx.store.open_store import open_store

        try:
            copied = ObjectTier(open_store(spec.checkpoint.store)).steps()
        except CheckpointError as error:
            log(f"cannot look for copies: {error}")  # the workers will try again
        else:
            if copied:
                return copied[-1]
    inherits = spec.checkpoint.init_with == "training"
    return (step_of(Path(spec.checkpoint.init_from)) or 0) if inherits else 0


def run_coordinator(args: CoordinatorArgs, certificates: Path | None = None) -> int:
    """Runs the coordinator in this process to the end of the run. Returns 0 if it finished or was stopped, 1 if it failed.

    Raises:
        RunDirectoryError: There is no run in the run directory.
        SecurityError: Token or certificates are missing.
        DescriptorLimitError: The system allows too few open files for the fleet.
        JournalError, ClaimError, TransportError: It cannot use its journal or the claims, or cannot listen.
        SupersededError: Another coordinator leads the run now.
        ValueError: No layout fits the fleet of the run file.
    """
    spec = read_resolved(RunDirectory(args.run_dir))
    raise_descriptor_limit(spec.fleet.nodes + spec.fleet.spares)
    credentials = credentials_of(args.run_dir, spec, args.attempt, certificates)
    with only_coordinator(RunDirectory(args.run_dir), args.reign):
        return asyncio.run(_coordinate(args, spec, credentials))


def main() -> int:
    """Entry point of the process that a launcher starts."""
    die_with_parent()
    capture_output(os.environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    parser = argparse.ArgumentParser(prog="phalanx.fleet.control.coordinator")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--certificates", type=Path)
    parser.add_argument("--node", default="")
    arguments = parser.parse_args()
    args = CoordinatorArgs(
        arguments.run_dir, arguments.attempt, arguments.host, arguments.port, arguments.node
    )
    return exit_code_of(lambda: run_coordinator(args, arguments.certificates), args, "coordinator")


def exit_code_of(coordinate: Callable[[], int], args: CoordinatorArgs, name: str) -> int:
    """Runs a coordinator's process; returns its exit code, once what went wrong is in the log ``name``."""
    try:
        return coordinate()
    except SupersededError as error:
        print(time.strftime("%H:%M:%S"), f"ends: {error}", flush=True)
        return EXIT_SUPERSEDED
    except (
        ClaimError,
        DescriptorLimitError,
        JournalError,
        RunDirectoryError,
        SecurityError,
        TransportError,
        ValueError,
    ) as error:
        log = RunDirectory(args.run_dir).named_log(args.attempt, name)
        report_failure(error, log, args.attempt)
        hopeless = isinstance(error, (DescriptorLimitError, SecurityError, ValueError))
        return EXIT_CANNOT_START if hopeless else 1


async def _coordinate(args: CoordinatorArgs, spec: RunSpec, credentials: Credentials) -> int:
    return await Coordinator(args, spec, credentials).run()


if __name__ == "__main__":
    sys.exit(main())
