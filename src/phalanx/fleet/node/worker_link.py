"""The link between an agent and its worker: messages over a socket pair that the worker inherits, and the
orders among them.

The link connects a process and its child on one machine, so there is nothing to authenticate; it carries
small typed messages (``phalanx.wire.messages``). Snapshots pass through shared memory instead
(``phalanx.checkpoint.snapshot.segments``): the worker inherits the descriptors of its two segments. Either
side reads in a thread of its own or in an event loop; ``send`` may be called from any thread.

The worker's main thread computes and waits in collectives, so it cannot read the link: ``Orders`` reads it in
a second thread.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from phalanx.fleet.core.commands import Resume
from phalanx.process.this_process import StopRequest
from phalanx.wire.connection import FramedConnection
from phalanx.wire.messages import MessageDecoder


class _LinkMessage(msgspec.Struct, frozen=True, tag=True):
    pass


class _EpochMessage(_LinkMessage, frozen=True):
    epoch: int


# --- to the worker ------------------------------------------------------------------------------


class JoinEpoch(_EpochMessage, frozen=True):
    """Become a rank of an epoch."""

    attempt: int
    """The number under which this epoch's events and checkpoints are written."""
    rank: int
    ranks: int
    meeting_point: str
    """The rendezvous of the ranks, as "host:port": rank 0's worker has reported it in ``Warm`` or ``LeftEpoch``."""
    resume: Resume
    """The state that the epoch begins with. If it is ``shared``, only one rank of a node gets the holders."""
    planned: bool = False
    """True if the last epoch ended because the fleet was to grow or shrink, not by a fault."""
    detected_unix_s: float = 0.0
    """Unix time at which the end of the last epoch was detected; 0 if there was none."""
    nonfinite_step: int | None = None
    """The step that is not finite whichever node computes it.

    A non-finite result of any other step is reported, to be computed again.
    """
    token: str = ""
    """The run's token in this epoch; empty: the one with which the worker was started."""


class LeaveEpoch(_EpochMessage, frozen=True):
    """Leave this epoch and all before it: at once, or if ``planned`` after the present step, with a snapshot of it."""

    planned: bool = False
    reason: str = ""


class StopTraining(_LinkMessage, frozen=True):
    """Save a checkpoint and end at the next step boundary; a worker without a rank ends at once."""

    reason: str


class SnapshotSafe(_EpochMessage, frozen=True):
    """The snapshot of this step has reached the buddy."""

    step: int


class HoldSaves(_LinkMessage, frozen=True):
    """Commit no checkpoint while ``hold``: the agent has no coordinator, which may have begun another epoch
    without this node.
    """

    hold: bool


class InjectFault(_LinkMessage, frozen=True):
    """Inject a fault of ``phalanx.fleet.fault`` into yourself, for tests and drills."""

    fault: str


class SendFlightRecord(_EpochMessage, frozen=True):
    """Send PyTorch's flight record of this epoch's collectives, while the main thread hangs."""


# --- to the agent -------------------------------------------------------------------------------


class Warm(_LinkMessage, frozen=True):
    """Everything slow is loaded; ready to become a rank."""

    pid: int
    meeting_point: str


class Unfit(_LinkMessage, frozen=True):
    """Sent instead of ``Warm``: this worker's accelerator failed its health checks, or its node cannot train this run. The worker ends."""

    evidence: str


class Alive(_EpochMessage, frozen=True):
    """The worker's heartbeat, sent from a thread of its own several times in a lease."""

    step: int
    """The last step that ended; -1 before the first of the epoch."""
    phase: str
    since_s: float
    """Seconds for which the main thread has been in this phase."""
    waiting_s: float = 0.0
    """Seconds for which it has waited for an object store's samples; 0 if it does not wait."""


class JoinedEpoch(_EpochMessage, frozen=True):
    """The process group is connected and the state is restored."""

    step: int


class EpochBroken(_EpochMessage, frozen=True):
    """This epoch failed here, by an error that may be another rank's fault: most likely a peer was lost."""

    text: str


class Doubted(_EpochMessage, frozen=True):
    """An audit found a wrong computation, statistics found this worker's rank to be a straggler, or a step is
    not finite.
    """

    reason: Literal["corruption", "straggler", "nonfinite"]
    evidence: str
    ranks: tuple[int, ...] = ()
    """With corruption: the ranks that caused it.

    All ranks reach the same verdict, so the first report counts.
    """
    trusted_step: int | None = None
    """With corruption: the newest step whose state is proven good."""
    step: int | None = None
    """With nonfinite: the step. ``ranks`` are those whose own losses were not finite."""


class FlightRecordSent(_EpochMessage, frozen=True):
    """The answer to ``SendFlightRecord``."""

    record: str
    """A flight record, as ``phalanx.fleet.control.inquiry.shortened`` leaves it."""


class LeftEpoch(_EpochMessage, frozen=True):
    """This worker has left this epoch and all before it: it is in no process group."""

    meeting_point: str


class SnapshotTaken(_EpochMessage, frozen=True):
    """A snapshot of this rank is complete in the worker's segments; once the buddy has it too, answer ``SnapshotSafe``."""

    ranks: int
    rank: int
    step: int


class StepEnded(_EpochMessage, frozen=True):
    """A step has ended."""

    step: int


class CheckpointCommitted(_LinkMessage, frozen=True):
    """A checkpoint on disk was committed."""

    step: int


class TrainingFinished(_EpochMessage, frozen=True):
    """The run is complete (``result`` is JSON), or was stopped on request (``result`` is empty)."""

    result: str


class RunFailed(_EpochMessage, frozen=True):
    """This worker cannot continue the run, and no other rank is to blame: a person must fix the error."""

    text: str
    kind: str = ""
    """The class of the error."""
    unanimous: bool = False
    """True if all ranks have agreed on it and raise it."""


ToWorker = JoinEpoch | LeaveEpoch | StopTraining | SnapshotSafe | HoldSaves | InjectFault | SendFlightRecord
EpochOutcome = EpochBroken | Doubted | TrainingFinished | RunFailed
"""The end of an epoch for one worker."""
EpochProgress = Alive | JoinedEpoch | StepEnded | SnapshotTaken | CheckpointCommitted | LeftEpoch
"""The life of a worker in its epochs."""
ToAgent = Warm | Unfit | EpochProgress | EpochOutcome | FlightRecordSent

TO_WORKER: MessageDecoder[ToWorker] = MessageDecoder(ToWorker)
TO_AGENT: MessageDecoder[ToAgent] = MessageDecoder(ToAgent)


@dataclass(frozen=True)
class WorkerArgs:
    """The arguments of a worker process."""

    run_dir: Path
    segments: tuple[int, ...]
    """Descriptors of the memory for this worker's snapshots."""
    run_file_sha256: str
    """The digest of the resolved run file that its agent read (``phalanx.run.identity``)."""
    worker: int
    """The number among the node's workers."""
    node: str
    """The node's name; in a local fleet it ends with the node's number, by which faults find it."""
    host: str = "127.0.0.1"
    """This machine, as the other nodes reach it."""
    attempt: int = 0
    """The number of the run's start, whose claims name the newest epoch."""
    certificates: Path | None = None
    """The folder of certificates, for the data ports of other nodes."""
    link: int = -1
    """Descriptor of the socket to its agent."""


class WorkerEnd:
    """The worker's end of the link. Methods raise ``WireError`` if the agent has ended."""

    def __init__(self, descriptor: int) -> None:
        """``descriptor``: inherited from the agent; a program that this worker starts would keep the link open."""
        os.set_inheritable(descriptor, False)
        self._connection = FramedConnection(socket.socket(fileno=descriptor), "the agent of this worker")

    def send(self, message: ToAgent) -> None:
        """Send a message, from any thread. Raises WireError if the agent has ended."""
        self._connection.send_message(message)

    def receive(self) -> ToWorker:
        """Wait for the agent's next message and return it. Raises WireError if the agent has ended."""
        return self._connection.receive_message(TO_WORKER)


# The orders of a worker's agent, received in one thread and obeyed in another. The receiving thread keeps the
# newest order of each kind here. On an order to leave an epoch at once, a third thread aborts the collective
# that the main thread is in.


_AGAIN_S = 0.02
"""Seconds between two attempts at aborting: a rank may be about to open its next connection."""


class ParkedError(Exception):
    """This epoch is over for this worker."""


class Orders:
    """The newest orders to one worker, shared between the thread that receives them and the main thread."""

    def __init__(self, stop: StopRequest) -> None:
        """Begin without orders; ``stop`` is marked as made by an order to stop."""
        self._stop = stop
        self._changed, self._breaking = threading.Condition(), threading.Lock()
        self._bind: JoinEpoch | None = None
        self._parked, self._planned = -1, -1
        self._safe = (-1, -1)
        self._faults: list[str] = []
        self.saves_held = False
        """True while no checkpoint may be committed, for lack of a coordinator."""
        self._session: tuple[int, Callable[[], None]] | None = None

    # --- the receiving thread ---

    def listen(self, receive: Callable[[], ToWorker]) -> None:
        """Receive orders for ever. Raises the error of ``receive`` when the link ends."""
        while True:
            self.on_order(receive())

    def on_order(self, order: ToWorker) -> None:
        """Record one order and wake the threads that wait. Only the newest bind, and the highest epochs and steps,
        are kept.
        """
        with self._changed:
            match order:
                case JoinEpoch():
                    self._bind = order
                case LeaveEpoch(planned=True):
                    self._planned = max(self._planned, order.epoch)
                case LeaveEpoch():
                    self._parked = max(self._parked, order.epoch)
                case StopTraining():
                    self._stop.made = True
                case SnapshotSafe():
                    self._safe = max(self._safe, (order.epoch, order.step))
                case HoldSaves(hold):
                    self.saves_held = hold
                case InjectFault():
                    self._faults.append(order.fault)
            self._changed.notify_all()

    def break_off(self) -> None:
        """Call the session's ``abort``, every 20 ms, while its epoch is parked. Runs in a thread without end.

        Its exceptions are printed.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._session is not None and self.over(self._session[0]))
            with self._breaking:
                session = self._session
                if session is not None and self.over(session[0]):
                    try:
                        session[1]()
                    except Exception:  # The main thread may be making the groups that are to be aborted: the next attempt counts.
                        traceback.print_exc()
            time.sleep(_AGAIN_S)

    # --- the main thread ---

    def next_bind(self) -> JoinEpoch | None:
        """Wait for an epoch to be a rank in that is not parked, and take the order. Return ``None`` when the worker
        is to end.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stop.made or self._pending() is not None)
            bind, self._bind = self._pending(), None
            return None if self._stop.made else bind

    def _pending(self) -> JoinEpoch | None:
        return self._bind if self._bind is not None and not self.over(self._bind.epoch) else None

    @contextmanager
    def session(self, epoch: int, abort: Callable[[], None]) -> Iterator[None]:
        """Call ``abort`` from another thread, every 20 ms, while ``epoch`` is parked inside the context.

        Its end waits for a call in progress.
        """
        with self._changed:
            self._session = (epoch, abort)
            self._changed.notify_all()
        try:
            yield
        finally:
            # With this lock no abort is in progress, so none can hit the connections of the next epoch.
            with self._breaking, self._changed:
                self._session = None

    def over(self, epoch: int) -> bool:
        """Return True if this worker was ordered out of ``epoch`` at once."""
        return epoch <= self._parked

    def check(self, epoch: int) -> None:
        """Raise ``ParkedError`` if ``epoch`` is over."""
        if self.over(epoch):
            raise ParkedError

    def pause(self, epoch: int, seconds: float) -> None:
        """Wait. Raises ``ParkedError`` as soon as ``epoch`` is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.over(epoch), seconds)
        self.check(epoch)

    def wait_for_saves(self, epoch: int) -> None:
        """Wait until checkpoints may be committed. Raises ``ParkedError`` as soon as ``epoch`` is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.over(epoch) or not self.saves_held)
        self.check(epoch)

    def wait_for_park(self, epoch: int) -> None:
        """Wait until this worker is ordered out of ``epoch``, at once or by plan."""
        with self._changed:
            self._changed.wait_for(lambda: epoch <= max(self._parked, self._planned))

    def leaving(self, epoch: int) -> bool:
        """Return True if ``epoch`` is to end at the next step boundary."""
        return epoch <= self._planned

    def safe_step(self, epoch: int) -> int:
        """Return the newest step of ``epoch`` whose snapshot a buddy holds; -1 if none."""
        return self._safe[1] if self._safe[0] == epoch else -1

    def faults(self) -> list[str]:
        """Return the faults that have arrived since the last call."""
        with self._changed:
            new, self._faults = self._faults, []
        return new
