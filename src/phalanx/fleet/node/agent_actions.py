"""What an agent's state is made of, and the actions by which it says what is to be done."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.fleet.core.messages import NO_EPOCH, NO_STEP, AgentMessage
from phalanx.fleet.node.worker_link import Taken, ToWorker


@dataclass(frozen=True)
class Say:
    """A report for the coordinator."""

    report: AgentMessage


@dataclass(frozen=True)
class Tell:
    """A message for a worker."""

    worker: int
    message: ToWorker


@dataclass(frozen=True)
class Kill:
    """SIGKILL for a worker; its end comes back as ``exited``."""

    worker: int


@dataclass(frozen=True)
class Start:
    """A fresh process for a worker."""

    worker: int


@dataclass(frozen=True)
class Push:
    """Stream a worker's newest snapshot to the buddy at ``address``, then call ``pushed``."""

    worker: int
    taken: Taken
    address: str


@dataclass(frozen=True)
class Forget:
    """Snapshots newer than this step belong to a future that the run does not go to."""

    after_step: int


@dataclass(frozen=True)
class Explain:
    """Write into the log what the workers are at: no step has ended for so long."""

    silent_s: float


@dataclass(frozen=True)
class Examine:
    """Check what the workers share, and call ``examined``."""


@dataclass(frozen=True)
class End:
    """Kill all workers and end: the run is over."""

    reason: str


Action = Say | Tell | Kill | Start | Push | Forget | Explain | Examine | End


@dataclass(frozen=True)
class Identity:
    """How a node presents itself."""

    node: str
    workers: int
    host: str
    data_port: int = 0
    domain: tuple[str, ...] = ()
    reserve: bool = False
    """Started as a spare."""


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
    """It owes an answer to ``Explain``."""
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
