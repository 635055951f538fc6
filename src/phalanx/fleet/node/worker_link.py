"""The messages between an agent and its worker, over a socket pair that the worker inherits.

The link works on one machine, between a process and its child, so there is nothing to authenticate; it carries small typed
messages (``phalanx.wire.messages``). Snapshots pass through shared memory instead (``phalanx.checkpoint.snapshot.segments``):
the worker inherits the descriptors of its two segments. Either side reads in a thread of its own or in an event loop; ``send``
may be called from any thread.
"""

from __future__ import annotations

import socket
from typing import Literal

import msgspec

from phalanx.wire.connection import FramedConnection
from phalanx.wire.messages import MessageDecoder


class _LinkMessage(msgspec.Struct, frozen=True, tag=True):
    pass


class SnapshotAddress(msgspec.Struct, frozen=True):
    """The data port of an agent that holds the snapshot of one rank, of the layout that took it."""

    rank: int
    address: str
    """The data port, as "host:port"."""


class RestoreFrom(msgspec.Struct, frozen=True):
    """The state that an epoch begins with: the newest checkpoint on disk (or nothing), or a snapshot in memory."""

    disk_step: int = -1
    """The newest checkpoint on disk that may be taken; -1: whichever is newest."""
    step: int = -1
    """The step of the snapshot; -1: not from memory."""
    ranks: int = 0
    """The number of ranks of the layout that took the snapshot."""
    holders: tuple[SnapshotAddress, ...] = ()
    shared: bool = False
    """``holders`` is this worker's share of the holders of all states, to be told to all ranks."""


# --- to the worker ------------------------------------------------------------------------------


class JoinEpoch(_LinkMessage, frozen=True):
    """Become a rank of an epoch."""

    epoch: int
    attempt: int
    """The number under which this epoch's events and checkpoints are written."""
    rank: int
    ranks: int
    meeting_point: str
    """The rendezvous of the ranks, as "host:port": rank 0's worker has reported it in ``Warm`` or ``LeftEpoch``."""
    resume: RestoreFrom
    planned: bool = False
    """True if the last epoch ended because the fleet was to grow or shrink, not by a fault."""
    detected_unix_s: float = 0.0
    """The time at which it was known that the last epoch had to end; 0 if there was none."""
    nonfinite_step: int | None = None
    """The step that is not finite whoever computes it; a step that is found so otherwise is reported, to be computed again."""
    token: str = ""
    """The run's token in this epoch; empty: the one that the worker was started with."""


class LeaveEpoch(_LinkMessage, frozen=True):
    """Leave this epoch and all before it: at once, or if ``planned`` after the present step, with a snapshot of it."""

    epoch: int
    planned: bool = False
    reason: str = ""


class StopTraining(_LinkMessage, frozen=True):
    """Save a checkpoint and end at the next step boundary; a worker without a rank ends at once."""

    reason: str


class SnapshotSafe(_LinkMessage, frozen=True):
    """The snapshot of this step has reached the buddy."""

    epoch: int
    step: int


class HoldSaves(_LinkMessage, frozen=True):
    """Commit no checkpoint while ``hold``: the agent has no coordinator, which may have begun another epoch without this node."""

    hold: bool


class InjectFault(_LinkMessage, frozen=True):
    """Inject a fault of ``phalanx.fleet.faults.fault`` into yourself, for tests and drills."""

    fault: str


class SendFlightRecord(_LinkMessage, frozen=True):
    """Send PyTorch's flight record of this epoch's collectives, while the main thread hangs."""

    epoch: int


# --- to the agent -------------------------------------------------------------------------------


class Warm(_LinkMessage, frozen=True):
    """Everything that takes long to load is loaded; ready to become a rank."""

    pid: int
    meeting_point: str


class Unfit(_LinkMessage, frozen=True):
    """Sent instead of ``Warm``: this worker's accelerator failed its health checks, or its node cannot train this run. The worker ends."""

    evidence: str


class Alive(_LinkMessage, frozen=True):
    """The worker's heartbeat, sent from a thread of its own several times in a lease."""

    epoch: int
    step: int
    """The last step that ended; -1 before the first of the epoch."""
    phase: str
    since_s: float
    """Seconds for which the main thread has been in this phase."""
    waiting_s: float = 0.0
    """Seconds for which it has waited for samples that an object store has not given; 0 if it does not."""


class JoinedEpoch(_LinkMessage, frozen=True):
    """The process group is connected and the state is restored."""

    epoch: int
    step: int


class EpochBroken(_LinkMessage, frozen=True):
    """This epoch failed here, by an error that may be another's fault: most likely a peer has gone."""

    epoch: int
    text: str


class Doubted(_LinkMessage, frozen=True):
    """An audit found that some rank computed wrongly, or statistics say that this worker's rank is a straggler, or a step is not finite."""

    epoch: int
    reason: Literal["corruption", "straggler", "nonfinite"]
    evidence: str
    ranks: tuple[int, ...] = ()
    """With corruption: the ranks that caused it. All ranks come to the same verdict, so the first report is believed."""
    trusted_step: int | None = None
    """With corruption: the newest step whose state is known to be good."""
    step: int | None = None
    """With nonfinite: the step. ``ranks`` are those whose own losses were not finite."""


class FlightRecordSent(_LinkMessage, frozen=True):
    """The answer to ``SendFlightRecord``."""

    epoch: int
    record: str
    """A flight record, as ``phalanx.fleet.control.inquiry.shortened`` leaves it."""


class LeftEpoch(_LinkMessage, frozen=True):
    """This worker has left this epoch and all before it: it is in no process group."""

    epoch: int
    meeting_point: str


class SnapshotTaken(_LinkMessage, frozen=True):
    """A snapshot of this rank is complete in the worker's segments; once the buddy has it too, answer ``SnapshotSafe``."""

    epoch: int
    ranks: int
    rank: int
    step: int


class StepEnded(_LinkMessage, frozen=True):
    """A step has ended."""

    epoch: int
    step: int


class CheckpointCommitted(_LinkMessage, frozen=True):
    """A checkpoint on disk was committed."""

    step: int


class TrainingFinished(_LinkMessage, frozen=True):
    """The run is complete (``result`` is JSON), or was stopped on request (``result`` is empty)."""

    epoch: int
    result: str


class RunFailed(_LinkMessage, frozen=True):
    """This worker cannot go on with the run, and no other rank is to blame: the error is somebody's to mend."""

    epoch: int
    text: str
    kind: str = ""
    """The class of the error."""
    unanimous: bool = False
    """All ranks have agreed on it and raise it alike."""


ToWorker = JoinEpoch | LeaveEpoch | StopTraining | SnapshotSafe | HoldSaves | InjectFault | SendFlightRecord
ToAgent = (
    Warm
    | Unfit
    | Alive
    | JoinedEpoch
    | EpochBroken
    | Doubted
    | FlightRecordSent
    | LeftEpoch
    | SnapshotTaken
    | StepEnded
    | CheckpointCommitted
    | TrainingFinished
    | RunFailed
)

TO_WORKER: MessageDecoder[ToWorker] = MessageDecoder(ToWorker)
TO_AGENT: MessageDecoder[ToAgent] = MessageDecoder(ToAgent)


class WorkerEnd:
    """The worker's end of the link. Methods raise ``WireError`` if the agent has ended."""

    def __init__(self, descriptor: int) -> None:
        self._connection = FramedConnection(socket.socket(fileno=descriptor), "the agent of this worker")

    def send(self, message: ToAgent) -> None:
        """Send a message; from any thread."""
        self._connection.send_message(message)

    def receive(self) -> ToWorker:
        """Wait for the next message."""
        return self._connection.receive_message(TO_WORKER)
