"""What a launcher is to start on this machine: the nodes of a local fleet, or the one node of a cluster that leads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
