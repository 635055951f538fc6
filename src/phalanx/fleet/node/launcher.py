"""The start of a fleet's processes: the launcher of a machine, and the arguments of an agent.

``Launcher`` starts the coordinator and the agents of a local fleet, or of the leading node of a cluster.
``parsed`` reads the command line that it writes for an agent. Both ends follow the run's token, which may
change during the run.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
from phalanx.fleet.control.succession.reign import CoordinatorArgs
from phalanx.hardware.local.network import address_towards, listening_address, split_address
from phalanx.observe.logs.child_output import ChildOutput
from phalanx.observe.logs.log_file import order_for
from phalanx.process.arguments import words_of
from phalanx.process.child import Child
from phalanx.process.this_process import StopOrders, host_name
from phalanx.run.directory.paths import DirectoryKeeper
from phalanx.train.lifecycle.ending import remove_failure
from phalanx.train.start.open_run import OpenRun
from phalanx.wire.messages import token_name

# Arguments of an agent process, and the addresses of its machine.

WORKER_PROGRAM = (sys.executable, "-m", "phalanx.fleet.node.rank.worker_main")

AtSignal = Literal["end", "wait", "leave"]
"""``end``: the agent ends at once, and the fleet recovers from its loss.

``wait``: the agent ends with the run. A scheduler sends the signal to all processes of a job that it is about
to end, and the leading node has the run saved. ``leave``: the node leaves the fleet at the next step
boundary, and no step is computed twice.
"""


@dataclass(frozen=True)
class AgentArgs:
    """The arguments of an agent process."""

    run_dir: Path
    node: str
    attempt: int = 0
    coordinator: str = ""
    """"host:port"; empty: read it from fleet.json in the run directory."""
    host: str = "127.0.0.1"
    """This machine, as the other nodes reach it."""
    domain: tuple[str, ...] = ()
    """Failure domains from the widest to the narrowest: hall, switch, rack."""
    started_as_spare: bool = False
    """True if, at first, it takes ranks only in place of missing nodes."""
    faults: tuple[str, ...] = ()
    """Faults in the grammar of ``phalanx.fleet.fault``, passed on to every worker."""
    worker_program: tuple[str, ...] = WORKER_PROGRAM
    at_signal: AtSignal = "end"
    """Reaction to the first SIGTERM or Ctrl-C; a second one ends the agent at once."""
    may_lead: bool = False
    """True if its machine may succeed a coordinator that is lost (``fleet.succession_s``)."""
    certificates: Path | None = None
    """The folder of its certificates, if connections are encrypted."""

    @property
    def listening_on(self) -> str:
        """The address to listen on."""
        return listening_address(self.host)


def own_host(coordinator: str) -> str:
    """Return this machine's address on its route to the coordinator; the other nodes can most likely reach it
    too.
    """
    return address_towards(split_address(coordinator)[0] or "127.0.0.1") or host_name()


# An agent's copy of the run's token: by name, read from the run directory.

_NEW_TOKEN_S, _LOOK_AGAIN_S = 60.0, 0.5


class TokenHolder:
    """The credentials of one agent, with the present token."""

    def __init__(
        self,
        run_dir: Path,
        credentials: Credentials,
        on_change: Callable[[Keyring], None],
        log: Callable[[str], None],
    ) -> None:
        """Set up the holder. ``on_change`` is called with each new token; ``log`` takes lines for people."""
        self._run_dir, self._on_change, self._log = run_dir, on_change, log
        self.credentials = credentials

    def token_of(self, name: str) -> str | None:
        """Return the token of this name, or the present one if the name is empty; None if it is unknown.

        Another name than the present one's is looked up in the run directory, and becomes present if it is the
        newest there. Earlier tokens count, also expired ones.
        """
        if name and name != token_name(self.credentials.token):
            self._take_over(name)
        # Also one that is refused by now: an epoch keeps the token with which its first ranks met.
        tokens = (self.credentials.token, *(token for token, _ in self.credentials.earlier.earlier))
        return next((token for token in tokens if name in ("", token_name(token))), None)

    async def read(self, name: str) -> None:
        """Change to the token of this name, as soon as the run directory shows it; a network file system may be
        late.

        Gives up after a minute, and logs that.
        """
        deadline_s = time.monotonic() + _NEW_TOKEN_S
        while not self._take_over(name):
            if time.monotonic() > deadline_s:
                self._log(
                    "the run's new token is not in its directory, as this node sees it; it looks again when the earlier one is refused"
                )
                return
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _take_over(self, name: str) -> bool:
        """Change to the token of this name if the run directory has it. Return True if this agent has it now."""
        if name == token_name(self.credentials.token):
            return True
        with suppress(SecurityError):
            keys = read_keyring(self._run_dir)
            if token_name(keys.token) == name:
                self._change(keys)
                return True
        return False

    def look(self) -> None:
        """Change to the token in the run directory if it was made by a rotation of ours: this agent may have missed
        that.

        Another token there is ignored, since a refusal of ours proves nothing.
        """
        with suppress(SecurityError):
            keys = read_keyring(self._run_dir)
            if keys.follows(self.credentials.token):
                self._change(keys)

    def _change(self, keys: Keyring) -> None:
        """Use new tokens, pass them on, and log that."""
        self.credentials = self.credentials.with_keys(keys)
        self._on_change(keys)
        self._log("has taken over the run's new token")


# The launcher's plan: the nodes of a local fleet, or the leading node of a cluster.


@dataclass(frozen=True)
class LeadNode:
    """The arguments of the cluster node that runs the coordinator."""

    node: str
    host: str
    """This machine, as the others reach it."""
    port: int
    domain: tuple[str, ...] = ()
    started_as_spare: bool = False
    certificates: Path | None = None


@dataclass(frozen=True)
class SupervisionTimes:
    """Waits of the supervision of a local fleet's processes, in seconds."""

    first_pause_s: float = 0.2
    """Pause before the first restart of a process that has died."""
    stopped_s: float = 60.0
    """A process that a signal has suspended for this time is killed and replaced."""
    farewell_s: float = 10.0
    """Time for agents to exit once the run is over."""


@dataclass(frozen=True)
class LocalFleet:
    """The fleet to start."""

    nodes: int
    spares: int = 0
    faults: tuple[str, ...] = ()
    """Faults in the grammar of ``phalanx.fleet.fault``, passed on to every worker."""
    repair_s: float = 60.0
    """Seconds after which a node whose agent has died is restarted, its memory empty; sooner if too few nodes
    are left.
    """
    worker_program: tuple[str, ...] = ()
    """Replaces the real worker; for tests."""
    lead: LeadNode | None = None
    """Set if this machine is one node of a cluster; the agents of the others are started there."""
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
    """Starts the processes of a fleet. Its methods raise ``OSError`` if a process cannot be started."""

    run: OpenRun
    fleet: LocalFleet
    environment: dict[str, str] = field(repr=False)
    """Environment variables for the processes: the user's model, and the token."""
    operator: dict[str, str] = field(repr=False)
    """Environment variables for the coordinator alone: the operators' token."""
    orders: StopOrders
    """Prints troubles to the user."""

    def __post_init__(self) -> None:
        self._keeper = DirectoryKeeper(self.run.directory)

    def coordinator(self) -> Child:
        """Start the coordinator's process and return it; damaged files of the run directory are repaired first.
        Raises ``OSError``.
        """
        run, lead = self.run, self.fleet.lead
        args = CoordinatorArgs(run.directory.path, run.attempt, port=run.spec.fleet.port)
        if lead is not None:
            args = replace(
                args, host=lead.host, port=lead.port, node=lead.node, certificates=lead.certificates
            )
        return self._process("coordinator", "phalanx.fleet.control.coordinator", args)

    def agent(self, name: str) -> Child:
        """Start the process of a node's agent, with its faults and worker program, and return it. Raises ``OSError``."""
        fleet, lead = self.fleet, self.fleet.lead
        args = AgentArgs(
            self.run.directory.path,
            name,
            self.run.attempt,
            started_as_spare=name in fleet.spare_names,
            faults=fleet.faults,
            worker_program=fleet.worker_program or WORKER_PROGRAM,
        )
        if lead is not None:
            args = replace(
                args, host=lead.host, domain=lead.domain, may_lead=True, certificates=lead.certificates
            )
        return self._process(name, "phalanx.fleet.node.agent", args)

    def _process(self, name: str, module: str, args: AgentArgs | CoordinatorArgs) -> Child:
        """Start a module of the fleet with its log and tokens, in place of the log's earlier failure record. Repair
        the files that it will read.

        Only the coordinator gets the operators' token. The child keeps the run's lock open. Raises ``OSError``.
        """
        with suppress(OSError):  # The process reports the error.
            for text in self._keeper.look():
                self.orders.notify(text)
        run = self.run
        log, observe = self.log(name), run.spec.observe
        inherited = {key: value for key, value in os.environ.items() if key not in self.operator}
        self._read_tokens()
        own = self.operator if name == "coordinator" else {}
        remove_failure(log)  # From an earlier process of this attempt with the same log.
        environment = {**inherited, **self.environment, **own}
        output = ChildOutput(
            order_for(log, name, run.attempt, observe, args.node or None),
            environment,
            self.orders.troubles.append,
        )
        return Child.start(
            [sys.executable, "-m", module, *words_of(args)],
            environment,
            output=output,
            keep_open=[run.lock_fd],  # The directory stays locked until the last process has ended.
        )

    def _read_tokens(self) -> None:
        """Take over tokens that an operator has changed.

        The present ones are kept if their files are missing or damaged.
        """
        environments: dict[TokenRole, dict[str, str]] = {"join": self.environment, "operate": self.operator}
        for role, environment in environments.items():
            variable = TOKEN_VARIABLES[role]
            environment[variable] = keyring_after(environment[variable], self.run.directory.path, role).token

    def log(self, name: str) -> Path:
        """Return the path of the log of a coordinator or agent."""
        return self.run.directory.named_log(self.run.attempt, name)
