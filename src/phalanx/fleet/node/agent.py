"""The agent of a node: starts and supervises its workers, keeps their snapshots, and carries out the coordinator's commands.

``AgentState`` makes all decisions; this shell turns sockets, processes and the clock into calls of its handlers, and the actions
that they return into effects. The agent holds the memory into which its workers write their snapshots, so the state of a worker
that crashes is not lost. It imports no torch and holds little else, so it has little reason to crash itself. If it dies all the
same, the kernel kills its workers with it: a node is there as a whole, or not at all.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from phalanx.checkpoint.snapshot.segments import SnapshotKey, SnapshotMemory
from phalanx.checkpoint.snapshot.server import SnapshotServer
from phalanx.fleet.control.candidate import candidate_addresses
from phalanx.fleet.control.coordinator_link import CoordinatorLink
from phalanx.fleet.control.credentials import Credentials, credentials_of
from phalanx.fleet.control.descriptors import DescriptorLimitError, raise_descriptor_limit
from phalanx.fleet.control.fleet_file import FleetFileError, read_fleet_file
from phalanx.fleet.control.security import Keyring, SecurityError, read_keyring
from phalanx.fleet.core.commands import Command, SaveSnapshots, in_words
from phalanx.fleet.core.messages import RankSnapshot
from phalanx.fleet.core.settings import leave_s
from phalanx.fleet.health.gpu_metrics import gpu_samples
from phalanx.fleet.health.quick import complaints, of_node
from phalanx.fleet.node.agent_actions import (
    AgentAction,
    CheckHealth,
    DealCopies,
    DiscardSnapshots,
    EndAgent,
    Identity,
    KillProcess,
    LogStall,
    Patience,
    ReadNewToken,
    SaveMemory,
    SendReport,
    StartProcess,
    StreamSnapshot,
    TellWorker,
)
from phalanx.fleet.node.agent_state import AgentState
from phalanx.fleet.node.node_metrics import AgentFacts, Software, agent_samples, machine_samples
from phalanx.fleet.node.snapshot_courier import SnapshotCourier
from phalanx.fleet.node.successor import Successor
from phalanx.fleet.node.worker_link import InjectFault, SnapshotTaken, ToAgent, Warm
from phalanx.fleet.node.worker_process import WorkerProcess
from phalanx.launch.foreign import in_slurm_step
from phalanx.observe.logs.capture import capture_output
from phalanx.observe.logs.order import order_for
from phalanx.observe.metrics.endpoint import Endpoint
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.fencing import fencing_token
from phalanx.run.identity import identity
from phalanx.run.spec import RunSpec
from phalanx.run.token_proof import token_name
from phalanx.train.lifecycle.worker import die_with_parent

if TYPE_CHECKING:
    from phalanx.fleet.node.store_uploader import StoreUploader

_LONGEST_RESTART_PAUSE_S = 10.0
_FAREWELL_S = 0.5
_NEW_TOKEN_S, _LOOK_AGAIN_S = 60.0, 0.5
_EXAMINE_S, _EXAMINE_AGAIN_S = 30.0, 30.0
WORKER_PROGRAM = (sys.executable, "-m", "phalanx.fleet.node.worker_main")


AtSignal = Literal["end", "wait", "leave"]
"""``end``: the agent ends at once, and the fleet recovers from its loss. ``wait``: the signal comes to all processes of a job that a scheduler is
about to end, and the leading node has the run saved: the agent ends with the run. ``leave``: the node leaves the fleet at the next step boundary,
and no step is computed twice."""


@dataclass(frozen=True)
class AgentArgs:
    """The arguments of an agent process."""

    run_dir: Path
    node: str
    attempt: int = 0
    coordinator: str = ""
    """ "host:port"; empty: as fleet.json in the run directory says."""
    host: str = "127.0.0.1"
    """This machine, as the other nodes reach it."""
    domain: tuple[str, ...] = ()
    """Failure domains from the widest to the narrowest: hall, switch, rack."""
    started_as_spare: bool = False
    """At first it takes ranks only if the other nodes are too few."""
    faults: tuple[str, ...] = ()
    """Sentences of ``phalanx.fleet.faults.fault``, passed on to every worker."""
    worker_program: tuple[str, ...] = WORKER_PROGRAM
    at_signal: AtSignal = "end"
    """What the first SIGTERM or Ctrl-C means; a second one ends the agent at once."""
    may_lead: bool = False
    """Its machine may succeed a coordinator that is lost (``fleet.succession_s``)."""


class AgentError(RuntimeError):
    """The agent ends before its run; the message says why and what to do."""


class Agent:
    """One agent process: the shell around ``AgentState``."""

    def __init__(
        self, args: AgentArgs, spec: RunSpec, credentials: Credentials, memory: SnapshotMemory | None = None
    ) -> None:
        """``memory`` is that of this agent for the run's last start, if it was there."""
        self._args, self._spec, self._credentials, fleet = args, spec, credentials, spec.fleet
        certificates = credentials.certificates
        self._tls = certificates.client_context() if certificates else None
        self._certificates = certificates.folder if certificates else None
        self.memory = memory or SnapshotMemory(credentials.run, fleet.workers_per_node)
        self._data = SnapshotServer(
            self.memory,
            credentials.token,
            host=_listening(args.host),
            tls=certificates.server_context() if certificates else None,
        )
        identity = Identity(
            args.node, fleet.workers_per_node, args.host, self._data.port, args.domain, args.started_as_spare
        )
        patience = Patience(fleet.worker_lease_s, leave_s(fleet), fleet.coordinator_lease_s)
        self._state = AgentState(
            identity,
            time.time_ns() // 1_000_000,
            patience,
            self._held,
            self._token_of,
            checked=fleet.health_checks,
        )
        self._doctor, self._suspicion = ThreadPoolExecutor(1, "health"), asyncio.Event()
        self._link = CoordinatorLink(
            self._coordinator_addresses,
            credentials,
            self._state.greet,
            self._on_command,
            self.log,
            self._look_for_another_start,
            self._look_for_new_token,
        )
        self._workers: dict[int, WorkerProcess] = {}
        self._deaths, self._ended = [0] * fleet.workers_per_node, 0
        self._endpoint = Endpoint(
            RunDirectory(args.run_dir), spec.observe, args.attempt, args.node, args.host, self.log
        )
        self._courier = SnapshotCourier(
            self.memory,
            args.run_dir,
            fleet.workers_per_node,
            self._tls,
            lambda: self._credentials.token,
            self.log,
        )
        self._successor = Successor(
            args.run_dir,
            args.attempt,
            args.node,
            args.host,
            _listening(args.host),
            fleet.succession_s,
            self._certificates,
            args.may_lead,
            self.log,
            spec.observe,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._over, self._reason, self._failure = asyncio.Event(), "", ""
        self._next_attempt: int | None = None
        self._warned = False
        self._uploader: StoreUploader | None = None
        self._copies_wanted, self._hurried = False, asyncio.Event()
        """The run is over, and what it has saved is to be in the store too; unless the agent is asked once more to end."""

    def log(self, line: str) -> None:
        """Prints a line into this process's log."""
        print(time.strftime("%H:%M:%S"), line, flush=True)

    async def run(self) -> int | None:
        """Runs until the run is over or SIGTERM comes, or the run is started again; nothing that it started is left then.

        Returns the attempt of the newer start, to be run next, or None if there is none.

        Raises:
            AgentError: It ends before the run: no coordinator is there any more, or the run directory belongs to another run now.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_end)
        self.log(f"node {self._args.node}, incarnation {self._state.incarnation}, process {os.getpid()}")
        self._do([StartProcess(i) for i in range(self._spec.fleet.workers_per_node)])
        self._do(self._state.examine())
        for forever in (self._link.run(), self._tick(), self._beat(), self._examine(), self._succession()):
            self._in_background(forever)
        self._serve_metrics()
        await self._over.wait()
        self.log(f"ends: {self._reason}")
        self._endpoint.close()
        await self._farewell(_FAREWELL_S if self._next_attempt is None else None)
        await self._end_copies()
        if self._failure:
            raise AgentError(self._failure)
        return self._next_attempt

    def _serve_metrics(self) -> None:
        labels, run_dir = self._endpoint.labels, self._args.run_dir
        self._endpoint.start(
            {
                "agent": lambda: agent_samples(self._facts, labels),
                "machine": lambda: machine_samples(run_dir, labels),
                "software": Software(labels).samples,
                "gpu": lambda: gpu_samples(labels),
            }
        )

    def _facts(self) -> AgentFacts:
        heartbeat = self._state.heartbeat()
        workers, attached = tuple(self._state.workers), self._link.attached
        return AgentFacts(workers, heartbeat.phase, attached, self._state.cleared, self._ended, self._held())

    async def _farewell(self, patience_s: float | None) -> None:
        for task in self._tasks:
            task.cancel()
        for worker in self._workers.values():
            worker.kill()
        # Where the run is over, a coordinator on this node tells the others before it ends.
        await self._successor.end(at_once=not self._copies_wanted)
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                gone = [worker.gone() for worker in self._workers.values()]
                await asyncio.gather(*gone, *self._tasks, return_exceptions=True)
        self._courier.close()
        self._doctor.shutdown(wait=False, cancel_futures=True)
        self._data.close()

    def _deal_copies(self, ranks: tuple[int, ...], of: int) -> None:
        if not self._spec.checkpoint.store:
            return
        from phalanx.fleet.node.store_uploader import (
            CopyShare,
            uploader_of,
        )  # the client of stores, only where there is one

        if self._uploader is None:
            self._uploader = uploader_of(
                self._spec, RunDirectory(self._args.run_dir), self._args.attempt, self.log
            )
        self._uploader.deal(CopyShare(ranks, of))

    async def _end_copies(self) -> None:
        """Brings this node's share of what the run has saved to the store, unless the agent is asked once more to end."""
        if self._uploader is None:
            return
        if self._copies_wanted:
            settling = asyncio.create_task(asyncio.to_thread(self._uploader.settle))
            hurried = asyncio.create_task(self._hurried.wait())
            await asyncio.wait((settling, hurried), return_when=asyncio.FIRST_COMPLETED)
            if not settling.done():
                self.log("asked once more to end: gives up its copies to the store")
            elif missing := settling.result():
                self.log(f"not in the store: steps {', '.join(map(str, missing))}")
            hurried.cancel()
        self._uploader.cancel()

    def _asked_to_end(self) -> None:
        if self._args.at_signal != "end" and not self._warned:
            self._warned = True
            if self._args.at_signal == "wait":
                self.log("the job is about to be ended: waiting for the run to save")
            else:
                self.log(
                    "asked to end: leaves the fleet at the next step boundary; asked once more, it ends at once"
                )
                self._state.leaving = True
                self._link.say(self._state.heartbeat())
            return
        if self._over.is_set():
            self._hurried.set()
        self._end("asked to end")

    def _fail(self, reason: str) -> None:
        """Ends this agent before its run."""
        if not self._over.is_set():
            self._failure = f"node {self._args.node}: {reason}"
        self._end(reason)

    def _end(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._over.set()

    def _in_background(self, coroutine: object) -> None:
        assert asyncio.iscoroutine(coroutine)
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._over.is_set():
            self.log("".join(traceback.format_exception(error)))
            self._fail(f"cannot go on: {error!r}")

    def _coordinator_addresses(self) -> list[str]:
        """The address that this agent was given, and the one in fleet.json: a coordinator whose port was taken writes another one.

        Before them those of candidates, which stand if the coordinator is lost: to find that out takes long at its own address.
        """
        addresses = [*self._candidates(), self._args.coordinator]
        with suppress(FleetFileError):
            addresses.append(read_fleet_file(self._args.run_dir).coordinator)
        return list(dict.fromkeys(filter(None, addresses)))

    def _look_for_another_start(self) -> None:
        """Ends this life of the agent if the run directory says that the run was started again, or that it is another one.

        A coordinator's word is not enough: that one may be of an earlier start, or no coordinator.
        """
        own, directory = self._credentials.fencing, RunDirectory(self._args.run_dir)
        try:
            spec, attempt = read_resolved(directory), directory.newest_attempt()
        except RunDirectoryError as error:
            self.log(f"cannot look for another start of the run: {error}")
            return
        if identity(spec) != self._credentials.run:
            self._fail(
                f"{directory.path} belongs to another run now ({identity(spec)[:12]}, not {self._credentials.run[:12]}), to which this node "
                "is of no use; start its agent again if it is to train that run"
            )
        elif attempt >= own.attempt and fencing_token(spec, attempt) != own:
            self._next_attempt = attempt
            self._end(f"the run was started again: from {own} on to {fencing_token(spec, attempt)}")

    def _held(self) -> tuple[RankSnapshot, ...]:
        return tuple(
            RankSnapshot(h.key.ranks, h.key.rank, h.key.step, h.kind, h.nbytes, h.epoch)
            for h in self.memory.holdings()
        )

    # --- time ----------------------------------------------------------------------------------

    async def _tick(self) -> None:
        pause_s = min(0.25, self._spec.fleet.worker_lease_s / 8)
        while True:
            now_s, silent = time.monotonic(), self._state.silent(time.monotonic())
            working = {i for i in silent if i in self._workers and self._workers[i].working()}
            attached = self._link.attached
            self._do(self._state.on_tick(now_s, time.time(), attached=attached, working=working))
            await asyncio.sleep(pause_s)

    async def _succession(self) -> None:
        """Looks whether a coordinator leads, and takes part in the succession if none does."""
        patience_s = self._spec.fleet.succession_s
        while True:
            now_s, led_s = time.monotonic(), self._link.led_s
            led = led_s is not None and (not patience_s or now_s - led_s <= patience_s)
            if led_s is not None and not led:
                # The stream is open, and whoever is there decides nothing, or its machine is gone.
                self._successor.alone_since_s = self._successor.alone_since_s or led_s
                self._link.drop(f"it has not said for {patience_s:g} s that it leads")
            elif (
                not led
                and self._link.attached
                and self._link.address not in (found := self._candidates())
                and found
            ):
                self._link.drop("a candidate stands to succeed it")
            if over := await self._successor.look(led=led, now_s=now_s):
                self._copies_wanted = True
                self._end(f"the run is over: {over}")
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _candidates(self) -> list[str]:
        return candidate_addresses(RunDirectory(self._args.run_dir), self._args.attempt, self._args.node)

    async def _beat(self) -> None:
        while True:
            self._link.say(self._state.heartbeat())
            await asyncio.sleep(self._spec.fleet.heartbeat_s)

    async def _examine(self) -> None:
        """Runs the health checks whenever they are asked for, and on an unfit node again and again: it may be repaired."""
        while True:
            await self._suspicion.wait()
            self._suspicion.clear()
            found = await self._complaints()
            if self._suspicion.is_set():
                continue  # asked for again: the new reason may have come after the check
            if found:
                self.log(f"unfit: {found}")
            self._do(self._state.on_health_checked(found))
            if found:
                await asyncio.sleep(_EXAMINE_AGAIN_S)
                self._suspicion.set()

    async def _complaints(self) -> str:
        checks = asyncio.get_running_loop().run_in_executor(self._doctor, of_node)
        try:
            return complaints(await asyncio.wait_for(checks, _EXAMINE_S))
        except TimeoutError:
            return f"its checks did not end within {_EXAMINE_S:g} s"

    # --- events --------------------------------------------------------------------------------

    def _on_command(self, command: Command) -> None:
        self.log(f"the coordinator asks: {in_words(command)}")
        self._do(self._state.on_command(command, time.monotonic(), time.time()))

    def _on_worker_message(self, index: int, said: ToAgent) -> None:
        self._do(self._state.on_worker_message(index, said, time.monotonic(), time.time()))
        if isinstance(said, Warm):
            self._deaths[index] = 0
            self._do([TellWorker(index, InjectFault(fault)) for fault in self._args.faults])

    def _on_exit(self, index: int, code: int, text: str) -> None:
        self._workers.pop(index, None)
        self._ended += 1
        self.log(f"worker {index} ended with code {code} {text if code > 0 else ''}".rstrip())
        self._do(self._state.on_exit(index, code, text, time.time()))

    # --- effects -------------------------------------------------------------------------------

    def _do(self, actions: Sequence[AgentAction]) -> None:
        for action in actions:
            if not self._over.is_set():
                self._carry_out(action)

    def _carry_out(self, action: AgentAction) -> None:
        match action:
            case SendReport(report):
                self._link.say(report)
            case TellWorker(index, message):
                if index in self._workers:
                    self._workers[index].tell(message)
            case KillProcess(index):
                if index in self._workers:
                    self._workers[index].kill()
            case StartProcess(index):
                self._in_background(self._start(index))
            case StreamSnapshot(index, taken, address):
                self._in_background(self._push(index, taken, address))
            case DiscardSnapshots(step):
                self.memory.discard_after(step)
            case LogStall(silent_s):
                self.log(f"no step for {silent_s:.0f} s: {self._state.heartbeat()}")
            case CheckHealth():
                self._suspicion.set()
            case ReadNewToken(name):
                self._in_background(self._read_token(name))
            case DealCopies(ranks, of):
                self._deal_copies(ranks, of)
            case SaveMemory(order):
                self._in_background(self._save(order))
            case EndAgent(reason, failed):
                if failed:
                    self._fail(reason)
                self._copies_wanted = not failed
                self._end(reason)

    async def _start(self, index: int) -> None:
        """Starts a fresh process, after a pause that doubles with each death before the worker was warm."""
        deaths = self._deaths[index]
        await asyncio.sleep(min(0.1 * 2**deaths, _LONGEST_RESTART_PAUSE_S) if deaths else 0.0)
        self._deaths[index] += 1
        segments = [segment.descriptor for segment in self.memory.worker_segments(index)]
        command = [
            *self._args.worker_program,
            "--run-dir",
            str(self._args.run_dir),
            "--worker",
            str(index),
            "--run-file",
            self._credentials.fencing.run_file_sha256,
            "--host",
            self._args.host,
            "--node",
            self._args.node,
            *(["--certificates", str(self._certificates)] if self._certificates else []),
            "--segments",
            *map(str, segments),
        ]
        attempt, name = self._args.attempt, f"{self._args.node}-{index}"
        path = RunDirectory(self._args.run_dir).named_log(attempt, name)
        log = order_for(path, name, attempt, self._spec.observe, self._args.node)
        self._state.on_started(index, time.monotonic())
        try:
            self._workers[index] = await WorkerProcess.start(
                command,
                segments,
                self._spec.runtime,
                log,
                lambda said: self._on_worker_message(index, said),
                lambda code, text: self._on_exit(index, code, text),
            )
        except OSError as error:  # no memory, no processes or no disk now: tried again like one that has died
            self._on_exit(index, 1, f"it could not be started: {error}")

    def _token_of(self, name: str) -> str | None:
        """The token of this name; the present one if no name is given. Looks into the run directory for one that is not known yet."""
        if name and name != token_name(self._credentials.token):
            self._take_over(name)
        # Also one that is refused by now: an epoch keeps the token under which the first of its ranks were told to meet.
        known = (self._credentials.token, *(token for token, _ in self._credentials.earlier.earlier))
        return next((token for token in known if name in ("", token_name(token))), None)

    async def _read_token(self, name: str) -> None:
        """Takes over the token of this name; a network file system may show it only after a while."""
        deadline_s = time.monotonic() + _NEW_TOKEN_S
        while not self._take_over(name):
            if time.monotonic() > deadline_s:
                self.log(
                    "the run's new token is not in its directory, as this node sees it; it looks again when the earlier one is refused"
                )
                return
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _take_over(self, name: str) -> bool:
        """Changes to the token of this name if the run directory has it; true if this agent has it now."""
        if name == token_name(self._credentials.token):
            return True
        with suppress(SecurityError):
            found = read_keyring(self._args.run_dir)
            if token_name(found.token) == name:
                self._change_token(found)
                return True
        return False

    def _look_for_new_token(self) -> None:
        """Changes to the token that has followed this agent's by the run directory: it may have missed a rotation.

        Whoever refuses ours has proven nothing. So another token in the directory is no reason, unless it was made in the place of ours.
        """
        with suppress(SecurityError):
            found = read_keyring(self._args.run_dir)
            if found.follows(self._credentials.token):
                self._change_token(found)

    def _change_token(self, found: Keyring) -> None:
        self._credentials = self._credentials.with_keys(found)
        self._data.change_token(found.token, found.accepted)
        self._link.change_token(self._credentials)
        self.log("has taken over the run's new token")

    async def _save(self, order: SaveSnapshots) -> None:
        """Writes this node's share of a checkpoint from its memory; the run ends when all of it is on disk."""

        def stopped() -> bool:
            return self._over.is_set() or self._state.saving > order.epoch

        committed, trouble = await self._courier.save(order, stopped)
        self._do(self._state.on_saved(order, committed=committed, trouble=trouble))

    async def _push(self, index: int, taken: SnapshotTaken, address: str) -> None:
        """Streams a snapshot to its buddy, until it has arrived or its epoch is over."""
        key = SnapshotKey(taken.ranks, taken.rank, taken.step)
        if await self._courier.push(
            index, key, address, lambda: self._state.workers[index].epoch == taken.epoch
        ):
            self._do(self._state.on_pushed(index, taken))


def _listening(host: str) -> str:
    """The address to listen on: loopback stays private; else every interface, since ``host`` may be an alias."""
    return host if host.startswith("127.") else "0.0.0.0"


def own_host(coordinator: str) -> str:
    """This machine's address on its route to the coordinator; the other nodes can most likely reach it too."""
    host, _, port = coordinator.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host or "127.0.0.1", int(port or 1)))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def run_agent(args: AgentArgs, certificates: Path | None = None) -> None:
    """Runs an agent in this process, to the end of the run; if the run is started again meanwhile, for that start too.

    Raises:
        RunDirectoryError: There is no run in the run directory.
        SecurityError: Token or certificates are missing.
        AgentError: The agent ends before the run; the message says why and what to do.
    """
    asyncio.run(_run(args, certificates))


async def _run(args: AgentArgs, certificates: Path | None) -> None:
    directory = RunDirectory(args.run_dir)
    directory.logs.mkdir(exist_ok=True)
    memory: SnapshotMemory | None = None
    workers, attempt = 0, args.attempt
    while True:
        spec = read_resolved(directory)
        credentials = credentials_of(args.run_dir, spec, attempt, certificates, ("join",))
        with suppress(DescriptorLimitError):  # a data port makes do with fewer
            raise_descriptor_limit(spec.fleet.nodes)
        # The snapshots are of the same run, whatever its fleet looks like now; the next epoch restores the newest state that is whole.
        kept = memory if workers == spec.fleet.workers_per_node else None
        agent = Agent(replace(args, attempt=attempt), spec, credentials, kept)
        found = await agent.run()
        if found is None:
            return
        memory, workers, attempt = agent.memory, spec.fleet.workers_per_node, found


def leave(code: int) -> NoReturn:
    """Ends this process at once, without waiting for a push that hangs in a dead peer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> NoReturn:
    """The process that a launcher starts for each node of a local fleet."""
    die_with_parent()
    capture_output(os.environ)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    parser = argparse.ArgumentParser(prog="phalanx.fleet.node.agent")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--domain", nargs="*", default=())
    parser.add_argument("--spare", action="store_true")
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--certificates", type=Path)
    parser.add_argument("--may-lead", action="store_true")
    parser.add_argument("--worker-program", nargs="+", default=list(WORKER_PROGRAM))
    given = parser.parse_args()
    args = AgentArgs(
        run_dir=given.run_dir,
        node=given.node,
        attempt=given.attempt,
        coordinator=given.coordinator,
        host=given.host,
        domain=tuple(given.domain),
        started_as_spare=given.spare,
        faults=tuple(given.fault),
        worker_program=tuple(given.worker_program),
        at_signal="wait" if in_slurm_step(os.environ) else "end",
        may_lead=given.may_lead,
    )
    try:
        run_agent(args, given.certificates)
    except (AgentError, RunDirectoryError, SecurityError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        leave(1)
    leave(0)


if __name__ == "__main__":
    main()
