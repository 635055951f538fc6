"""What an agent and its worker say to each other, over a socket pair that the worker inherits.

The link works on one machine, between a process and its child, so there is nothing to authenticate; it carries small typed
messages, each with its length before it. The large things (snapshots) pass through shared memory
(``phalanx.checkpoint.snapshot.memory``): the worker inherits the descriptors of its two segments. Either side reads in a thread of its own or in an event loop; ``send`` may be called from any thread.
"""

from __future__ import annotations

import socket
import struct
from threading import Lock
from typing import Literal

import msgspec

_LENGTH = struct.Struct("<I")
_LONGEST_BYTES = 16 << 20


class LinkError(RuntimeError):
    """The other side has ended, or says what nobody understands."""


class _LinkMessage(msgspec.Struct, frozen=True, tag=True):
    pass


class SnapshotAddress(msgspec.Struct, frozen=True):
    """Somebody who holds the snapshot of one rank of the layout that took it."""

    rank: int
    address: str
    """Of the data port of an agent, as "host:port"."""


class RestoreFrom(msgspec.Struct, frozen=True):
    """What an epoch begins with: the newest checkpoint on disk (or nothing), or a snapshot in memory."""

    disk_step: int = -1
    """The newest checkpoint on disk that may be taken; -1: whichever is newest."""
    step: int = -1
    """Of the snapshot; -1: not from memory."""
    ranks: int = 0
    """Of the layout that took the snapshot."""
    holders: tuple[SnapshotAddress, ...] = ()


# --- to the worker ------------------------------------------------------------------------------


class JoinEpoch(_LinkMessage, frozen=True):
    """Become a rank of an epoch."""

    epoch: int
    rank: int
    ranks: int
    meeting_point: str
    """Where the ranks meet, as "host:port": what the worker that becomes rank 0 has said in ``Warm`` or ``LeftEpoch``."""
    resume: RestoreFrom
    planned: bool = False
    """Whether the last epoch ended because the fleet was to grow or shrink, and not by a fault."""
    detected_unix_s: float = 0.0
    """When it was known that the last epoch had to end; 0 if there was none."""


class LeaveEpoch(_LinkMessage, frozen=True):
    """Leave this epoch and all before it: at once, or when ``planned`` after the present step, with a snapshot of it."""

    epoch: int
    planned: bool = False
    reason: str = ""


class StopTraining(_LinkMessage, frozen=True):
    """Save, and end, at the next step boundary; without a rank, end at once."""

    reason: str


class SnapshotSafe(_LinkMessage, frozen=True):
    """The snapshot of this step has reached the buddy."""

    epoch: int
    step: int


class InjectFault(_LinkMessage, frozen=True):
    """Do something bad to yourself: a fault of ``phalanx.fleet.faults.fault``, for tests and drills."""

    fault: str


class SendFlightRecord(_LinkMessage, frozen=True):
    """Say which collectives of this epoch you are in, while the main thread hangs in one or elsewhere."""

    epoch: int


# --- to the agent -------------------------------------------------------------------------------


class Warm(_LinkMessage, frozen=True):
    """Everything that takes long is loaded; ready to become a rank."""

    pid: int
    meeting_point: str


class Unfit(_LinkMessage, frozen=True):
    """Instead of Warm: this worker's accelerator computes or remembers wrongly. The worker ends."""

    evidence: str


class Alive(_LinkMessage, frozen=True):
    """Sent by a thread of its own, every fraction of the worker's lease."""

    epoch: int
    step: int
    """Last step that ended; -1 before the first of the epoch."""
    phase: str
    since_s: float
    """For how long the main thread has been in this phase."""


class JoinedEpoch(_LinkMessage, frozen=True):
    """The ranks have met and the state is in place."""

    epoch: int
    step: int


class EpochBroken(_LinkMessage, frozen=True):
    """Something failed in this epoch that this worker may not be to blame for: a peer has gone, most likely."""

    epoch: int
    text: str


class Doubted(_LinkMessage, frozen=True):
    """An audit found that some rank computed wrongly, or statistics that the rank of this worker is slow."""

    epoch: int
    reason: Literal["corruption", "straggler"]
    evidence: str
    ranks: tuple[int, ...] = ()
    """With corruption: whose it is. All ranks come to the same verdict; whichever is first to say so is believed."""
    trusted_step: int | None = None
    """With corruption: the last step up to which all is good."""


class FlightRecordSent(_LinkMessage, frozen=True):
    """The answer to Explain."""

    epoch: int
    record: str
    """A flight record, as ``phalanx.fleet.control.hang.shortened`` leaves it."""


class LeftEpoch(_LinkMessage, frozen=True):
    """This worker is in no process group any more."""

    epoch: int
    meeting_point: str


class SnapshotTaken(_LinkMessage, frozen=True):
    """A snapshot of this rank lies complete in the worker's segments; when the buddy has it too, say ``SnapshotSafe``."""

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
    """The run itself cannot go on, on whatever fleet."""

    epoch: int
    text: str


ToWorker = JoinEpoch | LeaveEpoch | StopTraining | SnapshotSafe | InjectFault | SendFlightRecord
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

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)


def frame(said: ToWorker | ToAgent) -> bytes:
    """A message as it goes over the link."""
    body = _encoder.encode(said)
    if len(body) > _LONGEST_BYTES:
        raise LinkError(f"a message of {len(body)} bytes: at most {_LONGEST_BYTES}")
    return _LENGTH.pack(len(body)) + body


def length_of(head: bytes) -> int:
    """How many bytes follow the four of ``head``. Raises ``LinkError`` if that is nonsense."""
    length: int = _LENGTH.unpack(head)[0]
    if length > _LONGEST_BYTES:
        raise LinkError(f"a message of {length} bytes was announced: at most {_LONGEST_BYTES}")
    return length


def decode_for_worker(body: bytes) -> ToWorker:
    """The message in ``body``. Raises ``LinkError`` if it is none."""
    try:
        return _to_worker.decode(body)
    except msgspec.MsgspecError as error:
        raise LinkError(f"not a message of an agent: {error}") from None


def decode_for_agent(body: bytes) -> ToAgent:
    """The message in ``body``. Raises ``LinkError`` if it is none."""
    try:
        return _to_agent.decode(body)
    except msgspec.MsgspecError as error:
        raise LinkError(f"not a message of a worker: {error}") from None


class WorkerEnd:
    """The worker's end of the link."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._sending = Lock()

    def send(self, said: ToAgent) -> None:
        """Sends a message. Raises ``LinkError`` if the agent has ended."""
        try:
            with self._sending:
                self._socket.sendall(frame(said))
        except OSError as error:
            raise LinkError(f"the agent of this worker has ended: {error}") from None

    def receive(self) -> ToWorker:
        """The next message. Raises ``LinkError`` if the agent has ended."""
        return decode_for_worker(self._exactly(length_of(self._exactly(_LENGTH.size))))

    def _exactly(self, nbytes: int) -> bytes:
        parts = bytearray()
        while len(parts) < nbytes:
            try:
                part = self._socket.recv(nbytes - len(parts))
            except OSError as error:
                raise LinkError(f"the agent of this worker has ended: {error}") from None
            if not part:
                raise LinkError("the agent of this worker has ended")
            parts += part
        return bytes(parts)
