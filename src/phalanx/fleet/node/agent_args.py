"""The arguments of an agent's process, and the addresses of its machine."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phalanx.hardware.local.network import address_towards, listening_address, split_address
from phalanx.launch.foreign import in_slurm_step

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
