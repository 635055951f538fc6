"""Launcher of a fleet's processes on this machine: the plan of nodes, and the start of the coordinator and the agents."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.fleet.control.security import TOKEN_VARIABLES, TokenRole, keyring_after
from phalanx.observe.logs.child_output import ChildOutput
from phalanx.observe.logs.log_file import order_for
from phalanx.process.child import Child
from phalanx.process.stop_signals import StopOrders
from phalanx.run.directory.paths import DirectoryKeeper
from phalanx.train.lifecycle.ending import remove_failure
from phalanx.train.start.open_run import OpenRun

# Plan: the nodes of a local fleet, or the one node of a cluster that leads.


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
        return ["--host", self.host, "--port", str(self.port), "--node", self.node, *self._certified]

    @property
    def agent_arguments(self) -> list[str]:
        """Command-line arguments for ``phalanx.fleet.node.agent``, beside the node's name."""
        domain = ["--domain", *self.domain] if self.domain else []
        return ["--host", self.host, "--may-lead", *domain, *self._certified]

    @property
    def _certified(self) -> list[str]:
        return ["--certificates", str(self.certificates)] if self.certificates else []


@dataclass(frozen=True)
class SupervisionTimes:
    """Waits of the supervision of a local fleet's processes, in seconds."""

    first_pause_s: float = 0.2
    """Pause before the first restart of a process that has died."""
    stopped_s: float = 60.0
    """A process that a signal has stopped for so long is killed and replaced."""
    farewell_s: float = 10.0
    """Time for agents to exit once the run is over."""


@dataclass(frozen=True)
class LocalFleet:
    """The fleet to start."""

    nodes: int
    spares: int = 0
    faults: tuple[str, ...] = ()
    """Sentences of ``phalanx.fleet.faults.fault``, passed on to every worker."""
    repair_s: float = 60.0
    """Seconds after which a node whose agent has died comes back, its memory empty. It comes sooner if too few are left."""
    worker_program: tuple[str, ...] = ()
    """Replaces the real worker; for tests."""
    lead: Lead | None = None
    """If this machine is one node of a cluster; the agents of the others are started there."""
    times: SupervisionTimes = SupervisionTimes()

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


@dataclass
class Launcher:
    """What every process of a fleet is started with. Its methods raise ``OSError`` if a process cannot be started."""

    run: OpenRun
    fleet: LocalFleet
    environment: dict[str, str] = field(repr=False)
    """Lets the processes import the user's model, and tells them the token."""
    operator: dict[str, str] = field(repr=False)
    """For the coordinator alone: the operators' token."""
    orders: StopOrders
    """Through which the user is told of what goes wrong."""

    def __post_init__(self) -> None:
        self._keeper = DirectoryKeeper(self.run.directory)

    def coordinator(self) -> Child:
        """Starts the coordinator."""
        lead = self.fleet.lead
        where = lead.coordinator_arguments if lead else ["--port", str(self.run.spec.fleet.port)]
        self._keep_directory()
        return self._process("coordinator", "phalanx.fleet.control.coordinator", *where)

    def agent(self, name: str) -> Child:
        """Starts the agent of a node."""
        arguments = ["--node", name]
        if name in self.fleet.spare_names:
            arguments.append("--spare")
        arguments += self.fleet.lead.agent_arguments if self.fleet.lead else []
        for fault in self.fleet.faults:
            arguments += ["--fault", fault]
        if self.fleet.worker_program:
            arguments += ["--worker-program", *self.fleet.worker_program]
        self._keep_directory()
        return self._process(name, "phalanx.fleet.node.agent", *arguments)

    def _keep_directory(self) -> None:
        """Mends what a process that is about to start will read."""
        with suppress(OSError):  # the process says what is wrong
            for told in self._keeper.look():
                self.orders.tell(told)

    def _process(self, name: str, module: str, *arguments: str) -> Child:
        run = self.run
        command = [sys.executable, "-m", module, "--run-dir", str(run.directory.path)]
        log, observe = self.log(name), run.spec.observe
        lead = self.fleet.lead
        node = name if name != "coordinator" else lead.node if lead is not None else None
        inherited = {key: value for key, value in os.environ.items() if key not in self.operator}
        self._read_tokens()
        own = self.operator if name == "coordinator" else {}
        remove_failure(log)  # of the process before it in this attempt, which wrote the same log
        environment = {**inherited, **self.environment, **own}
        output = ChildOutput(
            order_for(log, name, run.attempt, observe, node), environment, self.orders.troubles.append
        )
        return Child.start(
            [*command, "--attempt", str(run.attempt), *arguments],
            environment,
            output=output,
            keep_open=[run.lock_fd],  # the directory stays taken until the last process has ended
        )

    def _read_tokens(self) -> None:
        """Takes over tokens that an operator has changed meanwhile; those of now are kept if their files are gone or damaged."""
        known: dict[TokenRole, dict[str, str]] = {"join": self.environment, "operate": self.operator}
        for role, environment in known.items():
            variable = TOKEN_VARIABLES[role]
            environment[variable] = keyring_after(environment[variable], self.run.directory.path, role).token

    def log(self, name: str) -> Path:
        """The log of a coordinator or agent."""
        return self.run.directory.named_log(self.run.attempt, name)
