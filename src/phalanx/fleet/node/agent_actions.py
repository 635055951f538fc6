"""The parts of an agent's state, and the actions that its handlers return for the shell to carry out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.fleet.core.commands import SaveSnapshots
from phalanx.fleet.core.messages import (
    NO_EPOCH,
    NO_STEP,
    AgentMessage,
)
from phalanx.fleet.node.worker_link import SnapshotTaken, ToWorker


@dataclass(frozen=True)
class SendReport:
    """Send a report to the coordinator."""

    report: AgentMessage


@dataclass(frozen=True)
class TellWorker:
    """Send a message to a worker."""

    worker: int
    message: ToWorker


@dataclass(frozen=True)
class KillProcess:
    """Send SIGKILL to a worker; its exit comes back as ``on_exit``."""

    worker: int


@dataclass(frozen=True)
class StartProcess:
    """Start a fresh process for a worker."""

    worker: int


@dataclass(frozen=True)
class StreamSnapshot:
    """Stream a worker's newest snapshot to the buddy at ``address``, then call ``on_pushed``."""

    worker: int
    taken: SnapshotTaken
    address: str


@dataclass(frozen=True)
class DiscardSnapshots:
    """Discard snapshots newer than this step: the run goes back to it, and they will be computed again."""

    after_step: int


@dataclass(frozen=True)
class LogStall:
    """Log the workers' state: no step has ended for ``silent_s``."""

    silent_s: float


@dataclass(frozen=True)
class CheckHealth:
    """Check the health of what the workers share (disk, network stack, GPUs), then call ``on_health_checked``."""


@dataclass(frozen=True)
class SaveMemory:
    """Write snapshots of this node's memory into a checkpoint, then call ``on_saved``."""

    order: SaveSnapshots


@dataclass(frozen=True)
class DealCopies:
    """From now on this node copies to the store the files of these of ``of`` ranks."""

    ranks: tuple[int, ...]
    of: int


@dataclass(frozen=True)
class ReadNewToken:
    """Read the run's token of this name, which has taken the place of the one of now, and attach with it."""

    name: str


@dataclass(frozen=True)
class EndAgent:
    """Kill all workers and end the agent."""

    reason: str
    failed: bool = False
    """The agent gives up; otherwise the run is over."""


AgentAction = (
    SendReport
    | TellWorker
    | KillProcess
    | StartProcess
    | StreamSnapshot
    | DiscardSnapshots
    | LogStall
    | CheckHealth
    | SaveMemory
    | DealCopies
    | ReadNewToken
    | EndAgent
)


@dataclass(frozen=True)
class Identity:
    """The constant facts that a node reports about itself."""

    node: str
    workers: int
    host: str
    data_port: int = 0
    domain: tuple[str, ...] = ()
    started_as_spare: bool = False
    """At first it takes ranks only if the other nodes are too few."""


@dataclass(frozen=True)
class Patience:
    """Time limits: how long a worker may be silent, how long it may take to leave an epoch, and how long no coordinator may be there.

    ``saves_s``: after so long without a coordinator that leads, no checkpoint is committed.
    """

    lease_s: float
    leave_s: float
    coordinator_s: float = math.inf
    saves_s: float = math.inf


@dataclass
class WorkerLife:
    """The agent's knowledge of one worker's process; a new value for each process."""

    running: bool = False
    meeting_point: str = ""
    epoch: int = NO_EPOCH
    rank: int = -1
    step: int = NO_STEP
    waiting_s: float = 0.0
    """Seconds for which it has waited for samples that an object store has not given."""
    bound: bool = False
    leaving: bool = False
    finished: bool = False
    owes_flight_record: bool = False
    """It has not yet answered ``SendFlightRecord``."""
    doomed: bool = False
    """It was sent SIGKILL and its end needs no report."""
    stuck: bool = False
    """It was sent SIGKILL since it did not leave an epoch."""
    heard_s: float = 0.0
    leave_by_s: float = math.inf
    last_words: str = ""

    def enter(self, epoch: int, rank: int, now_s: float) -> None:
        """Marks it as ``rank`` of ``epoch``, which it has been told to join."""
        self.epoch, self.rank, self.step, self.heard_s = epoch, rank, NO_STEP, now_s
        self.bound = self.leaving = self.finished = False
        self.waiting_s = 0.0
        self.last_words, self.leave_by_s = "", math.inf

    def leave(self, meeting_point: str) -> None:
        """Marks it as out of every epoch, ready to be rank 0 of the next at ``meeting_point`` (empty: not ready)."""
        self.epoch, self.rank, self.step, self.bound, self.leaving = NO_EPOCH, -1, NO_STEP, False, False
        self.leave_by_s, self.meeting_point = math.inf, meeting_point
