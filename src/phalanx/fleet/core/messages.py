"""What agents and the coordinator say to each other: typed, versioned, bounded.

Reports travel from an agent to the coordinator, which hands them as events to the core; commands travel back. Every
report carries the incarnation of its agent, and most the epoch that they speak of, so that a message which comes late,
twice or from a fenced agent changes nothing. Reports tell a level, not an edge (*my workers are in no epoch*, rather
than *they have just left*): saying them again is harmless, and the heartbeat repeats the essence of all of them, so
that any single message may be lost.

On the wire each is a JSON object tagged with its type's name (msgspec tagged unions, https://jcristharif.com/msgspec).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

PROTOCOL_VERSION = 2
"""Of this vocabulary; both sides must name the same one when they connect."""
NO_EPOCH = -1
"""Of workers that belong to no process group."""
NO_STEP = -1
"""Before the first completed step."""

NodeName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^*\s][^\s]*$")]
"""Of a node. It does not begin with a star, which marks groups of nodes."""
ShortText = Annotated[str, Meta(max_length=8192)]
Address = Annotated[str, Meta(max_length=300)]
"""``host:port``, or empty for none."""
Natural = Annotated[int, Meta(ge=0, lt=2**53)]
StepNumber = Annotated[int, Meta(ge=-1, lt=2**53)]
EpochNumber = Annotated[int, Meta(ge=-1, lt=2**53)]
WorkerIndex = Annotated[int, Meta(ge=0, lt=4096)]
"""Which of a node's workers."""
MOST_RECORD_BYTES = 1 << 16
WorkerAddresses = Annotated[tuple[Address, ...], Meta(max_length=4096)]
"""Of each of a node's workers where it would meet the others if it got rank 0; empty where it is not warm."""


class HeldSnapshot(Struct, frozen=True):
    """A complete copy of one rank's state in a node's snapshot memory."""

    ranks: Natural
    """Of the layout in which it was taken."""
    rank: Natural
    step: StepNumber
    kind: Literal["own", "buddy"]
    nbytes: Natural = 0
    epoch: EpochNumber = NO_EPOCH
    """In which it was taken: after a silent corruption, what earlier epochs left behind is not trusted."""


HeldSnapshots = Annotated[tuple[HeldSnapshot, ...], Meta(max_length=65536)]


class Holder(Struct, frozen=True):
    """Where a rank's state lies, or is to be sent: the data port of a node's agent."""

    rank: Natural
    node: NodeName
    host: Address
    data_port: Annotated[int, Meta(ge=0, le=65535)]


Holders = Annotated[tuple[Holder, ...], Meta(max_length=2**22)]


class WireMessage(Struct, frozen=True, tag=True):
    """The base that makes msgspec tag each message with its type's name."""


# --- from an agent --------------------------------------------------------------------------------


class Joined(WireMessage, frozen=True):
    """An agent says everything about itself: at the first contact, after each reconnection, and when asked (Report)."""

    node: NodeName
    incarnation: Natural
    """Higher for each life of the agent; an agent that is expelled takes the next one."""
    workers: Annotated[int, Meta(ge=1, le=4096)]
    host: Address
    data_port: Annotated[int, Meta(ge=0, le=65535)]
    domain: Annotated[tuple[Annotated[str, Meta(max_length=128)], ...], Meta(max_length=8)] = ()
    """Failure domains from the widest to the narrowest: hall, switch, rack."""
    held: HeldSnapshots = ()
    epoch: EpochNumber = NO_EPOCH
    """In which its workers are."""
    bound: bool = False
    """They have met and restored in ``epoch``."""
    meeting_points: WorkerAddresses = ()
    started_as_spare: bool = False
    """It was started as a spare: in the first epoch it takes a seat only if the others are too few."""


class Ready(WireMessage, frozen=True):
    """All workers of a node are warm and outside any group."""

    node: NodeName
    incarnation: Natural
    meeting_points: WorkerAddresses


class WorkerPhase(StrEnum):
    """Where a node's workers are, all of them together."""

    COLD = "cold"
    """At least one is not warm yet, or again."""
    WARM = "warm"
    """In no epoch, ready to be bound."""
    BINDING = "binding"
    """In an epoch, not all have met and restored."""
    BOUND = "bound"
    """In an epoch, all have met and restored: they train."""
    LEAVING = "leaving"
    """In an epoch that they have been told to leave."""


class Heartbeat(WireMessage, frozen=True):
    """A sign of life, with the level of everything that another message may have failed to tell."""

    node: NodeName
    incarnation: Natural
    epoch: EpochNumber
    step: StepNumber
    """Last completed by all its workers."""
    phase: WorkerPhase


class WorkerExited(WireMessage, frozen=True):
    """A worker's process ended without being asked to; the agent starts another."""

    node: NodeName
    incarnation: Natural
    epoch: EpochNumber
    worker: WorkerIndex
    code: int
    text: ShortText = ""
    innocent: bool = False
    """It was killed because it could not be called back from an epoch that others had broken."""


class WorkerHung(WireMessage, frozen=True):
    """A worker gave its agent no sign of life; it was killed, and the agent starts another."""

    node: NodeName
    incarnation: Natural
    epoch: EpochNumber
    worker: WorkerIndex
    silent_s: float


class Broken(WireMessage, frozen=True):
    """A collective failed in a worker: evidence that somebody in its epoch is gone."""

    node: NodeName
    incarnation: Natural
    epoch: EpochNumber
    worker: WorkerIndex
    text: ShortText = ""


class Parked(WireMessage, frozen=True):
    """None of a node's workers is in ``epoch`` or an earlier one any more, nor will be."""

    node: NodeName
    incarnation: Natural
    epoch: EpochNumber
    meeting_points: WorkerAddresses
    held: HeldSnapshots


class Bound(WireMessage, frozen=True):
    """All workers of a node that hold ranks have met the others and restored their state."""

    node: NodeName
    incarnation: Natural
    epoch: EpochNumber


class Durable(WireMessage, frozen=True):
    """A checkpoint was committed to disk."""

    node: NodeName
    incarnation: Natural
    epoch: EpochNumber
    step: StepNumber


class Suspect(WireMessage, frozen=True):
    """Statistics, an audit or a health check found a node unsound."""

    node: NodeName
    reason: Literal["straggler", "corruption", "health"]
    evidence: ShortText = ""
    trusted_step: StepNumber | None = None
    """With corruption: the last step before which all was audited. Later state is not restored from."""
    epoch: EpochNumber | None = None
    """In which it was found; with it, a second report of one corruption does not roll back twice."""
    ranks: Annotated[tuple[Natural, ...], Meta(max_length=4096)] = ()
    """If not empty, it is the nodes of these ranks of ``epoch`` that are unsound; ``node`` has only found it."""


class RunFinished(WireMessage, frozen=True):
    """The run has done all its steps."""

    epoch: EpochNumber
    result_json: Annotated[str, Meta(max_length=2**20)] = ""


class Recorded(WireMessage, frozen=True):
    """What collectives a rank is in: the answer to Diagnose, for the coordinator's shell; the core does not see it."""

    node: NodeName
    incarnation: Natural
    epoch: EpochNumber
    record: Annotated[str, Meta(max_length=MOST_RECORD_BYTES)]
    """A flight record, as ``phalanx.fleet.control.hang.shortened`` leaves it."""


class Fatal(WireMessage, frozen=True):
    """The run itself cannot go on, on any fleet: a loss that is not a number, data that are damaged."""

    epoch: EpochNumber
    node: NodeName
    text: ShortText = ""


# --- from an operator -----------------------------------------------------------------------------


class Drain(WireMessage, frozen=True):
    """Take a node out of the run at the next step boundary."""

    node: NodeName


class Admit(WireMessage, frozen=True):
    """Let a drained or quarantined node take part again."""

    node: NodeName


class StopRun(WireMessage, frozen=True):
    """Save and end."""


# --- from the coordinator's own shell, and from aggregators -----------------------------------------


class Disconnected(WireMessage, frozen=True):
    """The connection to an agent broke."""

    node: NodeName
    incarnation: Natural


class Tick(WireMessage, frozen=True):
    """Time has passed."""


class DiskHolds(WireMessage, frozen=True):
    """The committed checkpoints that the coordinator's shell sees; fed before the next event whenever they change."""

    steps: Annotated[tuple[StepNumber, ...], Meta(max_length=65536)]


class Diagnosed(WireMessage, frozen=True):
    """What the flight records of a hanging epoch say; from the coordinator's shell, once it has collected them."""

    epoch: EpochNumber
    text: ShortText
    ranks: Annotated[tuple[Natural, ...], Meta(max_length=4096)] = ()
    """Whom all others wait for, if that leaves no doubt."""


class Restarted(WireMessage, frozen=True):
    """The coordinator was down until now and has replayed its journal: the silence was its own."""


class Rollcall(WireMessage, frozen=True):
    """An aggregator speaks for the whole fleet: every node has reported ``what``, but for those in ``absent``.

    ``heartbeat`` (all nodes are alive; members have completed ``step``), ``parked`` (all members of ``epoch``; each holds its
    own state, and that of whom it is the buddy, at ``steps``) or ``bound``. The same as that many single reports, in
    one; who answers otherwise than expected is named absent, and reports for itself.
    """

    what: Literal["heartbeat", "parked", "bound"]
    epoch: EpochNumber
    step: StepNumber = NO_STEP
    steps: Annotated[tuple[StepNumber, ...], Meta(max_length=16)] = ()
    absent: Annotated[tuple[NodeName, ...], Meta(max_length=65536)] = ()


class Folded(WireMessage, frozen=True):
    """Many events at once."""

    events: Annotated[tuple[CoreEvent, ...], Meta(max_length=65536)]


AgentReport = (
    Joined
    | Ready
    | Heartbeat
    | WorkerExited
    | WorkerHung
    | Broken
    | Parked
    | Bound
    | Durable
    | Suspect
    | RunFinished
    | Fatal
)
"""What an agent may say to the core."""
AgentMessage = AgentReport | Recorded
"""What an agent may say."""
OperatorRequest = Drain | Admit | StopRun
"""What an operator may say."""
CoreEvent = (
    AgentReport
    | OperatorRequest
    | Disconnected
    | Tick
    | DiskHolds
    | Diagnosed
    | Restarted
    | Rollcall
    | Folded
)
"""All that the core answers."""


# --- to an agent ----------------------------------------------------------------------------------


class Fresh(WireMessage, frozen=True):
    """Begin at step 0, with weights drawn from the seed."""


class FromDisk(WireMessage, frozen=True):
    """Restore the committed checkpoint of ``step``."""

    step: StepNumber


class FromMemory(WireMessage, frozen=True):
    """Restore the snapshot of ``step``, taken on ``ranks`` ranks, from the nearest of ``holders``.

    Where the layout is the same, only holders of the state of the node's own ranks are named; a rank is named several
    times, nearest first, where several hold it. Ranks that differ only in the replicate axis hold equal state: a
    holder's ``rank`` is one that has the state needed, not always the rank that needs it.
    """

    step: StepNumber
    ranks: Natural
    holders: Holders


Resume = Fresh | FromDisk | FromMemory


class Park(WireMessage, frozen=True):
    """Leave ``epoch`` and every earlier one, never to enter them again; answer Parked.

    ``planned``: at the next step boundary, with a snapshot of it; otherwise at once.
    """

    epoch: EpochNumber
    reason: ShortText = ""
    planned: bool = False


class Bind(WireMessage, frozen=True):
    """Meet in ``epoch`` as these ranks, restore, train; answer Bound. Refused if ``epoch`` has been parked.

    Snapshots of later steps than the one that is restored are forgotten: those steps happen anew.
    """

    epoch: EpochNumber
    ranks: Natural
    places: Annotated[tuple[tuple[WorkerIndex, Natural], ...], Meta(max_length=4096)]
    """(worker, rank); workers that are not named stay warm."""
    meeting_point: Address
    """Of the worker that gets rank 0."""
    resume: Resume
    buddies: Holders = ()
    """For each rank of this node that needs one, who keeps a second copy of its snapshots."""
    left_s_ago: float | None = None
    """How long ago it was decided to leave the last epoch that trained, if there was one."""
    left_planned: bool = False
    """It was left at a step boundary, for no fault."""


class Release(WireMessage, frozen=True):
    """You hold no rank from ``epoch`` on: be a spare."""

    epoch: EpochNumber


class KillWorker(WireMessage, frozen=True):
    """End a worker at once (SIGKILL); its agent starts another."""

    worker: WorkerIndex


class Diagnose(WireMessage, frozen=True):
    """No step has ended for too long: answer with the flight record of each worker (Recorded)."""

    epoch: EpochNumber
    silent_s: float


class TellAll(WireMessage, frozen=True):
    """Send Joined again: something that you said seems to have been lost."""


class Fence(WireMessage, frozen=True):
    """You are fenced up to ``incarnation``: kill your workers, keep your memory, join again with a higher one."""

    reason: ShortText = ""
    incarnation: Natural = 0


class Stop(WireMessage, frozen=True):
    """Let the workers save and end the run; answer Finished."""

    epoch: EpochNumber


class Shutdown(WireMessage, frozen=True):
    """The run is over: end."""

    reason: ShortText = ""


Command = Park | Bind | Release | KillWorker | Diagnose | TellAll | Fence | Stop | Shutdown
"""All that an agent answers."""

_encoder = msgspec.json.Encoder()
_events: msgspec.json.Decoder[CoreEvent] = msgspec.json.Decoder(CoreEvent)
Received = AgentMessage | OperatorRequest | Rollcall | Folded
_reports: msgspec.json.Decoder[Received] = msgspec.json.Decoder(Received)
_commands: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


def encode(message: CoreEvent | Recorded | Command) -> bytes:
    """The message as one line of JSON."""
    return _encoder.encode(message)


def decode_event(line: bytes) -> CoreEvent:
    """An event, say from a journal. Raises msgspec.ValidationError naming the field, or DecodeError."""
    return _events.decode(line)


def decode_report(line: bytes) -> Received:
    """What an agent, an aggregator or an operator may send; never what only the coordinator's shell may say.

    Raises msgspec.ValidationError naming the field, or DecodeError.
    """
    return _reports.decode(line)


def decode_command(line: bytes) -> Command:
    """What the coordinator may send. Raises msgspec.ValidationError naming the field, or DecodeError."""
    return _commands.decode(line)
