"""The state machine of a node's agent: it decides the reaction to every event, without sockets, processes or
a clock.

Every event that reaches an agent (a command, a worker's message, the exit of a process, the passing of time)
has a handler ``on_...`` here. It changes the state and returns actions for the shell in
``phalanx.fleet.node.agent``. Two rules hold everywhere. An epoch that was parked is never entered again
(``fence``), whatever the sender. So the coordinator can re-form the fleet without waiting for messages that
are still in flight. And reports are level-triggered (*my workers are in no epoch*), so sending one twice does
no harm; ``greet`` sends all of them after every reconnection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.node import agent_actions as act
from phalanx.fleet.node import worker_link
from phalanx.fleet.node.worker_link import ToAgent

_TEXT_MAX = 2000
_MEETING_LEAVE_S = 1.0
"""A worker that has not begun to train leaves at once, or not at all: a gloo connect cannot be interrupted."""
_ABANDONED = (
    "no coordinator for {:.0f} s (fleet.coordinator_lease_s). If the run continues, start this agent again; it finds the coordinator's "
    "address in fleet.json of the run directory"
)
_WORKING_PATIENCE = 10
"""Lease multiple of a silent worker that is at work (in native code that keeps Python's lock, or starved of
processor time).
"""
_START_S = 600.0
"""A worker that is not warm after this time (PyTorch from a cold network disk) is started again."""


@dataclass
class AgentState:
    """The state of an agent; see the module."""

    identity: act.NodeIdentity
    incarnation: int
    patience: act.Patience
    snapshots: Callable[[], m.RankSnapshots]
    """Returns the present snapshots in the node's memory."""
    token_of: Callable[[str], str | None] = lambda _name: ""
    """Returns the run's token of that name (the present one if empty); ``None`` if this node does not have
    it.
    """
    fence: int = m.NO_EPOCH
    """Fencing token: this epoch and all before it are never entered again."""
    saving: int = m.NO_EPOCH
    """The number of the last order to save the memory."""
    owed: int | None = None
    """The epoch for which a ``Parked`` is due, to be sent once no worker is left in an epoch."""
    planned: bool = False
    """True if the epoch that ends was ended to grow or shrink the fleet, not by a fault."""
    ended_unix_s: float = 0.0
    """When this node learned that the present epoch must end; 0 if it need not."""
    buddies: dict[int, str] = field(default_factory=dict)
    """By rank, the address of the node that keeps the second copy of its snapshots."""
    evidence: list[m.AgentReport] = field(default_factory=list)
    """Edge-triggered reports of the present epoch, repeated at each reconnection."""
    ticked_s: float = 0.0
    attached_s: float | None = None
    """The time when this agent was last attached to a coordinator, or began; time in which it was itself
    suspended does not count.
    """
    led_s: float | None = None
    """The time when a coordinator last led this agent, or it began."""
    saves_held: bool = False
    """True if the workers hold their saves."""
    leaving: bool = False
    """True if the node is about to be taken away; its reports include that."""
    checked: bool = False
    """True if the node must pass health checks before its workers are offered."""

    def __post_init__(self) -> None:
        self.cleared = not self.checked
        self.workers = [act.WorkerLife() for _ in range(self.identity.workers)]

    # --- levels ------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that the workers are in; the newest, if they differ."""
        return max(worker.epoch for worker in self.workers)

    def joined(self) -> m.Joined:
        """Return the report with this node's identity and complete state."""
        me, bound = self.identity, self.phase() is m.WorkerPhase.BOUND
        return m.Joined(
            node=me.node,
            incarnation=self.incarnation,
            workers=me.workers,
            host=me.host,
            data_port=me.data_port,
            domain=me.domain,
            snapshots=self.snapshots(),
            epoch=self.epoch,
            bound=bound,
            meeting_points=self._meeting_points(),
            started_as_spare=me.started_as_spare,
            leaving=self.leaving,
        )

    def greet(self) -> list[m.AgentReport]:
        """Return the reports that are sent first on a new connection."""
        return [self.joined(), *self.evidence]

    def heartbeat(self) -> m.Heartbeat:
        """Return the heartbeat: the workers' newest epoch, and of those in it the slowest step and the longest wait (s)."""
        in_epoch = self._placed()
        return m.Heartbeat(
            self.identity.node,
            self.incarnation,
            self.epoch,
            min((worker.step for worker in in_epoch), default=m.NO_STEP),
            self.phase(),
            max((worker.waiting_s for worker in in_epoch), default=0.0),
            self.leaving,
        )

    def phase(self) -> m.WorkerPhase:
        """Return the phase of all workers together, that of the last one: COLD without a meeting point of each, else
        WARM if none is in an epoch.

        In an epoch: LEAVING if any leaves, BOUND if all are, else BINDING. Not ``cleared`` by health checks counts as
        COLD.
        """
        in_epoch = self._placed()
        if not all(self._meeting_points()):
            return m.WorkerPhase.COLD
        if not in_epoch:
            return m.WorkerPhase.WARM
        if any(worker.leaving for worker in in_epoch):
            return m.WorkerPhase.LEAVING
        bound = all(worker.bound for worker in in_epoch)
        return m.WorkerPhase.BOUND if bound else m.WorkerPhase.BINDING

    def _placed(self) -> list[act.WorkerLife]:
        """Return the workers that are in an epoch."""
        return [worker for worker in self.workers if worker.epoch != m.NO_EPOCH]

    def _meeting_points(self) -> tuple[str, ...]:
        """Return each worker's rendezvous address; empty for a worker that is not warm, and for all of a node
        that is not ``cleared``.
        """
        return tuple(worker.meeting_point if self.cleared else "" for worker in self.workers)

    # --- commands of the coordinator -----------------------------------------------------------

    def on_command(self, command: c.Command, now_s: float, unix_s: float) -> list[act.AgentAction]:
        """Handle a command of the coordinator: update the state, and return the actions to carry out.

        An outdated Bind, Fence or SaveSnapshots gives none; a repeated Bind or Park gives its report again, if that is due. ``now_s``
        is monotonic; ``unix_s`` is the time of day, for the next epoch's ledger and a new incarnation.
        """
        match command:
            case c.Park():
                return self._park(command, now_s, unix_s)
            case c.Bind():
                return self._bind(command, now_s, unix_s)
            case c.Release(epoch):
                actions = self._order_out(epoch - 1, "this node is a spare now", planned=False, now_s=now_s)
                return [act.DealCopies((), 0), *actions]
            case c.KillWorker(worker):
                runs = worker < len(self.workers) and self.workers[worker].running
                return [act.KillProcess(worker)] if runs else []
            case c.Stop():
                return [
                    act.SendToWorker(i, worker_link.StopTraining("stop requested"))
                    for i, worker in enumerate(self.workers)
                    if worker.epoch != m.NO_EPOCH
                ]
            case c.Fence(reason, incarnation):
                return self._expel(reason, incarnation, unix_s) if self.incarnation <= incarnation else []
            case c.TellAll():
                return [act.SendReport(report) for report in self.greet()]
            case c.Diagnose():
                hanging = [i for i, w in enumerate(self.workers) if w.epoch == command.epoch != m.NO_EPOCH]
                for i in hanging:
                    self.workers[i].owes_flight_record = True
                ask = worker_link.SendFlightRecord(command.epoch)
                return [act.LogStall(command.silent_s), *(act.SendToWorker(i, ask) for i in hanging)]
            case c.ReadToken(key):
                return [act.ReadNewToken(key)]
            case c.SaveSnapshots():
                return self._save(command)
            case c.Shutdown(reason):
                return [act.EndAgent(reason)]
            case c.Lead():
                return []

    def _save(self, order: c.SaveSnapshots) -> list[act.AgentAction]:
        """Return the action that saves this node's snapshots, and fence the order's epoch.

        Empty if this or a later save was ordered before, or workers are in an epoch.
        """
        if order.epoch <= self.saving or self._placed():
            return []  # A repeated command, or one that is older than the epoch of the workers.
        self.saving, self.fence = order.epoch, max(self.fence, order.epoch)
        return [act.SaveMemory(order)]

    def on_saved(
        self, order: c.SaveSnapshots, *, committed: bool, trouble: str = ""
    ) -> list[act.AgentAction]:
        """Report the outcome of ``SaveMemory``: Durable if this node committed the checkpoint, NotSaved if its
        share failed.

        Neither if another node commits, or the save was abandoned.
        """
        me = self.identity.node
        if trouble:
            return [act.SendReport(m.NotSaved(me, self.incarnation, order.epoch, trouble[:_TEXT_MAX]))]
        return [act.SendReport(m.Durable(me, self.incarnation, order.epoch, order.step))] if committed else []

    def _park(self, park: c.Park, now_s: float, unix_s: float) -> list[act.AgentAction]:
        """Order the workers out of an epoch and of earlier ones. Report Parked now if none is in one, else when the
        last leaves.
        """
        self.ended_unix_s = self.ended_unix_s or unix_s
        self.owed, self.planned = max(self.owed or m.NO_EPOCH, park.epoch), park.planned
        actions = self._order_out(park.epoch, park.reason, planned=park.planned, now_s=now_s)
        return actions + self._parked()

    def _order_out(self, epoch: int, reason: str, *, planned: bool, now_s: float) -> list[act.AgentAction]:
        """Raise the fence to ``epoch`` and order every worker out of it and of earlier epochs. Return the actions.

        Unplanned, a worker must leave within ``leave_s``, or ``_MEETING_LEAVE_S`` if it is not bound yet, or is
        killed later; planned, it leaves at a step boundary. A worker that had ended with the run is started
        again.
        """
        self.fence = max(self.fence, epoch)
        actions: list[act.AgentAction] = []
        for i, worker in enumerate(self.workers):
            hurried = not planned and worker.leave_by_s == math.inf
            if not m.NO_EPOCH < worker.epoch <= self.fence:
                continue
            if not worker.running:  # It had ended with the run, and the run continues.
                self.workers[i] = act.WorkerLife()
                actions.append(act.StartProcess(i))
            elif not worker.leaving or hurried:
                worker.leaving = True
                patience_s = self.patience.leave_s if worker.bound else _MEETING_LEAVE_S
                worker.leave_by_s = math.inf if planned else now_s + patience_s
                actions.append(
                    act.SendToWorker(i, worker_link.LeaveEpoch(self.fence, planned=planned, reason=reason))
                )
        return actions

    def _parked(self) -> list[act.AgentAction]:
        """Return the report ``Parked``, with memory and meeting points, if one is due and no worker is left in an
        epoch; else empty.
        """
        if self.owed is None or self._placed():
            return []
        epoch, self.owed, self.evidence = self.owed, None, []
        me = self.identity.node
        return [
            act.SendReport(m.Parked(me, self.incarnation, epoch, self._meeting_points(), self.snapshots()))
        ]

    def _bind(self, bind: c.Bind, now_s: float, unix_s: float) -> list[act.AgentAction]:
        """Let the workers join an epoch with their ranks, and discard snapshots newer than its start. Return the
        actions.

        A fenced epoch is ignored; a repeated order repeats Bound. A node whose workers are not ready describes
        itself instead, and one without the epoch's token reports itself unfit.
        """
        places = dict(bind.places)
        if bind.epoch <= self.fence:
            return []
        if bind.epoch == self.epoch:  # A repeated command: our Bound was lost, if we have sent one.
            return self._bound()
        fit = [i for i in places if i < len(self.workers) and self.workers[i].meeting_point]
        if len(fit) != len(places) or self._placed():
            return [act.SendReport(report) for report in self.greet()]
        token = self.token_of(bind.key)
        if token is None:
            return self._unfit(
                "it does not have the run's new token: make fleet.token readable in the run directory"
            )
        self.fence, self.owed, self.evidence = bind.epoch - 1, None, []
        self.buddies = act.buddy_addresses(bind)
        planned, ended_unix_s = act.end_of_last_epoch(
            bind, planned=self.planned, ended_unix_s=self.ended_unix_s, unix_s=unix_s
        )
        self.planned, self.ended_unix_s = False, 0.0
        for i, rank in places.items():
            self.workers[i].enter(bind.epoch, rank, now_s)
        forget = act.DiscardSnapshots(m.NO_STEP if isinstance(bind.resume, c.Fresh) else bind.resume.step)
        tells = [
            act.SendToWorker(i, act.join_epoch(bind, rank, token, planned=planned, ended_unix_s=ended_unix_s))
            for i, rank in places.items()
        ]
        return [forget, act.DealCopies(tuple(places.values()), bind.ranks), *tells]

    def _expel(self, reason: str, incarnation: int, unix_s: float) -> list[act.AgentAction]:
        """Give this node a higher incarnation after a Fence: kill its workers, keep its memory, and report Joined."""
        self.incarnation = max(incarnation + 1, int(unix_s * 1000))
        self.owed, self.evidence, self.buddies = None, [], {}
        self.fence = max(self.fence, self.epoch)
        self.ended_unix_s = self.ended_unix_s or unix_s
        actions: list[act.AgentAction] = []
        for i, worker in enumerate(self.workers):
            worker.leave("")
            if worker.running:
                worker.doomed, worker.last_words = True, f"expelled: {reason}"
                actions.append(act.KillProcess(i))
        return [act.DealCopies((), 0), *actions, act.SendReport(self.joined())]

    # --- messages of the workers -----------------------------------------------------------------

    def on_worker_message(
        self, index: int, message: ToAgent, now_s: float, unix_s: float
    ) -> list[act.AgentAction]:
        """Handle a message of a worker, which also renews its lease; return the actions.

        Messages of a doomed or ended worker are dropped. So are those of another epoch, except Warm, Unfit,
        SnapshotTaken, CheckpointCommitted, LeftEpoch of a later one, and the text of RunFailed.
        """
        me, life, worker = self.identity.node, self.incarnation, self.workers[index]
        worker.last_message_s = now_s
        if worker.doomed or not worker.running:
            return []
        match message:
            case worker_link.Warm():
                worker.meeting_point = message.meeting_point
                return self._ready()
            case worker_link.Unfit(evidence):
                # Its end is no failure of its own; the next process is checked again.
                worker.doomed = True
                return self._unfit(f"worker {index}: {evidence}")
            case worker_link.Alive(epoch=epoch, step=step, waiting_s=waiting_s) if epoch == worker.epoch:
                worker.step, worker.waiting_s = max(worker.step, step), waiting_s
            case worker_link.StepEnded(epoch=epoch, step=step) if epoch == worker.epoch:
                worker.step = max(worker.step, step)
            case worker_link.JoinedEpoch(epoch=epoch) if epoch == worker.epoch:
                worker.bound = True
                return self._bound()
            case worker_link.EpochBroken(epoch=epoch, text=text) if epoch == worker.epoch:
                return self._testify(m.Broken(me, life, epoch, index, text[:_TEXT_MAX]), unix_s)
            case worker_link.Doubted(epoch=epoch) if epoch == worker.epoch:
                evidence = message.evidence[:_TEXT_MAX]
                report = m.Suspect(
                    me, message.reason, evidence, message.trusted_step, epoch, message.ranks, message.step
                )
                return self._testify(report, 0.0 if message.reason == "straggler" else unix_s)
            case worker_link.FlightRecordSent(epoch=epoch, record=record) if (
                epoch == worker.epoch and worker.owes_flight_record
            ):
                worker.owes_flight_record = False
                return [act.SendReport(m.Recorded(me, life, epoch, record[: m.MOST_RECORD_BYTES]))]
            case worker_link.LeftEpoch(epoch=epoch) if worker.epoch <= epoch:
                return self._left(worker, message)
            case worker_link.SnapshotTaken():
                return self._second_copy(index, message)
            case worker_link.CheckpointCommitted(step):
                return [act.SendReport(m.Durable(me, life, max(worker.epoch, 0), step))]
            case worker_link.TrainingFinished(epoch=epoch, result=result) if epoch == worker.epoch:
                worker.finished, worker.last_words = True, result
                return self._finished(epoch)
            case worker_link.RunFailed(epoch=epoch, text=text):
                worker.last_words = text
                if epoch == worker.epoch != m.NO_EPOCH:
                    fatal = m.Fatal(epoch, me, text[:_TEXT_MAX], message.kind, message.unanimous)
                    return self._testify(fatal, unix_s)
        return []

    # --- health ------------------------------------------------------------------------------------

    def examine(self) -> list[act.AgentAction]:
        """Withdraw the node until its health checks pass: at the start, and after a worker died or hung."""
        self.cleared = not self.checked
        return [act.CheckHealth()] if self.checked else []

    def on_health_checked(self, complaints: str) -> list[act.AgentAction]:
        """Handle the outcome of the health checks; without complaints the node is offered."""
        self.cleared = not complaints
        return self._ready() if self.cleared else self._unfit(complaints)

    def _unfit(self, evidence: str) -> list[act.AgentAction]:
        return [act.SendReport(m.Suspect(self.identity.node, "health", evidence[:_TEXT_MAX]))]

    def _testify(self, report: m.AgentReport, ended_unix_s: float = 0.0) -> list[act.AgentAction]:
        """Keep a report as evidence of the epoch, and return the action that sends it. If the epoch must end, it does
        so from ``ended_unix_s`` on, or from an earlier report's time.
        """
        self.ended_unix_s = self.ended_unix_s or ended_unix_s
        self.evidence.append(report)
        return [act.SendReport(report)]

    def _failed(self, report: m.WorkerExited | m.WorkerHung, unix_s: float) -> list[act.AgentAction]:
        """Report the failure of a worker, which ends its epoch if it has one, and check the node's health."""
        in_epoch = report.epoch != m.NO_EPOCH
        return [*(self._testify(report, unix_s) if in_epoch else [act.SendReport(report)]), *self.examine()]

    def _ready(self) -> list[act.AgentAction]:
        """Return the report that the workers are warm; nothing until all are, or if one has a rank."""
        if not all(self._meeting_points()) or self._placed():
            return []
        return [act.SendReport(m.Ready(self.identity.node, self.incarnation, self._meeting_points()))]

    def _bound(self) -> list[act.AgentAction]:
        """Return the report that the node has entered the epoch; nothing until all workers have."""
        if self.phase() is not m.WorkerPhase.BOUND:
            return []
        return [act.SendReport(m.Bound(self.identity.node, self.incarnation, self.epoch))]

    def _left(self, worker: act.WorkerLife, message: worker_link.LeftEpoch) -> list[act.AgentAction]:
        """Record that a worker has left an epoch and earlier ones; report Parked once all have left."""
        if worker.epoch != m.NO_EPOCH:
            self.owed = max(self.owed or m.NO_EPOCH, message.epoch)
        self.fence = max(self.fence, message.epoch)
        worker.leave(message.meeting_point)
        return self._parked()

    def _second_copy(self, index: int, snapshot: worker_link.SnapshotTaken) -> list[act.AgentAction]:
        """Return the action that streams a snapshot to the rank's buddy. Without a buddy, report it as safe to the
        worker.

        Empty if the worker is in another epoch by now.
        """
        address = self.buddies.get(snapshot.rank)
        if address is None:
            return self.on_pushed(index, snapshot)
        in_time = snapshot.epoch == self.workers[index].epoch
        return [act.StreamSnapshot(index, snapshot, address)] if in_time else []

    def on_pushed(self, index: int, snapshot: worker_link.SnapshotTaken) -> list[act.AgentAction]:
        """Handle the arrival of a snapshot at the buddy: report it as safe to the worker, unless that is in
        another epoch by now.
        """
        if snapshot.epoch != self.workers[index].epoch:
            return []
        return [act.SendToWorker(index, worker_link.SnapshotSafe(snapshot.epoch, snapshot.step))]

    def _finished(self, epoch: int) -> list[act.AgentAction]:
        """Report the run as finished, with rank 0's result, once all workers here have finished.

        Empty on nodes without rank 0, which commits the last checkpoint.
        """
        in_epoch = self._placed()
        if not all(worker.finished for worker in in_epoch):
            return []
        return [
            action
            for w in in_epoch
            if w.rank == 0
            for action in self._testify(m.RunFinished(epoch, w.last_words))
        ]

    # --- processes and time ------------------------------------------------------------------------

    def on_started(self, index: int, now_s: float) -> None:
        """Handle the start of a worker's process."""
        self.workers[index] = act.WorkerLife(running=True, last_message_s=now_s)

    def on_exit(self, index: int, code: int, text: str, unix_s: float) -> list[act.AgentAction]:
        """Handle the exit of a worker's process (``code`` below 0: by that signal); ``text`` is the end of its
        log.

        A worker that has finished stays ended. Others are started again; unless the worker is ``doomed``, the
        exit is reported and the node's health checked.
        """
        worker = self.workers[index]
        if worker.finished and not worker.leaving:
            worker.running = False
            return []
        epoch, self.workers[index] = worker.epoch, act.WorkerLife()
        actions: list[act.AgentAction] = [act.StartProcess(index)]
        if not worker.doomed:
            me, text = self.identity.node, (worker.last_words or text)[-_TEXT_MAX:]
            exited = m.WorkerExited(me, self.incarnation, epoch, index, code, text, worker.stuck)
            actions += self._failed(exited, unix_s)
        return actions + self._parked()

    def silent(self, now_s: float) -> list[int]:
        """Return the workers that have been silent for more than half of their lease."""
        return [
            index
            for index, worker in enumerate(self.workers)
            if worker.running and now_s - worker.last_message_s > self.patience.lease_s / 2
        ]

    def on_tick(
        self,
        now_s: float,
        unix_s: float,
        *,
        attached: bool = True,
        led: bool = True,
        working: Collection[int] = (),
    ) -> list[act.AgentAction]:
        """Handle the passing of time: kill and report workers whose lease has run out, kill those that do not
        leave an epoch.

        ``attached``: a coordinator is connected; more than ``coordinator_s`` without one ends the agent as
        failed. ``led``: that one leads; after more than ``saves_s`` without a leader, saves are held.
        ``working``: silent workers that the kernel reports as running; their lease is ten times longer. A
        worker that is not warm has 600 s. After a pause of this agent itself of more than half a lease, leases
        start again.
        """
        stood_s = now_s - self.ticked_s
        self.ticked_s = now_s
        if attached or self.attached_s is None:
            self.attached_s = now_s
        if stood_s > self.patience.lease_s / 2:
            # This agent itself was suspended: the workers' messages are still unread.
            self.attached_s = min(now_s, self.attached_s + stood_s)
            for worker in self.workers:
                worker.last_message_s = now_s
            return []
        if now_s - self.attached_s > self.patience.coordinator_s:
            return [act.EndAgent(_ABANDONED.format(now_s - self.attached_s), failed=True)]
        actions: list[act.AgentAction] = self._hold_saves(now_s, led=led)
        for index, worker in enumerate(self.workers):
            if not worker.running or worker.doomed or worker.finished:
                continue
            silent_s = now_s - worker.last_message_s
            lease_s = self.patience.lease_s * (_WORKING_PATIENCE if index in working else 1)
            if silent_s > (lease_s if worker.meeting_point else _START_S):
                worker.doomed = True
                hung = m.WorkerHung(self.identity.node, self.incarnation, worker.epoch, index, silent_s)
                actions += [act.KillProcess(index), *self._failed(hung, unix_s)]
            elif now_s > worker.leave_by_s:
                worker.leave_by_s, worker.stuck = math.inf, True
                worker.last_words = f"did not leave epoch {worker.epoch}: killed"
                actions.append(act.KillProcess(index))
        return actions

    def _hold_saves(self, now_s: float, *, led: bool) -> list[act.AgentAction]:
        """Return the orders to hold saves once no coordinator has led for ``saves_s``, or to resume them once one
        leads.

        Empty if neither has changed. Without a leader, a coordinator elsewhere may begin another epoch.
        """
        if led or self.led_s is None:
            self.led_s = now_s
        hold = now_s - self.led_s > self.patience.saves_s
        if hold == self.saves_held:
            return []
        self.saves_held = hold
        return [
            act.SendToWorker(i, worker_link.HoldSaves(hold)) for i, w in enumerate(self.workers) if w.running
        ]
