"""Launches and supervises the processes of a fleet on this machine, each in a session of its own.

A local fleet is a coordinator and one agent per "node"; on a cluster, the node that leads runs the coordinator and its own agent.
This process starts them, restarts the coordinator if it dies, brings a killed node of a local fleet back after its repair time,
and passes Ctrl-C on to the coordinator as a request to save and stop. If this process is killed, the kernel kills all of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.fleet.control.fleet_file import FleetFile, FleetFileError, path_in, read_fleet_file
from phalanx.fleet.control.security import run_token
from phalanx.fleet.core.state import FleetPhase
from phalanx.run.factory import rank_environment
from phalanx.train.lifecycle.ending import Ending, last_words, remove_failure
from phalanx.train.lifecycle.interrupt import StopOrders, on_stop_signals
from phalanx.train.lifecycle.open_run import OpenRun
from phalanx.train.lifecycle.worker import EXIT_STOPPED

_POLL_S = 0.1
_COORDINATOR_PAUSE_S = 0.2
_MOST_COORDINATORS = 1000
_QUICK_DEATH_S, _QUICK_DEATHS = 5.0, 5
"""A coordinator that fails so many times in a row, each time so soon after its start, is not restarted."""
_FAREWELL_S = 10.0


@dataclass(frozen=True)
class Lead:
    """The arguments of the one node of a cluster that runs the coordinator."""

    node: str
    host: str
    """This machine, as the others reach it."""
    port: int
    domain: tuple[str, ...] = ()
    started_as_spare: bool = False
    certificates: Path | None = None

    @property
    def coordinator_arguments(self) -> list[str]:
        """Command-line arguments for ``phalanx.fleet.control.coordinator``."""
        return ["--host", self.host, "--port", str(self.port), *self._certified]

    @property
    def agent_arguments(self) -> list[str]:
        """Command-line arguments for ``phalanx.fleet.node.agent``, beside the node's name."""
        domain = ["--domain", *self.domain] if self.domain else []
        return ["--host", self.host, *domain, *self._certified]

    @property
    def _certified(self) -> list[str]:
        return ["--certificates", str(self.certificates)] if self.certificates else []


@dataclass(frozen=True)
class LocalFleet:
    """The fleet to start."""

    nodes: int
    spares: int = 0
    faults: tuple[str, ...] = ()
    """Sentences of ``phalanx.fleet.faults.fault``, passed on to every worker."""
    repair_s: float | None = None
    """Seconds after which a killed node comes back, empty; ``None``: never."""
    worker_program: tuple[str, ...] = ()
    """Replaces the real worker; for tests."""
    lead: Lead | None = None
    """If this machine is one node of a cluster; the agents of the others are started there."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes on this machine, spares last."""
        if self.lead is not None:
            return (self.lead.node,)
        return tuple(f"node-{number}" for number in range(self.nodes + self.spares))

    @property
    def spare_names(self) -> tuple[str, ...]:
        """The names of the nodes on this machine that get no rank at first."""
        if self.lead is not None:
            return self.names if self.lead.started_as_spare else ()
        return self.names[self.nodes :]


def run_fleet(
    run: OpenRun,
    fleet: LocalFleet,
    while_running: Callable[[Callable[[], bool]], None],
    tell: Callable[[str], None] = lambda _words: None,
) -> Ending:
    """Runs a fleet to the run's end.

    Args:
        run: The opened run directory; its ``spec.fleet`` must say the same number of nodes.
        fleet: What to start.
        while_running: Called once with a function that tells whether the run has ended; returns after it has (it shows
            the run's progress meanwhile). Whatever it raises asks the run to save and stop, and is raised when it has.
        tell: Tells the user that a request to stop was heard, and what comes of it.
    """
    path = run.directory.path
    run_token(path)  # made before anybody needs it
    path_in(path).unlink(missing_ok=True)  # of the attempt before
    # Computed once: a restart must not fail because the user's model file is gone meanwhile.
    processes = _Processes(run, fleet, rank_environment(run.spec.model.factory), StopOrders(tell))
    try:
        with on_stop_signals(processes.ask_to_stop):
            processes.start()
            try:
                while_running(processes.ended)
            except BaseException:
                if not processes.orders.made:
                    processes.ask_to_stop()
                processes.wait()
                raise
            processes.wait()
    finally:
        processes.end()
    return _ending(run, processes)


@dataclass
class _Processes:
    """The processes of a local fleet, and the state of their supervision."""

    run: OpenRun
    fleet: LocalFleet
    factory_environment: dict[str, str]
    """Lets the processes import the user's model."""
    orders: StopOrders
    coordinator: subprocess.Popen[bytes] | None = None
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    back_at_s: dict[str, float] = field(default_factory=dict)
    stop_told: tuple[int, int] = (0, 0)
    """Process id of the coordinator that was told to stop, and how many times."""
    started: int = 0
    started_s: float = 0.0
    quick_deaths: int = 0
    over: bool = False

    def start(self) -> None:
        """Starts the coordinator and all agents; the agents poll fleet.json for its address."""
        self._start_coordinator()
        for name in self.fleet.names:
            self.agents[name] = self._agent(name)

    def ended(self) -> bool:
        """Restarts what has died and is to come back; returns True once the run is over. Call it again and again."""
        self.orders.tell_new()
        coordinator = self.coordinator
        if coordinator is not None and coordinator.poll() is not None and not self.over:
            self._coordinator_died(coordinator.returncode)
        self._hand_on_stop()
        for name, agent in list(self.agents.items()):
            if agent.poll() is not None:
                del self.agents[name]
                if self.fleet.repair_s is not None and not self.over:
                    self.back_at_s[name] = time.monotonic() + self.fleet.repair_s
        for name, due_s in list(self.back_at_s.items()):
            if time.monotonic() >= due_s and not self.over:
                del self.back_at_s[name]
                self.agents[name] = self._agent(name)
        return self.over

    def wait(self) -> None:
        """Waits until the run is over."""
        while not self.ended():
            time.sleep(_POLL_S)

    def ask_to_stop(self) -> None:
        """Counts one request to save and stop; it is passed on by the next call of ``ended``."""
        self.orders.made += 1

    def _coordinator_died(self, code: int) -> None:
        seen = self.seen()
        if seen is not None and seen.over and code in (0, 1):
            self.over = True
            return
        lived_s = time.monotonic() - self.started_s
        self.quick_deaths = self.quick_deaths + 1 if lived_s < _QUICK_DEATH_S and code > 0 else 0
        if self.quick_deaths >= _QUICK_DEATHS or self.started >= _MOST_COORDINATORS:
            self.over = True
            return
        time.sleep(_COORDINATOR_PAUSE_S)
        self.stop_told = 0, 0
        self._start_coordinator()

    def seen(self) -> FleetFile | None:
        """fleet.json, if it can be read."""
        with suppress(FleetFileError):
            return read_fleet_file(self.run.directory.path)
        return None

    def _hand_on_stop(self) -> None:
        """Passes the user's requests on to the coordinator: the first is to save and stop, a second to end at once.

        Not before it has written fleet.json: until then SIGTERM would kill it, and the file says whether it has learned of
        the request from its journal.
        """
        if self.stop_told[1] >= min(self.orders.made, 2):
            return
        coordinator, seen = self.coordinator, self.seen()
        if coordinator is None or seen is None or seen.coordinator_pid != coordinator.pid:
            return
        told = self.stop_told[1] if self.stop_told[0] == coordinator.pid else int(seen.stopping)
        if told < self.orders.made and coordinator.poll() is None:
            coordinator.send_signal(signal.SIGTERM)
            told += 1
        self.stop_told = coordinator.pid, told

    def end(self) -> None:
        """Waits a moment for the agents to exit, then kills every process that is left, workers included."""
        seen = self.seen()
        told = self.over and seen is not None and seen.over
        deadline_s = time.monotonic() + (_FAREWELL_S if told else 0.0)
        for agent in self.agents.values():
            with suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.0, deadline_s - time.monotonic()))
        for process in (*self.agents.values(), self.coordinator):
            if process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _start_coordinator(self) -> None:
        self.started, self.started_s = self.started + 1, time.monotonic()
        lead = self.fleet.lead
        where = lead.coordinator_arguments if lead else ["--port", str(self.run.spec.fleet.port)]
        self.coordinator = self._process("coordinator", "phalanx.fleet.control.coordinator", *where)

    def _agent(self, name: str) -> subprocess.Popen[bytes]:
        arguments = ["--node", name]
        if name in self.fleet.spare_names:
            arguments.append("--spare")
        arguments += self.fleet.lead.agent_arguments if self.fleet.lead else []
        for fault in self.fleet.faults:
            arguments += ["--fault", fault]
        if self.fleet.worker_program:
            arguments += ["--worker-program", *self.fleet.worker_program]
        return self._process(name, "phalanx.fleet.node.agent", *arguments)

    def _process(self, name: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        run = self.run
        command = [sys.executable, "-m", module, "--run-dir", str(run.directory.path)]
        log = self.log(name)
        remove_failure(log)  # of the process before it in this attempt, which wrote the same log
        with log.open("ab") as output:
            return subprocess.Popen(
                [*command, "--attempt", str(run.attempt), *arguments],
                env={
                    **os.environ,
                    "PHALANX_LAUNCHER": str(os.getpid()),
                    **self.factory_environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[run.lock_fd],  # the directory stays taken until the last process has ended
            )

    def log(self, name: str) -> Path:
        """The log of a coordinator or agent."""
        return self.run.directory.named_log(self.run.attempt, name)


def _ending(run: OpenRun, processes: _Processes) -> Ending:
    seen = processes.seen()
    if run.directory.finished_result() is not None:
        return Ending("finished")
    if seen is not None and seen.phase is FleetPhase.FINISHED:
        if seen.result_json:
            return Ending("finished")
        return Ending("stopped", exit_code=EXIT_STOPPED, unsaved=processes.orders.made > 1)
    if seen is not None and seen.phase is FleetPhase.FAILED:
        return Ending("failed", None, 1, seen.reason)
    why = "the coordinator could not run"
    return Ending("failed", None, 1, last_words(processes.log("coordinator"), why, prefix=f"{why}: "))
