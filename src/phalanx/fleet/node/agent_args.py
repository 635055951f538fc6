"""The arguments of an agent's process, the addresses of its machine, and its copy of the run's token."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phalanx.fleet.control.credentials import Credentials
from phalanx.fleet.control.security import Keyring, SecurityError, read_keyring
from phalanx.hardware.local.network import address_towards, listening_address, split_address
from phalanx.launch.foreign import in_slurm_step
from phalanx.wire.messages import token_name

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
    """Sentences of ``phalanx.fleet.faults.fault``, passed on to every worker."""
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


# The run's token, which may change during the run: by name, read from the run directory.

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
