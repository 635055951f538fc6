"""The agent of a node: starts and supervises its workers, keeps their snapshots, and carries out the
coordinator's commands.

``AgentState`` makes all decisions. This shell turns sockets, processes and the clock into calls of its
handlers, and their returned actions into effects. The agent holds the memory into which its workers write
their snapshots, so the state of a worker that crashes is not lost. It imports no torch and keeps little other
state, so it has little reason to crash itself. If it dies all the same, the kernel kills its workers with it:
a node is complete, or not there at all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from phalanx.checkpoint.snapshot.data_port import SnapshotServer
from phalanx.checkpoint.snapshot.segments import SnapshotKey, SnapshotMemory
from phalanx.fleet.control.coordinator_link import CoordinatorLink
from phalanx.fleet.control.credentials import Credentials, credentials_of
from phalanx.fleet.control.security import Keyring, SecurityError
from phalanx.fleet.control.transport import DescriptorLimitError, raise_descriptor_limit
from phalanx.fleet.core.commands import Command, SaveSnapshots, in_words
from phalanx.fleet.core.settings import leave_s
from phalanx.fleet.health.node_health import HealthWatch
from phalanx.fleet.node import agent_actions as act
from phalanx.fleet.node import node_metrics
from phalanx.fleet.node.agent_state import AgentState
from phalanx.fleet.node.copies import SnapshotCourier, StoreCopies
from phalanx.fleet.node.launcher import AgentArgs, TokenHolder
from phalanx.fleet.node.leader import Successor, coordinator_addresses, look_for_leader, other_start
from phalanx.fleet.node.worker_link import InjectFault, SnapshotTaken, ToAgent, Warm
from phalanx.fleet.node.worker_pool import WorkerPool
from phalanx.launch.engines.order import in_slurm_step
from phalanx.observe.logs.capture import capture_output
from phalanx.observe.metrics.endpoint import Endpoint
from phalanx.process.arguments import parsed
from phalanx.process.child import die_with_parent
from phalanx.process.this_process import heeded
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.spec import RunSpec

_FAREWELL_S = 0.5
_LOOK_AGAIN_S = 0.5


class AgentError(RuntimeError):
    """The agent ends before its run; the message has the cause and the remedy."""


class Agent:
    """One agent process: the shell around ``AgentState``."""

    def __init__(
        self, args: AgentArgs, spec: RunSpec, credentials: Credentials, memory: SnapshotMemory | None = None
    ) -> None:
        """Set up the agent.

        ``memory`` is its snapshot memory of the run's previous start, if it took part in that. Starts the data port;
        workers are started by ``run``.
        """
        self._args, self._spec, fleet = args, spec, spec.fleet
        directory, own_certificates = RunDirectory(args.run_dir), credentials.certificates
        self._directory = directory
        self.memory = memory or SnapshotMemory(credentials.run, fleet.workers_per_node)
        self._tokens = TokenHolder(args.run_dir, credentials, self._change_token, self.log)
        self._data = SnapshotServer(
            self.memory,
            credentials.token,
            host=args.listening_on,
            tls=own_certificates.server_context() if own_certificates else None,
        )
        self._courier = SnapshotCourier(
            self.memory,
            args.run_dir,
            fleet.workers_per_node,
            own_certificates.client_context() if own_certificates else None,
            lambda: self._tokens.credentials.token,
            self.log,
        )
        identity = act.NodeIdentity(
            args.node, fleet.workers_per_node, args.host, self._data.port, args.domain, args.started_as_spare
        )
        patience = act.Patience(
            fleet.worker_lease_s, leave_s(fleet), fleet.coordinator_lease_s, fleet.lease_s
        )
        self._state = AgentState(
            identity,
            time.time_ns() // 1_000_000,
            patience,
            self._courier.snapshots,
            self._tokens.token_of,
            checked=fleet.health_checks,
        )
        self._health = HealthWatch(
            lambda complaints: self._do(self._state.on_health_checked(complaints)), self.log
        )
        self._link = CoordinatorLink(
            lambda: coordinator_addresses(args),
            credentials,
            self._state.greet,
            self._on_command,
            self.log,
            self._look_for_another_start,
            self._tokens.look,
        )
        run_file_sha256 = credentials.fencing.run_file_sha256
        self._workers = WorkerPool(args, spec, self.memory, run_file_sha256, self)
        self._endpoint = Endpoint(directory, spec.observe, args.attempt, args.node, args.host, self.log)
        self._copies = StoreCopies(spec, directory, args.attempt, self.log)
        self._successor = Successor(args, fleet.succession_s, spec.observe, self.log)
        self._tasks: set[asyncio.Task[None]] = set()
        self._over, self._reason, self._failure = asyncio.Event(), "", ""
        self._next_attempt: int | None = None
        self._warned = False
        self._run_is_over = False
        """True once the run is over: its checkpoints must then reach the store, and a coordinator here must
        notify the others first.
        """

    def log(self, line: str) -> None:
        """Print a line into this process's log."""
        print(time.strftime("%H:%M:%S"), line, flush=True)

    async def run(self) -> int | None:
        """Run until the run is over, a signal ends it, or the run is started again. Before it returns, kill the
        started processes, and then, if the run is over, finish the copies to the store.

        Return the attempt of the newer start, to be run next, or None. Raises ``AgentError`` if it ends before the
        run: without a coordinator for ``fleet.coordinator_lease_s``, after an internal error, or if the directory
        belongs to another run now.
        """
        loop = asyncio.get_running_loop()
        for number in heeded((signal.SIGTERM, signal.SIGINT)):
            loop.add_signal_handler(number, self._on_stop_signal)
        self.log(f"node {self._args.node}, incarnation {self._state.incarnation}, process {os.getpid()}")
        self._do([act.StartProcess(i) for i in range(self._spec.fleet.workers_per_node)])
        self._do(self._state.examine())
        looking = (self._health.run(), self._follow_leader())
        for forever in (self._link.run(), self._tick(), self._beat(), *looking):
            self._in_background(forever)
        labels, run_dir = self._endpoint.labels, self._args.run_dir
        self._endpoint.start(
            {
                "agent": lambda: node_metrics.agent_samples(self._facts, labels),
                "machine": lambda: node_metrics.machine_samples(run_dir, labels),
                "software": node_metrics.SoftwareSampler(labels).samples,
                "gpu": lambda: node_metrics.gpu_samples(labels),
            }
        )
        await self._over.wait()
        self.log(f"ends: {self._reason}")
        self._endpoint.close()
        await self._farewell(_FAREWELL_S if self._next_attempt is None else None)
        await self._copies.end(settled=self._run_is_over)
        if self._failure:
            raise AgentError(self._failure)
        return self._next_attempt

    def _facts(self) -> node_metrics.AgentFacts:
        """Return the values that the metrics show: workers, phase, attachment, health, exits and snapshots."""
        state, deaths = self._state, self._workers.ended
        snapshots = self._courier.snapshots()
        return node_metrics.AgentFacts(
            tuple(state.workers), state.phase(), self._link.attached, state.cleared, deaths, snapshots
        )

    async def _farewell(self, patience_s: float | None) -> None:
        """Cancel all tasks, kill the workers and end the successor, then close the ports and threads.

        Waits up to ``patience_s`` for workers and tasks; without limit if None.
        """
        for task in self._tasks:
            task.cancel()
        self._workers.kill_all()
        await self._successor.end(at_once=not self._run_is_over)
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await asyncio.gather(self._workers.wait_closed(), *self._tasks, return_exceptions=True)
        self._courier.close()
        self._health.close()
        self._data.close()

    def _on_stop_signal(self) -> None:
        """Handle SIGTERM or SIGINT by ``at_signal``: "end" at once; "wait" only logs it; else leave at the next
        step boundary.

        Unless ``at_signal`` is "end", the second signal ends the agent. A signal to an agent that ends gives up
        the copies to the store.
        """
        if self._args.at_signal != "end" and not self._warned:
            self._warned = True
            if self._args.at_signal == "wait":
                self.log("the job is about to be ended: waiting for the run to save")
            else:
                self.log(
                    "stop requested: leaves the fleet at the next step boundary; a second request ends it at once"
                )
                self._state.leaving = True
                self._link.send(self._state.heartbeat())
            return
        if self._over.is_set():
            self._copies.hurry()
        self._end("stop requested")

    def _fail(self, reason: str) -> None:
        """End this agent before its run."""
        if not self._over.is_set():
            self._failure = f"node {self._args.node}: {reason}"
        self._end(reason)

    def _end(self, reason: str) -> None:
        """End the agent, for the first reason given."""
        self._reason = self._reason or reason
        self._over.set()

    def _in_background(self, coroutine: Coroutine[object, object, None]) -> None:
        """Run a coroutine in a task, whose errors end the agent."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Forget a finished task. If it failed, log the error and end the agent with it."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._over.is_set():
            self.log("".join(traceback.format_exception(error)))
            self._fail(f"cannot continue: {error!r}")

    def _look_for_another_start(self) -> None:
        """End this agent if, by the run directory, the run was started again (its attempt comes next), or is
        another one (a failure).

        A directory that cannot be read is logged and ignored.
        """
        try:
            start = other_start(self._directory, self._tokens.credentials)
        except RunDirectoryError as error:
            self.log(f"cannot look for another start of the run: {error}")
            return
        if start is not None and start.attempt is None:
            self._fail(start.reason)
        elif start is not None:
            self._next_attempt = start.attempt
            self._end(start.reason)

    def _change_token(self, keys: Keyring) -> None:
        """Let the ports and the link use new tokens."""
        self._data.change_token(keys.token, keys.accepted)
        self._link.change_token(self._tokens.credentials)

    # --- time ----------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """Pass time to the state at least four times a second and carry out its actions, until cancelled."""
        pause_s = min(0.25, self._spec.fleet.worker_lease_s / 8)
        while True:
            now_s = time.monotonic()
            working = self._workers.working(self._state.silent(now_s))
            attached, led = self._link.attached, self._link.led
            actions = self._state.on_tick(now_s, time.time(), attached=attached, led=led, working=working)
            self._do(actions)
            await asyncio.sleep(pause_s)

    async def _follow_leader(self) -> None:
        """Look for a leader every half second, until cancelled; end the agent once a claim states the end of the
        run.
        """
        patience_s = self._spec.fleet.succession_s
        while True:
            over = await look_for_leader(self._args, self._link, self._successor, patience_s)
            if over:
                self._run_is_over = True
                self._end(f"the run is over: {over}")
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _beat(self) -> None:
        """Send a heartbeat to the coordinator every ``heartbeat_s`` seconds, for ever."""
        while True:
            self._link.send(self._state.heartbeat())
            await asyncio.sleep(self._spec.fleet.heartbeat_s)

    # --- events --------------------------------------------------------------------------------

    def _on_command(self, command: Command) -> None:
        """Log a command and carry out what the state makes of it."""
        self.log(f"command from the coordinator: {in_words(command)}")
        self._do(self._state.on_command(command, time.monotonic(), time.time()))

    def on_started(self, index: int) -> None:
        """Note that the process of a worker is about to be started."""
        self._state.on_started(index, time.monotonic())

    def on_worker_message(self, index: int, message: ToAgent) -> None:
        """Handle a message of a worker. A warm worker gets the faults to inject."""
        self._do(self._state.on_worker_message(index, message, time.monotonic(), time.time()))
        if isinstance(message, Warm):
            self._workers.is_warm(index)
            self._do([act.SendToWorker(index, InjectFault(fault)) for fault in self._args.faults])

    def on_exit(self, index: int, code: int, text: str) -> None:
        """Log how a worker's process ended, and carry out the state's reaction, such as a restart."""
        ended_here = self._over.is_set() and code < 0  # Expected at the end of the run.
        how = "was ended by its agent" if ended_here else f"ended with code {code} {text if code > 0 else ''}"
        self.log(f"worker {index} {how}".rstrip())
        self._do(self._state.on_exit(index, code, text, time.time()))

    # --- effects -------------------------------------------------------------------------------

    def _do(self, actions: Sequence[act.AgentAction]) -> None:
        """Carry out actions in order, until the agent ends."""
        for action in actions:
            if not self._over.is_set():
                self._carry_out(action)

    def _carry_out(self, action: act.AgentAction) -> None:
        """Carry out one action of the state, such as to send a report or kill a worker. Slow ones run in the
        background.
        """
        match action:
            case act.SendReport(report):
                self._link.send(report)
            case act.SendToWorker(index, message):
                self._workers.send(index, message)
            case act.KillProcess(index):
                self._workers.kill(index)
            case act.StartProcess(index):
                self._in_background(self._workers.start(index))
            case act.StreamSnapshot(index, taken, address):
                self._in_background(self._push(index, taken, address))
            case act.DiscardSnapshots(step):
                self.memory.discard_after(step)
            case act.LogStall(silent_s):
                self.log(f"no step for {silent_s:.0f} s: {self._state.heartbeat()}")
            case act.CheckHealth():
                self._health.suspect()
            case act.ReadNewToken(name):
                self._in_background(self._tokens.read(name))
            case act.DealCopies(ranks, of):
                self._copies.deal(ranks, of)
            case act.SaveMemory(order):
                self._in_background(self._save(order))
            case act.EndAgent(reason, failed):
                if failed:
                    self._fail(reason)
                self._run_is_over = not failed
                self._end(reason)

    async def _save(self, order: SaveSnapshots) -> None:
        """Write this node's share of a checkpoint from its memory, and pass the outcome to the state.

        It is abandoned if the agent ends or a later save was ordered.
        """

        def stopped() -> bool:
            return self._over.is_set() or self._state.saving > order.epoch

        committed, trouble = await self._courier.save(order, stopped)
        self._do(self._state.on_saved(order, committed=committed, trouble=trouble))

    async def _push(self, index: int, snapshot: SnapshotTaken, address: str) -> None:
        """Stream a snapshot to its buddy until it has arrived, and pass that to the state; give up once its epoch
        is over.
        """
        key = SnapshotKey(snapshot.ranks, snapshot.rank, snapshot.step)
        if await self._courier.push(
            index, key, address, lambda: self._state.workers[index].epoch == snapshot.epoch
        ):
            self._do(self._state.on_pushed(index, snapshot))


def run_agent(args: AgentArgs) -> None:
    """Run an agent in this process until the run is over; if the run is started again meanwhile, for that start
    too.

    Raises ``RunDirectoryError`` if there is no run, ``SecurityError`` if token or certificates are missing, and
    ``AgentError`` if the agent ends before the run.
    """
    asyncio.run(_run(args))


async def _run(args: AgentArgs) -> None:
    """Run agents of a run, one for each of its starts, until one ends without a newer start.

    Snapshot memory passes to the next one, unless the number of workers differs. Creates the folder of logs, and
    raises the limit on open files where possible.
    """
    directory = RunDirectory(args.run_dir)
    directory.logs.mkdir(exist_ok=True)
    memory: SnapshotMemory | None = None
    workers, attempt = 0, args.attempt
    while True:
        spec = read_resolved(directory)
        credentials = credentials_of(args.run_dir, spec, attempt, args.certificates, ("join",))
        with suppress(DescriptorLimitError):  # A data port works with fewer descriptors.
            raise_descriptor_limit(spec.fleet.nodes)
        # The snapshots are of the same run, also if its fleet has changed; the next epoch restores the newest complete state.
        kept_memory = memory if workers == spec.fleet.workers_per_node else None
        agent = Agent(replace(args, attempt=attempt), spec, credentials, kept_memory)
        next_attempt = await agent.run()
        if next_attempt is None:
            return
        memory, workers, attempt = agent.memory, spec.fleet.workers_per_node, next_attempt


def leave(code: int) -> NoReturn:
    """End this process at once, without waiting for a push that hangs in a dead peer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> NoReturn:
    """Run an agent as the process that a launcher starts for each node of a local fleet. Exits with 0, or 1 and a message."""
    die_with_parent()
    capture_output(os.environ)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    args = parsed(AgentArgs, "phalanx.fleet.node.agent")
    if in_slurm_step(os.environ):
        args = replace(args, at_signal="wait")
    try:
        run_agent(args)
    except (AgentError, RunDirectoryError, SecurityError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        leave(1)
    leave(0)


if __name__ == "__main__":
    main()
