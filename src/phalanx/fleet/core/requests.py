"""The core's answers to operators and to the shell that drives it: all events that no node sends.

Operators drain and admit nodes, stop the run, and change the size of the fleet without computing a step
twice. The shell reports the time, the disk, changed tokens, a diagnosis, and a new coordinator.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.epochs.epoch_plan import LIVING, SEATED, Order, ranks_of_nodes
from phalanx.fleet.core.epochs.faults import check_deadlines, check_leases, strike
from phalanx.fleet.core.epochs.life_cycle import regroup
from phalanx.fleet.core.epochs.progress import end, restored_step
from phalanx.fleet.core.state import (
    NO_SEAT,
    Eligibility,
    FleetPhase,
    FleetState,
    Node,
    change,
    forget_copies,
    note,
    trusts,
)
from phalanx.observe.events import IncidentKind

DURABLE_KEPT = 1024
"""Checkpoints on disk that the core remembers."""


def drain(state: FleetState, event: m.Drain, orders: list[Order]) -> None:  # noqa: ARG001
    """Mark a node as DRAINED by the operator, which ends the epoch at the next step boundary if it holds ranks.

    Counts as stale for an unknown node, or one that is drained or leaving already.
    """
    node = state.nodes.get(event.node)
    if node is None or node.eligibility in (Eligibility.DRAINED, Eligibility.LEAVING):
        state.stale += 1
        return
    note(state, node.name, "drained by the operator", level="info")
    change(
        state,
        node,
        eligibility=Eligibility.DRAINED,
        reason="drained by the operator",
        fault=IncidentKind.NOTE,
    )


def admit(state: FleetState, event: m.Admit, orders: list[Order]) -> None:  # noqa: ARG001
    """Make a drained, quarantined or still living leaving node GOOD again, and clear its strikes.

    Counts as stale for an unknown node, a good one without strikes, or one that has left.
    """
    node = state.nodes.get(event.node)
    if (
        node is None
        or (node.eligibility is Eligibility.GOOD and not node.strikes)
        or (node.eligibility is Eligibility.LEAVING and not node.alive)
    ):
        state.stale += 1
        return
    note(state, node.name, "admitted by the operator", level="info")
    change(state, node, eligibility=Eligibility.GOOD, reason="", fault=IncidentKind.NOTE, strikes=())


def stop(state: FleetState, event: m.StopRun, orders: list[Order]) -> None:
    """Begin to stop the run: members of a running epoch are ordered to save and stop; otherwise the phase ends it.

    A second request ends the run at once, unless it is marked ``never_at_once``.
    """
    if state.stopping:
        if not event.never_at_once:
            end(state, orders, FleetPhase.FINISHED, "stopped at once")
        return
    state.stopping = True
    if state.phase is FleetPhase.RUNNING:
        orders.append(Order(SEATED, c.Stop(state.epoch)))


def tick(state: FleetState, event: m.Tick, orders: list[Order]) -> None:  # noqa: ARG001
    """Check leases and deadlines, and release nodes that are given back."""
    check_leases(state, orders)
    check_deadlines(state, orders)
    release(state, orders)


def disk_holds(state: FleetState, event: m.DiskHolds, orders: list[Order]) -> None:
    """Replace the recorded durable steps by those on disk, of which the newest 1,024 are kept.

    New ones that are not trusted are condemned. If the fleet binds to an older step than one that was saved
    while the coordinator was away, the epoch ends.
    """
    known_steps = {*state.durable, *state.condemned}
    steps = {step_ for step_ in event.steps if step_ != m.NO_STEP}
    condemned = steps.intersection(state.condemned)
    # Until the epoch that computed wrongly has ended, a new checkpoint comes from it.
    condemned |= {step_ for step_ in steps - known_steps if not trusts(state, state.epoch, step_)}
    state.condemned = sorted(condemned)
    state.durable = sorted(steps - condemned)[-DURABLE_KEPT:]
    # A coordinator may have died before or while it sent the epoch: the members of the previous one continued
    # and saved.
    away = state.phase is FleetPhase.BINDING and state.since_s == state.rolled_s
    if away and state.durable and state.durable[-1] > restored_step(state):
        regroup(state, orders, f"step {state.durable[-1]} was saved while the coordinator was away")


def rekeyed(state: FleetState, event: m.Rekeyed, orders: list[Order]) -> None:
    """Order all living nodes to read the run's new token, and note the change.

    The ranks of a running epoch keep the token with which it began.
    """
    state.epoch_key = state.epoch_key or event.before
    state.key = event.key
    note(state, "", "the tokens of agents and operators were changed", level="info")
    orders.append(Order(LIVING, c.ReadToken(event.key)))


def diagnosed(state: FleetState, event: m.Diagnosed, orders: list[Order]) -> None:
    """Take the diagnosis of a hang: note it, and order the culprit ranks' workers to be killed; their nodes get a
    strike.

    Nothing is killed with pipeline stages, or if the culprits are more than half of the ranks. A late diagnosis
    counts as stale.
    """
    if event.epoch != state.epoch or state.phase is not FleetPhase.RUNNING or not state.diagnosed:
        state.stale += 1
        return
    note(state, "", f"epoch {event.epoch} hangs: {event.text}")
    per_node, ranks = state.settings.formation.workers_per_node, [r for r in event.ranks if r < state.ranks]
    # In a pipeline ranks also wait for point-to-point messages, which flight records may not show: a rank
    # that waits for one would look like one that does not arrive.
    if state.settings.formation.pipeline == 1 and 2 * len(ranks) <= state.ranks:
        for rank in ranks:
            node = state.nodes[state.seats[rank // per_node]]
            orders.append(Order(node.name, c.KillWorker(rank % per_node)))
            if node.warm:
                strike(state, node, f"hangs: {event.text[:200]}", meeting_points=())


def restarted(state: FleetState, event: m.Restarted, orders: list[Order]) -> None:  # noqa: ARG001
    """Restart all leases and the deadline of the phase: the coordinator was down, and no silence meanwhile counts.

    While forming, the deadline moves only as far as to leave nodes one lease.
    """
    settings, now_s = state.settings, state.now_s
    state.rolled_s, state.silent, state.suspects = now_s, set(), {}
    # Nodes of the first epoch get a lease's time to come back, but the wait for them does not start again.
    begun_s = state.since_s if state.phase is FleetPhase.FORMING else now_s
    state.since_s = max(begun_s, now_s - max(0.0, settings.form_s - settings.lease_s))
    state.step_s, state.next_lease_s = now_s, now_s + settings.lease_s


def end_unsent_epoch(state: FleetState, event: m.EpochUnsent, orders: list[Order]) -> None:  # noqa: ARG001
    """End the epoch that is being bound, since it was sent to no node.

    Members of the previous one may have continued, and saved newer state than it would restore.
    """
    if state.phase is FleetPhase.BINDING:
        regroup(state, orders, "the coordinator was lost before it sent the epoch to any node")


def stood_still(state: FleetState, event: m.StoodStill, orders: list[Order]) -> None:  # noqa: ARG001
    """Extend every lease and deadline by the time in which no message could be read; none begins later than now.

    They are not restarted: then a coordinator that stalls again and again would never notice that a node is
    silent.
    """

    def put_off(at_s: float) -> float:
        return min(state.now_s, at_s + event.for_s)

    state.last_seen_s = {name: put_off(at_s) for name, at_s in state.last_seen_s.items()}
    state.suspects = {name: put_off(at_s) for name, at_s in state.suspects.items()}
    state.rolled_s, state.since_s = put_off(state.rolled_s), put_off(state.since_s)
    state.step_s = put_off(state.step_s)
    state.reports_requested_s = (
        None if state.reports_requested_s is None else put_off(state.reports_requested_s)
    )


# The size of a fleet changes by request. A node that is to go is *leaving*: it may hold no rank any more, so
# the epoch is left at a step boundary and the next one is formed without it. Its memory still holds
# snapshots, perhaps the only copies of the newest step. So it leaves only once the members have taken
# snapshots of their own since then, or the step is on disk. Then it is given back, and its agent ends. A node
# leaves because an operator has requested it (``phalanx fleet shrink``), or because its own agent reports
# that its scheduler will take it away. The run's results do not depend on the number of nodes, so this
# changes no bit of them.

GIVEN_BACK = "given back"


class CannotShrinkError(ValueError):
    """The nodes cannot be given back; the message has the reason and the possible number."""


def choose(state: FleetState, by: int, leader: str) -> tuple[str, ...]:
    """Return the names of the ``by`` nodes to give back: unfit ones first, then members from the last seat on, then
    spares.

    Neighboring seats are close in the network, so the released nodes are too. ``leader``, the coordinator's node or
    empty, stays. Raises ``CannotShrinkError`` if there are fewer, or too few would remain.
    """

    def rank(node: Node) -> tuple[int, int, str]:
        if node.eligibility is not Eligibility.GOOD:
            return 0, 0, node.name
        return (1, -node.seat, "") if node.seat != NO_SEAT else (2, 0, node.name)

    present = [
        node
        for node in state.nodes.values()
        if node.alive and node.name != leader and node.eligibility is not Eligibility.LEAVING
    ]
    chosen = tuple(node.name for node in sorted(present, key=rank)[:by])
    if len(chosen) < by:
        raise CannotShrinkError(f"by {by}: there are {len(present)} nodes beside the one that leads")
    require_enough(state, chosen)
    return chosen


def require_enough(state: FleetState, names: tuple[str, ...]) -> None:
    """Raise ``CannotShrinkError`` if without ``names`` too few living, good nodes would remain for
    ``fleet.min_nodes`` or any legal number of ranks.
    """
    going, settings = set(names), state.settings
    good = sum(
        node.alive and node.eligibility is Eligibility.GOOD and node.name not in going
        for node in state.nodes.values()
    )
    if not ranks_of_nodes(settings, good, settings.min_nodes):
        per_node = settings.formation.workers_per_node
        least = max(settings.min_nodes, -(-settings.formation.legal[0] // per_node))
        raise CannotShrinkError(
            f"{good} nodes would be left, and the run needs {least} (fleet.min_nodes, and whole replicas); phalanx fleet stop saves and ends it"
        )


def give_back(state: FleetState, event: m.GiveBack, orders: list[Order]) -> None:  # noqa: ARG001
    """Let the living nodes of ``event`` leave. Reduce ``wanted_nodes`` by the good members among them, and
    ``expected_nodes`` by all.
    """
    going = [
        node
        for name in event.nodes
        if (node := state.nodes.get(name)) is not None
        and node.alive
        and node.eligibility is not Eligibility.LEAVING
    ]
    members = sum(node.seat != NO_SEAT and node.eligibility is Eligibility.GOOD for node in going)
    settings = state.settings
    state.settings = replace(
        settings,
        wanted_nodes=max(1, settings.wanted_nodes - members),
        expected_nodes=max(0, settings.expected_nodes - len(going)),
    )
    for node in going:
        leave(state, node, "given back by the operator")


def leave(state: FleetState, node: Node, reason: str) -> None:
    """Mark a node as LEAVING and note the reason: it holds no rank from the next epoch on. No effect if it leaves
    already.
    """
    if node.eligibility is Eligibility.LEAVING:
        return
    note(state, node.name, reason)
    change(state, node, eligibility=Eligibility.LEAVING, reason=reason, fault=IncidentKind.NOTE)


def enlarge(state: FleetState, event: m.Enlarge, orders: list[Order]) -> None:  # noqa: ARG001
    """Set more wanted and expected nodes and their legal numbers of ranks; new nodes take ranks in a later epoch."""
    settings = state.settings
    formation = replace(settings.formation, legal=event.legal, fewer=event.fewer)
    note(state, "", f"the operator wants {event.wanted_nodes} nodes", level="info")
    state.settings = replace(
        settings,
        formation=formation,
        wanted_nodes=event.wanted_nodes,
        expected_nodes=event.expected_nodes,
    )


def release(state: FleetState, orders: list[Order]) -> None:
    """Order the idle leaving nodes to shut down, while running and once their memory is not needed for a restore.

    They count as not alive from then on, and their copies are forgotten.
    """
    if not state.leaving or state.phase is not FleetPhase.RUNNING or not _has_moved_on(state):
        return
    for node in list(_idle(state)):
        note(state, node.name, GIVEN_BACK, level="info")
        forget_copies(state, node.name)
        change(state, state.nodes[node.name], alive=False, reason=GIVEN_BACK, meeting_points=(), snapshots=())
        state.suspects.pop(node.name, None)
        state.silent.discard(node.name)
        orders.append(Order(node.name, c.Shutdown(GIVEN_BACK)))


def _idle(state: FleetState) -> Iterator[Node]:
    """Yield the nodes that are leaving and hold no rank."""
    for name in sorted(state.leaving):
        node = state.nodes[name]
        if node.seat == NO_SEAT and not node.engaged:
            yield node


def _has_moved_on(state: FleetState) -> bool:
    """Return True if the source of the present epoch is not needed any more: there are newer snapshots, or the
    step is on disk.

    Also True for a fresh start, or without snapshots.
    """
    source, every = state.source, state.settings.snapshot_every_steps
    if isinstance(source, c.Fresh) or not every or max(state.durable, default=m.NO_STEP) >= source.step:
        return True
    # A step more than needed: a snapshot is copied, and sent to its buddy, while the next step is computed.
    return state.step > source.step + every
