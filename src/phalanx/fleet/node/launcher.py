"""The start of a fleet's processes: the launcher of a machine, and what an agent is started with.

``Launcher`` starts the coordinator and the agents of a local fleet, or of the one node of a cluster that leads. The command line that it
writes for an agent is read by ``parsed``. Both ends follow the run's token, which may change during the run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from phalanx.fleet.control.credentials import Credentials
from phalanx.fleet.control.security import (
    TOKEN_VARIABLES,
    Keyring,
    SecurityError,
    TokenRole,
    keyring_after,
    read_keyring,
)
from phalanx.hardware.local.network import address_towards, listening_address, split_address
from phalanx.launch.foreign import in_slurm_step
from phalanx.observe.logs.child_output import ChildOutput
from phalanx.observe.logs.log_file import order_for
from phalanx.process.child import Child
from phalanx.process.stop_signals import StopOrders
from phalanx.run.directory.paths import DirectoryKeeper
from phalanx.train.lifecycle.ending import remove_failure
from phalanx.train.start.open_run import OpenRun
from phalanx.wire.messages import token_name

# What an agent is started with: arguments, and the addresses of its machine.

WORKER_PROGRAM = (sys.executable, "-m", "phalanx.fleet.node.rank.worker_main")

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
    """Sentences of ``phalanx.fleet.fault``, passed on to every worker."""
    worker_program: tuple[str, ...] = WORKER_PROGRAM
    at_signal: AtSignal = "end"
    """What the first SIGTERM or Ctrl-C means; a second one ends the agent at once."""
    may_lead: bool = False
    """Its machine may succeed a coordinator that is lost (``fleet.succession_s``)."""

    @property
    def listening_on(self) -> str:
        """The address to listen on."""
        return listening_address(self.host)


def own_host(coordinator: str) -> str:
    """This machine's address on its route to the coordinator; the other nodes can most likely reach it too."""
    return address_towards(split_address(coordinator)[0] or "127.0.0.1") or socket.gethostname()


def parsed() -> tuple[AgentArgs, Path | None]:
    """The arguments on this process's command line, and the folder of its certificates."""
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
    return args, given.certificates


# An agent's copy of the run's token: by name, read from the run directory.

_NEW_TOKEN_S, _LOOK_AGAIN_S = 60.0, 0.5


class TokenHolder:
    """The credentials of one agent, with the token of now."""

    def __init__(
        self,
        run_dir: Path,
        credentials: Credentials,
        on_change: Callable[[Keyring], None],
        log: Callable[[str], None],
    ) -> None:
        """``on_change`` is called with the token that has taken the place of the one before; ``log`` takes lines for people."""
        self._run_dir, self._on_change, self._log = run_dir, on_change, log
        self.credentials = credentials

    def token_of(self, name: str) -> str | None:
        """The token of this name; the present one if no name is given. Looks into the run directory for one that is not known yet."""
        if name and name != token_name(self.credentials.token):
            self._take_over(name)
        # Also one that is refused by now: an epoch keeps the token under which the first of its ranks were told to meet.
        known = (self.credentials.token, *(token for token, _ in self.credentials.earlier.earlier))
        return next((token for token in known if name in ("", token_name(token))), None)

    async def read(self, name: str) -> None:
        """Takes over the token of this name; a network file system may show it only after a while."""
        deadline_s = time.monotonic() + _NEW_TOKEN_S
        while not self._take_over(name):
            if time.monotonic() > deadline_s:
                self._log(
                    "the run's new token is not in its directory, as this node sees it; it looks again when the earlier one is refused"
                )
                return
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _take_over(self, name: str) -> bool:
        """Changes to the token of this name if the run directory has it; true if this agent has it now."""
        if name == token_name(self.credentials.token):
            return True
        with suppress(SecurityError):
            found = read_keyring(self._run_dir)
            if token_name(found.token) == name:
                self._change(found)
                return True
        return False

    def look(self) -> None:
        """Changes to the token that has followed this agent's by the run directory: it may have missed a rotation.

        Whoever refuses ours has proven nothing. So another token in the directory is no reason, unless it was made in the place of ours.
        """
        with suppress(SecurityError):
            found = read_keyring(self._run_dir)
            if found.follows(self.credentials.token):
                self._change(found)

    def _change(self, found: Keyring) -> None:
        self.credentials = self.credentials.with_keys(found)
        self._on_change(found)
        self._log("has taken over the run's new token")


# The launcher's plan: the nodes of a local fleet, or the one node of a cluster that leads.


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
    """Sentences of ``phalanx.fleet.fault``, passed on to every worker."""
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
                self.orders.notify(told)

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
