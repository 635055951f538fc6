"""The commands from the coordinator to an agent.

A command states the desired action of a node, and names the epoch that it refers to. An agent that gets one
twice, or late, does nothing twice. The messages to the coordinator, and the parts of all messages, are in
``phalanx.fleet.core.messages``.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from phalanx.fleet.core import messages as m


class Fresh(m.WireMessage, frozen=True):
    """Start at step 0, with weights drawn from the seed."""


class FromDisk(m.WireMessage, frozen=True):
    """Restore the committed checkpoint of ``step``."""

    step: m.StepNumber


class FromMemory(m.WireMessage, frozen=True):
    """Restore the snapshot of ``step``, taken on ``ranks`` ranks, from the nearest of ``holders``.

    If the number of ranks is the same, only holders of the state of the node's own ranks are listed. A state
    with several holders is listed with each, nearest first. Ranks that differ only in the replicate axis hold
    equal state: a holder's ``ranks`` have the needed states, but are not always the ranks that need them.
    """

    step: m.StepNumber
    ranks: m.Natural
    holders: m.Holders
    shared: bool = False
    """Every rank needs the holders of all states, and ``holders`` is this node's share of them.

    The ranks exchange the shares once they have met. Sending all holders to every node would take bytes that
    grow with the square of the fleet.
    """


Resume = Fresh | FromDisk | FromMemory


class Park(m.EpochMessage, frozen=True):
    """Leave ``epoch`` and every earlier one, and never enter them again; answer Parked.

    If ``planned``, leave at the next step boundary, with a snapshot of that step; otherwise at once.
    """

    reason: m.ShortText = ""
    planned: bool = False


class Bind(m.EpochMessage, frozen=True):
    """Rendezvous in ``epoch`` as these ranks, restore, train; answer Bound. Refused if ``epoch`` has been
    parked.

    Snapshots later than the restored step are dropped: those steps are computed again.
    """

    attempt: m.Natural
    """The number under which the ranks write events and checkpoints, the same for all ranks."""
    ranks: m.Natural
    places: Annotated[tuple[tuple[m.WorkerIndex, m.Natural], ...], Meta(max_length=4096)]
    """(worker, rank) pairs; workers that are not listed stay warm."""
    meeting_point: m.Address
    """The rendezvous address: that of the worker that gets rank 0."""
    resume: Resume
    buddies: m.Holders = ()
    """For each rank of this node that needs one, the buddy that keeps a second copy of its snapshots."""
    left_s_ago: float | None = None
    """Seconds since the decision to leave the last epoch that trained, if there was one."""
    left_planned: bool = False
    """True if that epoch was left at a step boundary, not because of a fault."""
    key: m.ShortText = ""
    """The name of the token under which all ranks meet, once tokens have been changed.

    A node without it reads it from the run directory.
    """
    nonfinite_step: m.StepNumber | None = None
    """The step that is not finite whichever node computes it: ``train.on_nonfinite`` applies to it."""


class Release(m.EpochMessage, frozen=True):
    """Hold no rank from ``epoch`` on: be a spare."""


class KillWorker(m.WireMessage, frozen=True):
    """Kill a worker at once (SIGKILL), and start another."""

    worker: m.WorkerIndex


class Diagnose(m.EpochMessage, frozen=True):
    """No step has ended for ``silent_s``: answer with the flight record of each worker (Recorded)."""

    silent_s: float


class TellAll(m.WireMessage, frozen=True):
    """Send Joined again: an earlier report seems to have been lost."""


class Fence(m.WireMessage, frozen=True):
    """Every incarnation up to ``incarnation`` is fenced: kill the workers, keep the snapshots, join again
    with a higher one.
    """

    reason: m.ShortText = ""
    incarnation: m.Natural = 0


class Stop(m.EpochMessage, frozen=True):
    """Let the workers save and end the run; answer RunFinished."""


class ReadToken(m.WireMessage, frozen=True):
    """The run's tokens were changed: read the new one, which has this name, from the run directory, and
    attach again with it.
    """

    key: m.ShortText


class SaveSnapshots(m.WireMessage, frozen=True):
    """Write these snapshots of your memory into the checkpoint of ``step``: the run ends, and no worker is in
    an epoch.

    The writer of state 0 commits the checkpoint when all are there, and reports Durable. A node that cannot
    write its share reports NotSaved.
    """

    epoch: m.EpochNumber
    """The epoch number under which the checkpoint is saved; no worker enters it."""
    attempt: m.Natural
    step: m.StepNumber
    ranks: m.Natural
    """Number of ranks of the layout that took the snapshots."""
    states: m.Natural
    """Number of different states, each of which one node writes."""
    share: Annotated[tuple[tuple[m.Natural, m.Natural], ...], Meta(max_length=65536)]
    """(rank, state): the rank whose snapshot the node holds, and the number under which it writes it."""


class Lead(m.WireMessage, frozen=True):
    """Leader heartbeat: this coordinator leads the fleet in this reign. It is the first command on each of
    its streams, and repeated.

    A candidate sends none until it is elected. An agent that has followed a later reign obeys no command of
    this one, and looks for another coordinator. An agent that receives no repetition for
    ``fleet.succession_s`` does so too, though the stream is open.
    """

    reign: m.Natural


class Shutdown(m.WireMessage, frozen=True):
    """The run is over: exit."""

    reason: m.ShortText = ""


EpochCommand = Park | Bind | Release | Diagnose | Stop | SaveSnapshots
"""Commands about one epoch."""
Command = EpochCommand | KillWorker | TellAll | Fence | ReadToken | Lead | Shutdown
"""All commands that an agent obeys."""

_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")


def in_words(command: Command) -> str:
    """Return a command as text for the log: of Park and Bind the epoch and its circumstances, of others the type's
    name.
    """
    match command:
        case Park(epoch=epoch, reason=reason, planned=planned):
            when = " after this step" if planned else ""
            return f"leave epoch {epoch}{when}{f' ({reason})' if reason else ''}"
        case Bind(epoch=epoch, ranks=ranks, places=places):
            return f"enter epoch {epoch} with {len(places)} of its {ranks} ranks"
    return _CAPITAL.sub(" ", type(command).__name__).lower()


_commands: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


def decode_command(line: bytes) -> Command:
    """Decode a command. Raises msgspec.ValidationError naming the field, DecodeError, or UnicodeDecodeError."""
    return _commands.decode(line)
