"""What an agent's state is made of, and the actions by which it says what is to be done."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.fleet.core.messages import NO_EPOCH, NO_STEP, AgentMessage
from phalanx.fleet.node.worker_link import SnapshotTaken, ToWorker


@dataclass(frozen=True)
class SendReport:
    """A report for the coordinator."""

    report: AgentMessage


@dataclass(frozen=True)
class TellWorker:
    """A message for a worker."""

    worker: int
    message: ToWorker


@dataclass(frozen=True)
class KillProcess:
    """SIGKILL for a worker; its end comes back as ``exited``."""

    worker: int


@dataclass(frozen=True)
class StartProcess:
    """A fresh process for a worker."""

    worker: int


@dataclass(frozen=True)
class PushSnapshot:
    """Stream a worker's newest snapshot to the buddy at ``address``, then call ``pushed``."""

    worker: int
    taken: SnapshotTaken
    address: str


@dataclass(frozen=True)
class DiscardSnapshots:
    """Snapshots newer than this step belong to a future that the run does not go to."""

    after_step: int


@dataclass(frozen=True)
class LogStall:
    """Write into the log what the workers are at: no step has ended for so long."""

    silent_s: float


@dataclass(frozen=True)
class CheckHealth:
    """Check what the workers share, and call ``examined``."""


@dataclass(frozen=True)
class EndAgent:
    """Kill all workers and end: the run is over."""

    reason: str


AgentAction = (
    SendReport
    | TellWorker
    | KillProcess
    | StartProcess
    | PushSnapshot
    | DiscardSnapshots
    | LogStall
    | CheckHealth
    | EndAgent
)


@dataclass(frozen=True)
class Identity:
    """How a node presents itself."""

    node: str
    workers: int
    host: str
    data_port: int = 0
    domain: tuple[str, ...] = ()
    started_as_spare: bool = False
    """At first it takes ranks only if the other nodes are too few."""


@dataclass(frozen=True)
class Patience:
    """How long a worker may be silent, and how long it may take to leave an epoch."""

    lease_s: float
    leave_s: float


@dataclass
class WorkerLife:
    """One worker's process; ``fresh`` for each of its lives."""

    running: bool = False
    meeting_point: str = ""
    epoch: int = NO_EPOCH
    rank: int = -1
    step: int = NO_STEP
    bound: bool = False
    leaving: bool = False
    finished: bool = False
    asked: bool = False
    """It owes an answer to ``SendFlightRecord``."""
    doomed: bool = False
    """It was sent SIGKILL and its end needs no report."""
    stuck: bool = False
    """It was sent SIGKILL since it did not leave an epoch."""
    heard_s: float = 0.0
    leave_by_s: float = math.inf
    last_words: str = ""

    def enter(self, epoch: int, rank: int, now_s: float) -> None:
        """It is told to become a rank."""
        self.epoch, self.rank, self.step, self.heard_s = epoch, rank, NO_STEP, now_s
        self.bound = self.leaving = self.finished = False
        self.last_words, self.leave_by_s = "", math.inf

    def leave(self, meeting_point: str) -> None:
        """It is in no epoch any more."""
        self.epoch, self.rank, self.step, self.bound, self.leaving = NO_EPOCH, -1, NO_STEP, False, False
        self.leave_by_s, self.meeting_point = math.inf, meeting_point
