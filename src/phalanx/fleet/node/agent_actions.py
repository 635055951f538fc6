"""The parts of an agent's state, and the actions that its handlers return to the shell."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from phalanx.fleet.core.commands import Bind, FromMemory, SaveSnapshots
from phalanx.fleet.core.messages import NO_EPOCH, NO_STEP, AgentMessage
from phalanx.fleet.node import worker_link
from phalanx.fleet.node.worker_link import SnapshotTaken, ToWorker
from phalanx.hardware.local.network import join_address


@dataclass(frozen=True)
class SendReport:
    """Send a report to the coordinator."""

    report: AgentMessage


@dataclass(frozen=True)
class SendToWorker:
    """Send a message to a worker."""

    worker: int
    message: ToWorker


@dataclass(frozen=True)
class KillProcess:
    """Send SIGKILL to a worker; its exit comes back as ``on_exit``."""

    worker: int


@dataclass(frozen=True)
class StartProcess:
    """Start a new process for a worker."""

    worker: int


@dataclass(frozen=True)
class StreamSnapshot:
    """Stream a worker's newest snapshot to the buddy at ``address``, then call ``on_pushed``."""

    worker: int
    taken: SnapshotTaken
    address: str


@dataclass(frozen=True)
class DiscardSnapshots:
    """Discard snapshots newer than this step: the run rolls back to it and computes them again."""

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
    """Read the run's token of this name, which replaces the present one, and attach with it."""

    name: str


@dataclass(frozen=True)
class EndAgent:
    """Kill all workers and end the agent."""

    reason: str
    failed: bool = False
    """True if the agent gives up; otherwise the run is over."""


WorkerAction = SendToWorker | KillProcess | StartProcess | StreamSnapshot
"""Actions on one worker."""
MemoryAction = DiscardSnapshots | SaveMemory | DealCopies
"""Actions on the node's snapshots, and on the copies that it makes."""
AgentAction = SendReport | WorkerAction | MemoryAction | LogStall | CheckHealth | ReadNewToken | EndAgent


@dataclass(frozen=True)
class NodeIdentity:
    """The constant facts that a node reports about itself."""

    node: str
    workers: int
    host: str
    data_port: int = 0
    domain: tuple[str, ...] = ()
    started_as_spare: bool = False
    """True if, at first, it takes ranks only in place of missing nodes."""


@dataclass(frozen=True)
class Patience:
    """Time limits of a silent worker, of a worker that leaves an epoch, and of the wait for a coordinator.

    ``saves_s``: after this time without a leading coordinator, no checkpoint is committed.
    """

    lease_s: float
    leave_s: float
    coordinator_s: float = math.inf
    saves_s: float = math.inf


@dataclass
class WorkerLife:
    """The agent's record of one worker's process; a new value for each process."""

    running: bool = False
    meeting_point: str = ""
    epoch: int = NO_EPOCH
    rank: int = -1
    step: int = NO_STEP
    waiting_s: float = 0.0
    """Seconds for which it has waited for an object store's samples."""
    bound: bool = False
    leaving: bool = False
    finished: bool = False
    owes_flight_record: bool = False
    """True if it has not yet answered ``SendFlightRecord``."""
    doomed: bool = False
    """True if SIGKILL was sent and its end needs no report."""
    stuck: bool = False
    """True if SIGKILL was sent because it did not leave an epoch."""
    last_message_s: float = 0.0
    leave_by_s: float = math.inf
    last_words: str = ""

    def enter(self, epoch: int, rank: int, now_s: float) -> None:
        """Mark it as ``rank`` of ``epoch``, which it was ordered to join, with no progress yet."""
        self.epoch, self.rank, self.step, self.last_message_s = epoch, rank, NO_STEP, now_s
        self.bound = self.leaving = self.finished = False
        self.waiting_s = 0.0
        self.last_words, self.leave_by_s = "", math.inf

    def leave(self, meeting_point: str) -> None:
        """Mark it as out of every epoch, ready to be rank 0 of the next at ``meeting_point`` (empty: not
        ready).
        """
        self.epoch, self.rank, self.step, self.bound, self.leaving = NO_EPOCH, -1, NO_STEP, False, False
        self.leave_by_s, self.meeting_point = math.inf, meeting_point


def end_of_last_epoch(bind: Bind, *, planned: bool, ended_unix_s: float, unix_s: float) -> tuple[bool, float]:
    """Return (planned, Unix time) of the end of the last epoch that trained; time 0 if there was none.

    ``planned`` and ``ended_unix_s`` are this node's own record. If its time is 0, since the node was not in
    that epoch, both come from ``bind``. If both have a time, the earlier one counts, and the node's own
    ``planned``.
    """
    if bind.left_s_ago is None:
        return planned, ended_unix_s
    told_unix_s = unix_s - bind.left_s_ago
    if not ended_unix_s:
        return bind.left_planned, told_unix_s
    return planned, min(ended_unix_s, told_unix_s)


# Entry into an epoch: the coordinator's ``Bind``, translated into a message for each worker. Pure functions.


def buddy_addresses(bind: Bind) -> dict[int, str]:
    """Return, by rank, the address of the node that keeps the second copy of its snapshots in the epoch of
    ``bind``.
    """
    return {rank: join_address(b.host, b.data_port) for b in bind.buddies if b.data_port for rank in b.ranks}


def join_epoch(
    bind: Bind, rank: int, token: str, *, planned: bool, ended_unix_s: float
) -> worker_link.JoinEpoch:
    """Return the message by which a worker joins the epoch of ``bind`` as ``rank``, one of this node's.

    ``token`` is that under which the ranks of the epoch meet. ``planned`` and ``ended_unix_s`` are of the last
    epoch that trained; 0 if there was none.
    """
    resume = bind.resume
    if isinstance(resume, FromMemory) and resume.shared and rank != bind.places[0][1]:
        resume = msgspec.structs.replace(resume, holders=())
    return worker_link.JoinEpoch(
        epoch=bind.epoch,
        attempt=bind.attempt,
        rank=rank,
        ranks=bind.ranks,
        meeting_point=bind.meeting_point,
        resume=resume,
        planned=planned,
        detected_unix_s=ended_unix_s,
        nonfinite_step=bind.nonfinite_step,
        token=token,
    )
