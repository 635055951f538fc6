"""The messages to the coordinator, and the parts of all messages: typed, versioned, bounded in size.

Reports travel from an agent to the coordinator, which passes them to the core as events; commands
(``commands.py``) travel back. Every report carries the incarnation of its agent, and most carry the epoch
that they refer to, so that a message that is late, duplicated or from a fenced agent changes nothing. Reports
are level-triggered, not edge-triggered (*my workers are in no epoch*, rather than *they have just left*):
repeating one is harmless. The heartbeat repeats the essence of all of them, so that any single message may be
lost.

On the wire each is a JSON object tagged with its type's name (msgspec tagged unions,
https://jcristharif.com/msgspec).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, field

PROTOCOL_VERSION = 7
"""Version of the messages; a connection whose sides have different ones is refused."""
NO_EPOCH = -1
"""The epoch of workers that are in no process group."""
NO_STEP = -1
"""The step before the first one is completed."""

NodeName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^*\s/][^\s/]*$")]
"""The name of a node. It does not begin with a star, which marks groups of nodes."""
ShortText = Annotated[str, Meta(max_length=8192)]
Address = Annotated[str, Meta(max_length=300)]
"""``host:port``, or empty for none."""
Natural = Annotated[int, Meta(ge=0, lt=2**53)]
Seconds = Annotated[float, Meta(ge=0, lt=1e9)]
StepNumber = Annotated[int, Meta(ge=-1, lt=2**53)]
EpochNumber = Annotated[int, Meta(ge=-1, lt=2**53)]
WorkerIndex = Annotated[int, Meta(ge=0, lt=4096)]
"""Index of a worker on its node."""
MOST_RECORD_BYTES = 1 << 16
WorkerAddresses = Annotated[tuple[Address, ...], Meta(max_length=4096)]
"""For each worker of a node, the rendezvous address that it offers in case it gets rank 0; empty if it is not warm."""


class RankSnapshot(Struct, frozen=True):
    """A complete copy of one rank's state in a node's snapshot memory."""

    ranks: Natural
    """Number of ranks when it was taken."""
    rank: Natural
    step: StepNumber
    kind: Literal["own", "buddy"]
    nbytes: Natural = 0
    epoch: EpochNumber = NO_EPOCH
    """The epoch in which it was taken: after a silent corruption, snapshots of earlier epochs may not be
    trusted.
    """


RankSnapshots = Annotated[tuple[RankSnapshot, ...], Meta(max_length=65536)]


class Holder(Struct, frozen=True):
    """An agent that holds the states of some ranks, or is to receive them, with the address of its data port."""

    ranks: Annotated[tuple[Natural, ...], Meta(min_length=1, max_length=65536)]
    node: NodeName
    host: Address
    data_port: Annotated[int, Meta(ge=0, le=65535)]


Holders = Annotated[tuple[Holder, ...], Meta(max_length=2**22)]


class WireMessage(Struct, frozen=True, tag=True):
    """The base class of all messages: msgspec tags each with the name of its type."""


class EpochMessage(WireMessage, frozen=True):
    """A message about one epoch."""

    epoch: EpochNumber


# --- from an agent --------------------------------------------------------------------------------


class NodeReport(WireMessage, frozen=True):
    """A report about a node, in one life of its agent."""

    node: NodeName
    incarnation: Natural
    """Higher for each life of the agent; an agent that is fenced takes the next one."""


class EpochReport(NodeReport, frozen=True):
    """A report about a node in one epoch."""

    epoch: EpochNumber


class Joined(NodeReport, frozen=True):
    """Complete description of an agent: on first contact, after each reconnection, and in answer to TellAll."""

    workers: Annotated[int, Meta(ge=1, le=4096)]
    host: Address
    data_port: Annotated[int, Meta(ge=0, le=65535)]
    domain: Annotated[tuple[Annotated[str, Meta(max_length=128)], ...], Meta(max_length=8)] = ()
    """Failure domains from the widest to the narrowest: hall, switch, rack."""
    snapshots: RankSnapshots = field(default=(), name="held")
    epoch: EpochNumber = NO_EPOCH
    """The epoch that its workers are in."""
    bound: bool = False
    """True if the workers have met and restored in ``epoch``."""
    meeting_points: WorkerAddresses = ()
    started_as_spare: bool = False
    """True if, in the first epoch, the node takes a seat only in place of a missing one."""
    leaving: bool = False
    """As in ``Heartbeat``."""


class Ready(NodeReport, frozen=True):
    """All workers of a node are warm and in no process group."""

    meeting_points: WorkerAddresses


class WorkerPhase(StrEnum):
    """The common phase of all workers of a node."""

    COLD = "cold"
    """At least one is still starting, or starting again."""
    WARM = "warm"
    """In no epoch, ready for a Bind."""
    BINDING = "binding"
    """In an epoch; not all have met and restored yet."""
    BOUND = "bound"
    """In an epoch; all have met and restored, and train."""
    LEAVING = "leaving"
    """In an epoch that they are leaving."""


class Heartbeat(EpochReport, frozen=True):
    """Heartbeat. Carries the full level-triggered state, so that it replaces any other message that was lost."""

    step: StepNumber
    """The last step that all its workers have completed."""
    phase: WorkerPhase
    waiting_s: Seconds = 0.0
    """Seconds for which one of its workers has waited for an object store's samples; 0 if none does."""
    leaving: bool = False
    """True if the node is about to be taken away: it should hold no rank any more, and leave once its memory
    is not needed.
    """


class WorkerExited(EpochReport, frozen=True):
    """A worker's process ended unexpectedly; the agent starts another."""

    worker: WorkerIndex
    code: int
    text: ShortText = ""
    innocent: bool = False
    """True if its agent killed it because it could not leave an epoch that a fault elsewhere had broken."""


class WorkerHung(EpochReport, frozen=True):
    """A worker's lease ran out: its agent received no heartbeat, killed it, and starts another."""

    worker: WorkerIndex
    silent_s: float


LEFT_AS_ASKED = "left at a step boundary, as asked"
"""The text of ``Broken`` of a worker in which nothing failed."""


class Broken(EpochReport, frozen=True):
    """A collective failed in a worker: evidence that another member of its epoch is gone."""

    worker: WorkerIndex
    text: ShortText = ""


class Parked(EpochReport, frozen=True):
    """No worker of a node is in ``epoch`` or an earlier one any more, and none will enter one."""

    meeting_points: WorkerAddresses
    snapshots: RankSnapshots = field(name="held")


class Bound(EpochReport, frozen=True):
    """All workers of a node that hold ranks have met the others and restored their state."""


class Durable(EpochReport, frozen=True):
    """A checkpoint was committed to disk."""

    step: StepNumber


class NotSaved(EpochReport, frozen=True):
    """A node cannot write its share of the checkpoint of SaveSnapshots."""

    text: ShortText = ""


class Suspect(WireMessage, frozen=True):
    """Statistics, an audit or a health check found a node unfit."""

    node: NodeName
    reason: Literal["straggler", "corruption", "health", "nonfinite"]
    evidence: ShortText = ""
    trusted_step: StepNumber | None = None
    """With corruption: the last step whose audit was clean. State of later steps is not restored."""
    epoch: EpochNumber | None = None
    """The epoch in which it was found, so that two reports of one corruption roll back only once."""
    ranks: Annotated[tuple[Natural, ...], Meta(max_length=4096)] = ()
    """If not empty, the nodes of these ranks of ``epoch`` are unfit, and ``node`` only reports it."""
    step: StepNumber | None = None
    """With nonfinite: the step whose loss or gradient was not finite; ``ranks`` are those whose own losses were not."""


class RunFinished(EpochMessage, frozen=True):
    """The run has completed all its steps."""

    result_json: Annotated[str, Meta(max_length=2**20)] = ""


class Recorded(EpochReport, frozen=True):
    """A rank's flight record: the answer to Diagnose. It goes to the coordinator's hang inquiry, not to the core."""

    record: Annotated[str, Meta(max_length=MOST_RECORD_BYTES)]
    """The record as ``phalanx.fleet.control.inquiry.shortened`` leaves it."""


class Fatal(WireMessage, frozen=True):
    """A node cannot continue the run, for a reason other than the network; perhaps no node can."""

    epoch: EpochNumber
    node: NodeName
    text: ShortText = ""
    kind: ShortText = ""
    """The class of the error: a second node with an error of this class confirms it."""
    unanimous: bool = False
    """True for an error that all ranks raise, after they have agreed on it."""


# --- from an operator -----------------------------------------------------------------------------


class Drain(WireMessage, frozen=True):
    """Take a node out of the run at the next step boundary."""

    node: NodeName


class Admit(WireMessage, frozen=True):
    """Let a drained or quarantined node take part again."""

    node: NodeName


class StopRun(WireMessage, frozen=True):
    """Save and end; a second request ends the run at once."""

    never_at_once: bool = False
    """True if the request only wants the run saved: a run that is saving already continues to save."""


class Shrink(WireMessage, frozen=True):
    """Give nodes back: these, or ``by`` nodes that the coordinator chooses."""

    by: Annotated[int, Meta(ge=0, le=2**20)] = 0
    nodes: Annotated[tuple[NodeName, ...], Meta(max_length=65536)] = ()


class Grow(WireMessage, frozen=True):
    """Let more nodes hold ranks. For the coordinator's shell, which knows the layouts for that many."""

    by: Annotated[int, Meta(ge=1, le=2**20)]


class RotateTokens(WireMessage, frozen=True):
    """Change the tokens of agents and operators; the present ones are refused after ``grace_s``.

    For the coordinator's shell, not the core.
    """

    grace_s: Annotated[float, Meta(ge=0, le=7 * 86_400)] = 300.0


# --- from the coordinator's own shell, and from aggregators ---------------------------------------


class Disconnected(NodeReport, frozen=True):
    """The connection to an agent broke."""


class Tick(WireMessage, frozen=True):
    """Time has passed; leases and deadlines are due for a check."""


class DiskHolds(WireMessage, frozen=True):
    """The committed checkpoints that the coordinator's shell sees on disk; sent whenever they change."""

    steps: Annotated[tuple[StepNumber, ...], Meta(max_length=65536)]


class Rekeyed(WireMessage, frozen=True):
    """The token of agents was changed; the new one has this name."""

    key: ShortText
    before: ShortText = ""
    """The name of the token that it replaces, if there was one."""


class GiveBack(WireMessage, frozen=True):
    """These nodes are to leave, and the fleet becomes smaller by their number."""

    nodes: Annotated[tuple[NodeName, ...], Meta(max_length=65536)]


class Enlarge(WireMessage, frozen=True):
    """More nodes than before may hold ranks. The layouts are as in ``Formation``."""

    wanted_nodes: Natural
    expected_nodes: Natural
    legal: tuple[Natural, ...]
    fewer: tuple[tuple[Natural, Natural], ...] = ()


class Diagnosed(WireMessage, frozen=True):
    """The diagnosis of a hang, from the flight records that the coordinator's shell has collected."""

    epoch: EpochNumber
    text: ShortText
    ranks: Annotated[tuple[Natural, ...], Meta(max_length=4096)] = ()
    """The ranks that all others wait for, if the evidence is complete; else empty."""


class Restarted(WireMessage, frozen=True):
    """The coordinator was down and has replayed its journal: no node's silence until now counts."""


class EpochUnsent(WireMessage, frozen=True, tag="Untold"):
    """No node has received the epoch that is being bound: the coordinator died before it claimed that epoch,
    and the previous one trains on.
    """


class StoodStill(WireMessage, frozen=True):
    """The coordinator's process did not read messages for so long: stopped, swapped out, starved of processor
    time.
    """

    for_s: Annotated[float, Meta(ge=0)]


class Rollcall(WireMessage, frozen=True):
    """An aggregator reports for the whole fleet: every node has sent the same ``report``, except those
    in ``absent``.

    ``heartbeat``: all nodes are alive, and members have completed ``step``. ``parked``: all members of
    ``epoch``; each holds its own state and that of the seat whose buddy it is, at ``steps``. ``bound``: all
    members. It is equivalent to that many single reports. A node whose report differs is listed as absent and
    reports for itself.
    """

    report: Literal["heartbeat", "parked", "bound"] = field(name="what")
    epoch: EpochNumber
    step: StepNumber = NO_STEP
    steps: Annotated[tuple[StepNumber, ...], Meta(max_length=16)] = ()
    absent: Annotated[tuple[NodeName, ...], Meta(max_length=65536)] = ()


class Folded(WireMessage, frozen=True):
    """A batch of events that count as one."""

    events: Annotated[tuple[CoreEvent, ...], Meta(max_length=65536)]


FailureReport = WorkerExited | WorkerHung | Broken | Fatal
"""Reports of a failure that may end an epoch."""
MemberReport = Parked | Bound | Durable | NotSaved | RunFinished
"""Reports of an epoch's members, and of those that save at its end."""
AgentReport = Joined | Ready | Heartbeat | MemberReport | FailureReport | Suspect
"""Messages of an agent that reach the core."""
AgentMessage = AgentReport | Recorded
"""All messages of an agent."""
OperatorRequest = Drain | Admit | StopRun | Shrink | Grow | RotateTokens
"""Messages of an operator."""
ShellEvent = (
    Disconnected
    | Tick
    | DiskHolds
    | Rekeyed
    | GiveBack
    | Enlarge
    | Diagnosed
    | Restarted
    | EpochUnsent
    | StoodStill
)
"""Events from the coordinator's own shell."""
CoreEvent = AgentReport | Drain | Admit | StopRun | ShellEvent | Rollcall | Folded
"""All events that the core's ``step`` takes."""

_encoder = msgspec.json.Encoder()
Received = AgentMessage | OperatorRequest | Rollcall | Folded
_reports: msgspec.json.Decoder[Received] = msgspec.json.Decoder(Received)


def encode(message: WireMessage) -> bytes:
    """Return the message as one line of JSON."""
    return _encoder.encode(message)


def decode_report(line: bytes) -> Received:
    """Decode a message of an agent, an aggregator or an operator. Messages that only the coordinator's shell
    may send are refused.

    Raises msgspec.ValidationError naming the field, DecodeError, or UnicodeDecodeError.
    """
    return _reports.decode(line)
