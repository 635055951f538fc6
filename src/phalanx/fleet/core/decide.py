"""The core: every decision of the control plane, as ``(state, event, now) -> (state, orders)``.

No clock, no I/O, no randomness. It is total: every event is handled in every state, most often by counting it
as stale and doing nothing. A message is accepted if it comes from the node's current, unfenced incarnation
and refers to the current epoch. Nothing relies on a message arriving, or on the order in which messages of
different nodes arrive. Heartbeats repeat the essential state. If one contradicts the core's state, the core
repeats the command or requests the node's description.

The live coordinator and the simulator drive this same function; the journal of events replays to the same
state.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core import requests
from phalanx.fleet.core.epochs import faults
from phalanx.fleet.core.epochs.epoch_plan import Order
from phalanx.fleet.core.epochs.faults import lose, rollcall, strike
from phalanx.fleet.core.epochs.life_cycle import IN_EPOCH, advance, regroup
from phalanx.fleet.core.epochs.progress import OVER, end, not_saved, stepped, waits_for_samples
from phalanx.fleet.core.settings import CoreSettings
from phalanx.fleet.core.state import (
    NO_SEAT,
    UNMET,
    Eligibility,
    FleetPhase,
    FleetState,
    Node,
    change,
    distrust,
    forget_copies,
    note,
    put,
    trusts,
)
from phalanx.observe.events import IncidentKind
from phalanx.run.identity import FencingToken

CoreStep = Callable[[FleetState, m.CoreEvent, float], tuple[FleetState, list[Order]]]
"""The type of ``step``; the simulator also runs variants of it that are broken on purpose."""
LEAVES = "its agent reports that the node is about to be taken away"
_NO_START = FencingToken(0, "")


def initial_state(settings: CoreSettings, now_s: float, fencing: FencingToken = _NO_START) -> FleetState:
    """Return the state of a fleet without nodes, for the start of a run that ``fencing`` names."""
    return FleetState(settings=settings, fencing=fencing, now_s=now_s, since_s=now_s, step_s=now_s)


def step(state: FleetState, event: m.CoreEvent, now_s: float) -> tuple[FleetState, list[Order]]:
    """Return the state after ``event``, and the resulting orders. Mutates the given state: use the one
    returned.

    ``now_s`` is any clock's reading, in seconds; one that steps back counts as standing still.
    """
    state.now_s = max(state.now_s, now_s)
    orders: list[Order] = []
    _apply(state, event, orders)
    advance(state, orders)
    return state, orders


def _apply(state: FleetState, event: m.CoreEvent, orders: list[Order]) -> None:
    """Apply an event, or each of several folded into one, to the state.

    After the end of the run, only newcomers are answered: with its end.
    """
    if isinstance(event, m.Folded):
        for folded in event.events:
            _apply(state, folded, orders)
    elif state.phase in OVER:
        if isinstance(event, m.Joined):
            orders.append(Order(event.node, c.Shutdown(state.reason)))
    elif (handle := _SENDER_HANDLERS.get(type(event))) is None:
        _HANDLERS[type(event)](state, event, orders)
    elif isinstance(event, m.NodeReport) and (node := _sender(state, event, orders)) is not None:
        handle(state, node, event, orders)


def _sender(
    state: FleetState, report: m.NodeReport, orders: list[Order], *, life: bool = True
) -> Node | None:
    """Return the living sender of a report, or None if it is unknown, lost, or of another incarnation.

    With ``life``, it counts as a sign of life and clears suspicion. An unknown node or higher incarnation is
    ordered to describe itself, and a lost one gets its standing order. A message without a living sender counts as
    stale.
    """
    name, incarnation = report.node, report.incarnation
    node = state.nodes.get(name)
    if node is None or incarnation > node.incarnation:
        orders.append(Order(name, c.TellAll()))
    elif not node.alive:
        # Also for a lower one, of a machine whose clock has stepped back: the fence names the incarnation to
        # exceed.
        orders.append(Order(name))
    elif incarnation == node.incarnation:
        if life:
            state.last_seen_s[name] = state.now_s
            state.suspects.pop(name, None)
        return node
    state.stale += 1
    return None


# --- reports of agents ----------------------------------------------------------------------------


def _joined(state: FleetState, event: m.Joined, orders: list[Order]) -> None:
    """Take a node's description: a newer incarnation loses the old node and replaces it, the same one updates it.

    An older or lost one is treated as by ``_sender``. Its copies are recorded afresh, and its epoch is compared
    with the state. With a token in use, it is ordered to read that.
    """
    old = state.nodes.get(event.node)
    if old is not None and old.alive and old.incarnation == UNMET:
        old = change(
            state, old, incarnation=event.incarnation
        )  # Not another life: the node was known by name alone.
    if (
        old is not None
        and event.incarnation <= old.incarnation
        and not (old.alive and event.incarnation == old.incarnation)
    ):
        _sender(state, event, orders)
        return
    if old is not None and event.incarnation > old.incarnation:
        if old.alive:
            lose(state, orders, old, "its agent was started again")
        old = state.nodes[event.node]
    state.last_seen_s[event.node] = state.now_s
    state.suspects.pop(event.node, None)
    forget_copies(state, event.node)
    node = put(state, _described(old, event))
    if (
        state.key
    ):  # It may have been away when the token was changed; an agent that has the token ignores the order.
        orders.append(Order(event.node, c.ReadToken(state.key)))
    # An agent from the run's previous start brings snapshots of its epochs. Trust in a snapshot depends on
    # its epoch, so this start must not reuse such a number.
    state.seen_epoch = max(state.seen_epoch, *(snapshot.epoch for snapshot in event.snapshots), m.NO_EPOCH)
    _compare(state, node, event.epoch, _level(event), orders)


def _described(old: Node | None, event: m.Joined) -> Node:
    """Return the node that a description makes, with seat, strikes and, in the same incarnation, engagement of the
    old one.
    """
    eligibility = _eligibility(old, event)
    return Node(
        name=event.node,
        incarnation=event.incarnation,
        workers=event.workers,
        host=event.host,
        data_port=event.data_port,
        domain=event.domain,
        meeting_points=event.meeting_points,
        snapshots=event.snapshots,
        engaged=bool(
            old and old.engaged and old.incarnation == event.incarnation and event.epoch != m.NO_EPOCH
        ),
        eligibility=eligibility,
        reason=LEAVES if event.leaving else old.reason if old and eligibility is old.eligibility else "",
        fault=old.fault if old and eligibility is old.eligibility else IncidentKind.NOTE,
        seat=old.seat if old else NO_SEAT,
        started_as_spare=event.started_as_spare,
        strikes=old.strikes if old else (),
    )


def _eligibility(old: Node | None, event: m.Joined) -> Eligibility:
    """Return a node's eligibility after its description: LEAVING if it leaves, else as before.

    GOOD for a new node, and for a new incarnation of a node that was leaving.
    """
    if event.leaving:
        return Eligibility.LEAVING
    # A new life of its agent: the machine has joined the fleet again.
    if old is None or (old.eligibility is Eligibility.LEAVING and event.incarnation > old.incarnation):
        return Eligibility.GOOD
    return old.eligibility


def _level(event: m.Joined) -> m.WorkerPhase:
    """Return the phase of the workers that a description implies: BOUND or BINDING in an epoch, else WARM if all
    have meeting points, or COLD.
    """
    if event.epoch != m.NO_EPOCH:
        return m.WorkerPhase.BOUND if event.bound else m.WorkerPhase.BINDING
    warm = len(event.meeting_points) == event.workers and all(event.meeting_points)
    return m.WorkerPhase.WARM if warm else m.WorkerPhase.COLD


def _ready(state: FleetState, node: Node, event: m.Ready, orders: list[Order]) -> None:  # noqa: ARG001
    """Take the report that a node's workers are warm; they are no longer in an epoch."""
    change(state, node, meeting_points=event.meeting_points, engaged=False)


def _heartbeat(state: FleetState, node: Node, event: m.Heartbeat, orders: list[Order]) -> None:
    """Take a node's heartbeat: progress and waiting for samples of a bound member, a wish to leave, and its
    workers' epoch.
    """
    if event.epoch == state.epoch and node.seat != NO_SEAT and event.phase is m.WorkerPhase.BOUND:
        stepped(state, event.step)
        if event.waiting_s > 0:
            waits_for_samples(state, node, event.waiting_s)
    if event.leaving and node.eligibility is not Eligibility.LEAVING:
        requests.leave(state, node, LEAVES)
        node = state.nodes[node.name]
    _compare(state, node, event.epoch, event.phase, orders)


def _compare(state: FleetState, node: Node, epoch: int, phase: m.WorkerPhase, orders: list[Order]) -> None:
    """Reconcile the state with ``epoch`` and ``phase``, in which the node's workers really are, after a lost
    message.

    A node outside the epoch is ordered to park or to describe itself, and one that misses an order gets it again. A
    member that has left or is leaving ends the epoch. ``seen_epoch`` grows with ``epoch``.
    """
    free, member = (
        epoch == m.NO_EPOCH,
        node.seat != NO_SEAT
        and state.phase not in (FleetPhase.WAITING, FleetPhase.FORMING, FleetPhase.SAVING),
    )
    # Higher than ours only if the journal was lost: the number of an epoch must never be used twice.
    state.seen_epoch = max(state.seen_epoch, epoch)
    if phase is m.WorkerPhase.COLD and node.warm:
        node = change(state, node, meeting_points=(), reason="its workers are not warm")
    elif phase is not m.WorkerPhase.COLD and not node.warm:
        orders.append(Order(node.name, c.TellAll()))
    if not member:
        if not free:
            node = change(state, node, engaged=True)
            orders.append(Order(node.name, c.Park(epoch, "it is not a member of this epoch")))
        elif node.engaged:
            # It has left its epoch, and its report of that is lost: it may hold more than it has reported.
            orders.append(Order(node.name, c.TellAll()))
        if state.phase is FleetPhase.SAVING:
            orders.append(Order(node.name))
    elif state.phase is FleetPhase.PARKING and node.name in state.awaiting:
        orders.append(Order(node.name))
    elif state.phase is FleetPhase.BINDING and node.name in state.awaiting:
        if epoch == state.epoch and phase is m.WorkerPhase.BOUND:
            state.awaiting.discard(node.name)
        elif epoch < state.epoch and phase is not m.WorkerPhase.COLD:
            orders.append(Order(node.name))
        elif phase is m.WorkerPhase.LEAVING:
            regroup(state, orders, f"node {node.name} is leaving epoch {state.epoch}")
    elif state.phase in IN_EPOCH and (epoch != state.epoch or phase is m.WorkerPhase.LEAVING):
        regroup(state, orders, f"node {node.name} has left epoch {state.epoch}")
    elif state.phase is FleetPhase.RUNNING and state.stopping:
        orders.append(Order(node.name, c.Stop(state.epoch)))


def _worker_failed(
    state: FleetState,
    node: Node,
    event: m.WorkerExited | m.WorkerHung,
    orders: list[Order],  # noqa: ARG001
) -> None:
    """Take the report that a worker exited or hung: the node is no longer warm, and gets a strike unless the exit
    was innocent. The seat of a member becomes vacant, which ends the epoch.

    Counts as stale if the node is not warm, or it is a member and the report is of an earlier epoch, or of none
    while the fleet trains.
    """
    member = node.seat != NO_SEAT and state.phase in (*IN_EPOCH, FleetPhase.PARKING)
    earlier = m.NO_EPOCH < event.epoch < state.epoch
    if not node.warm or (
        member and (earlier or (state.phase is FleetPhase.RUNNING and event.epoch == m.NO_EPOCH))
    ):
        state.stale += 1
        return
    if isinstance(event, m.WorkerExited):
        reason = f"worker {event.worker} exited with code {event.code}" + (
            event.text and f": {event.text[:200]}"
        )
    else:
        reason = f"worker {event.worker} hung, silent for {event.silent_s:.1f} s"
    if isinstance(event, m.WorkerExited) and event.innocent:
        note(state, node.name, reason, kind=IncidentKind.LOST)
        change(state, node, reason=reason, fault=IncidentKind.LOST, meeting_points=())
        return
    strike(state, node, reason, meeting_points=())


def _broken(state: FleetState, node: Node, event: m.Broken, orders: list[Order]) -> None:
    """Take the report that a collective of this epoch broke: lose the suspected nodes, those without connection.

    Ends the epoch unless a seat is vacant. In another epoch or phase it counts as stale.
    """
    if event.epoch != state.epoch or state.phase not in IN_EPOCH:
        state.stale += 1
        return
    state.evidence = True
    for name in sorted(state.suspects):
        lose(state, orders, state.nodes[name], "its connection and a collective broke")
    if not state.vacant:
        regroup(
            state,
            orders,
            f"node {node.name}, worker {event.worker}: {event.text[:200] or 'a collective broke'}",
        )


def _parked(state: FleetState, node: Node, event: m.Parked, orders: list[Order]) -> None:
    """Take the report that a node has left its epoch: replace its snapshots and meeting points, and stop waiting
    for it.

    A member that left by itself ends the epoch. A member's report of an earlier epoch counts as stale.
    """
    member = node.seat != NO_SEAT and state.phase in (*IN_EPOCH, FleetPhase.PARKING)
    if event.epoch < state.epoch and member:
        state.stale += 1
        return
    forget_copies(state, node.name)
    change(state, node, meeting_points=event.meeting_points, snapshots=event.snapshots, engaged=False)
    if state.phase is FleetPhase.PARKING:
        state.awaiting.discard(node.name)
    elif member:
        # It noticed the fault before the core did. Without this note the core would wait for its Parked
        # forever.
        state.early.add(node.name)
        regroup(state, orders, f"node {node.name} has left epoch {state.epoch}")


def _bound(state: FleetState, node: Node, event: m.Bound, orders: list[Order]) -> None:  # noqa: ARG001
    """Take the report that a node has entered the epoch: stop waiting for it. In another epoch or phase it counts
    as stale.
    """
    if event.epoch == state.epoch and state.phase is FleetPhase.BINDING:
        state.awaiting.discard(node.name)
    else:
        state.stale += 1


def _durable(state: FleetState, node: Node, event: m.Durable, orders: list[Order]) -> None:  # noqa: ARG001
    """Take the report that a checkpoint is on disk: its step becomes durable and is no longer condemned.

    Ignored if its step is distrusted or its epoch is later than the present one. The newest ``DURABLE_KEPT``
    are kept.
    """
    if event.epoch <= state.epoch and trusts(state, event.epoch, event.step):
        state.condemned = [step_ for step_ in state.condemned if step_ != event.step]
        state.durable = sorted({*state.durable, event.step} - {m.NO_STEP})[-requests.DURABLE_KEPT :]


_SUSPICIONS = {
    "straggler": IncidentKind.STRAGGLER,
    "corruption": IncidentKind.CORRUPTION,
    "health": IncidentKind.HARDWARE,
}


def _suspect(state: FleetState, event: m.Suspect, orders: list[Order]) -> None:
    """Take a report of unfit nodes: corruption, straggler and others by ``_doubt``, "nonfinite" by
    ``faults.nonfinite``.

    A report that names no node counts as stale.
    """
    if event.reason == "nonfinite":
        faults.nonfinite(state, event, orders)
        return
    suspects = _named(state, event)
    if not suspects:
        state.stale += 1
    for name in suspects:
        _doubt(state, event, state.nodes[name], orders)


def _named(state: FleetState, event: m.Suspect) -> list[str]:
    """Return the names of the nodes that a report calls unfit: by ranks of the present epoch, or if it has no
    ranks, its sender.

    Empty for ranks of another epoch, or an unknown sender.
    """
    if not event.ranks:
        return [event.node] if event.node in state.nodes else []
    # All members report a corruption before they leave the epoch, so a report of an earlier epoch is a repetition.
    if event.epoch != state.epoch:
        return []
    seats = {rank // state.settings.formation.workers_per_node for rank in event.ranks}
    return [state.seats[seat] for seat in sorted(seats) if seat < len(state.seats)]


def _doubt(state: FleetState, event: m.Suspect, node: Node, orders: list[Order]) -> None:
    """Act on the suspicion of one node: roll back after corruption, and quarantine it with the evidence.

    A seated straggler without a spare is only noted. A node that is not GOOD counts as stale.
    """
    trusted_step = event.trusted_step
    if event.reason == "corruption" and trusted_step is not None:
        _roll_back(state, event, node, trusted_step, orders)
    if node.eligibility is not Eligibility.GOOD:
        state.stale += 1
        return
    if event.reason == "straggler" and not state.spares and node.seat != NO_SEAT:
        text = f"slow, and no spare to take its place: {event.evidence[:200]}"
        note(state, node.name, text, kind=IncidentKind.SLOW_WITHOUT_SPARE)
        return
    faults.set_aside(state, node.name, f"{event.reason}: {event.evidence[:200]}", _SUSPICIONS[event.reason])


def _roll_back(state: FleetState, event: m.Suspect, node: Node, step_: int, orders: list[Order]) -> None:
    """Distrust the state after step ``step_`` and end the epoch, unless that was done already."""
    # An audit compares the steps of its own epoch, so a finding of an earlier epoch is new only if it goes further back.
    limits = [
        limit.step for limit in state.distrust if event.epoch is not None and event.epoch <= limit.epoch
    ]
    if limits and min(limits) <= step_:
        return
    distrust(state, step_)
    regroup(state, orders, f"node {node.name} computed wrongly; back to step {step_}")


def _finished(state: FleetState, event: m.RunFinished, orders: list[Order]) -> None:
    """Take the report that the run has finished in this epoch: keep its result, and end the run as FINISHED.

    Counts as stale for another epoch, or outside an epoch and its parking.
    """
    # Also while binding: with few steps left, the run can end before the last Bound has arrived.
    if event.epoch == state.epoch and state.phase in (*IN_EPOCH, FleetPhase.PARKING):
        state.result_json = event.result_json
        end(state, orders, FleetPhase.FINISHED, "stopped" if state.stopping else "all steps are done")
    else:
        state.stale += 1


def _disconnected(state: FleetState, event: m.Disconnected, orders: list[Order]) -> None:
    """Take the end of a node's connection: a seated one is lost if a collective broke too, else it is suspected
    from now on.

    Stale senders are ignored; it is no sign of life.
    """
    node = _sender(state, event, orders, life=False)
    if node is None:
        return
    if state.evidence and node.seat != NO_SEAT:
        lose(state, orders, node, "its connection and a collective broke")
    else:
        state.suspects.setdefault(node.name, state.now_s)


_SENDER_HANDLERS: dict[type, Callable[..., None]] = {
    m.Ready: _ready,
    m.Heartbeat: _heartbeat,
    m.WorkerExited: _worker_failed,
    m.WorkerHung: _worker_failed,
    m.Broken: _broken,
    m.Parked: _parked,
    m.Bound: _bound,
    m.Durable: _durable,
}
"""Handlers of reports that count only with a living sender, which they are given."""

_HANDLERS: dict[type, Callable[..., None]] = {
    m.Joined: _joined,
    m.NotSaved: not_saved,
    m.Suspect: _suspect,
    m.RunFinished: _finished,
    m.Fatal: faults.fatal,
    m.Drain: requests.drain,
    m.Admit: requests.admit,
    m.StopRun: requests.stop,
    m.GiveBack: requests.give_back,
    m.Enlarge: requests.enlarge,
    m.Disconnected: _disconnected,
    m.Tick: requests.tick,
    m.DiskHolds: requests.disk_holds,
    m.Rekeyed: requests.rekeyed,
    m.Diagnosed: requests.diagnosed,
    m.Restarted: requests.restarted,
    m.EpochUnsent: requests.end_unsent_epoch,
    m.StoodStill: requests.stood_still,
    m.Rollcall: rollcall,
}
