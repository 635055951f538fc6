"""Runs of small hostile worlds: every possible fault strikes at any moment, during recovery too; the core must keep its invariants.

A world is a function of its seed: fleet, layout, network and faults are drawn from it. The network loses, repeats,
delays and reorders messages. Workers die and hang; machines die alone and by racks and come back; links break. The
coordinator is cut off, stops, crashes and replays its journal, or is lost with its machine and succeeded. Nodes turn out slow,
unsound or wrong, or fail alone with an error; steps are not finite. After every event the
invariants of the core and of the world are checked. When the faults have ended, training must resume within a bound.
The method is that of FoundationDB (SIGMOD 2021, section 4) and TigerBeetle: one thread, one seed, one truth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from phalanx.fleet.core import decide as core
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.epochs.epoch_plan import can_do_without
from phalanx.fleet.core.invariants import BrokenInvariant
from phalanx.fleet.core.requests import CannotShrinkError, choose
from phalanx.fleet.core.state import FleetPhase
from phalanx_plan.simulate.hostile.node import SimulatedNode
from phalanx_plan.simulate.hostile.world import HostileWorld

# The faults of a hostile world, each a function of the world and its random numbers.


def strike_somewhere(world: HostileWorld) -> None:
    """Inject one fault, drawn from the world's random numbers."""
    names, weights = zip(*((name, weight) for name, (weight, _) in _FAULTS.items()), strict=True)
    name = world.random.choices(names, weights)[0]
    world.faults[name] += 1
    _FAULTS[name][1](world)


def _somebody(world: HostileWorld) -> SimulatedNode:
    """Return a random node."""
    return world.nodes[world.random.choice(list(world.nodes))]


def _crash(world: HostileWorld, node: SimulatedNode) -> None:
    """Crash a node, silently at times, and start it again later."""
    node.crash(silently=world.random.random() < 0.3)
    world.clock.after(world.random.uniform(0.5, 30), node.start)


def _rack(world: HostileWorld) -> None:
    """Crash most nodes of one domain within 0.2 seconds."""
    domain = _somebody(world).domain
    for node in world.nodes.values():
        if node.domain == domain and world.random.random() < 0.9:
            world.clock.after(world.random.uniform(0, 0.2), partial(_crash, world, node))


def _link(world: HostileWorld) -> None:
    """Break the collective for a node and about half of its group. Nothing for a node in no group."""
    node = _somebody(world)
    group = node.group
    if group is None:
        return
    for other in group.members:
        if other.epoch == group.epoch and (other is node or world.random.random() < 0.5):
            other.break_collective()


def _cut_all(world: HostileWorld) -> None:
    """Cut all nodes off for a while."""
    for node in world.nodes.values():
        _isolate(world, node)


def _isolate(world: HostileWorld, node: SimulatedNode) -> None:
    """Cut a node off from the network for 0.1 to 15 s; with a chance of 0.5 its head receives ``Disconnected``.

    No effect if it is down or already cut off.
    """

    def mend() -> None:
        node.cut = False

    if not node.cut and node.up:
        node.cut = True
        if world.random.random() < 0.5 and node.head is not None:
            node.head.receive(m.Disconnected(node.name, node.incarnation))
        world.clock.after(world.random.uniform(0.1, 15), mend)


def _coordinator(world: HostileWorld) -> None:
    """Crash the coordinator, and start it again later."""
    world.coordinator.crash()
    world.clock.after(world.random.uniform(0.1, 20), world.coordinator.start)


def _head(world: HostileWorld) -> None:
    """Lose the machine of the head, and everything on it."""
    node = world.nodes.get(world.coordinator.node)
    if node is not None:
        _crash(world, node)


def _fall(world: HostileWorld) -> None:
    """Crash the head in its next decision that needs a claim, and restart it some time later."""
    head = world.coordinator
    head.falls = world.random.choice(("before", "after"))
    world.clock.after(world.random.uniform(5, 25), head.start)


def _stand_still(world: HostileWorld) -> None:
    """Stop the head's process and resume it later, when another may have taken over. Does nothing if it is down."""
    head = world.coordinator
    if head.up:
        head.stopped = True
        world.clock.after(world.random.uniform(1, 40), head.resume)


def _part(world: HostileWorld) -> None:
    """Put each node on a random side of a network partition. It heals after 1 to 40 s."""
    for node in world.nodes.values():
        node.side = world.random.randint(0, 1)

    def mend() -> None:
        for node in world.nodes.values():
            node.side = 0

    world.clock.after(world.random.uniform(1, 40), mend)


def _accuse(world: HostileWorld, reason: Literal["straggler", "health"]) -> None:
    """Report a node as suspect, and admit it later."""
    name = _somebody(world).name
    world.coordinator.receive(m.Suspect(name, reason, "a test"))
    world.clock.after(world.random.uniform(1, 20), lambda: world.coordinator.receive(m.Admit(name)))


def _sicken(world: HostileWorld) -> None:
    """Let a node compute values that are not finite for up to 20 s; the operator admits it again some seconds later."""
    node = _somebody(world)
    node.sick = True
    world.ever_sick.add(node.name)

    def heal() -> None:
        node.sick = False
        world.clock.after(world.random.uniform(1, 20), lambda: world.coordinator.receive(m.Admit(node.name)))

    world.clock.after(world.random.uniform(1, 20), heal)


def _cannot_train(world: HostileWorld) -> None:
    """Report a fatal error of a single node, without which the others can continue. Admits it again later.

    Does nothing if the head is down or stopped, or the fleet cannot do without the node.
    """
    name, state = _somebody(world).name, world.coordinator.state
    listens = world.coordinator.up and not world.coordinator.stopped
    if not listens or name not in state.nodes or not can_do_without(state, {name}):
        return
    kind = f"error {world.faults['cannot train']}"
    world.coordinator.receive(m.Fatal(state.epoch, name, "its data cannot be read", kind))
    world.clock.after(world.random.uniform(1, 20), lambda: world.coordinator.receive(m.Admit(name)))


def _corrupt(world: HostileWorld) -> None:
    """Let the running group of a random node compute wrongly from its next step on, and report the node a few seconds later.

    Nothing if the node does not compute in a running group, or the group's state is corrupt already.
    """
    node = _somebody(world)
    group = node.group
    if group is None or not group.running or not node.computes(group.epoch) or group.tainted(group.step + 1):
        return
    group.right_until = group.step
    suspicion = m.Suspect(
        node.name, "corruption", "checksums differ", trusted_step=group.step, epoch=group.epoch
    )
    world.unreported += 1
    world.clock.after(world.random.uniform(0, 3), lambda: _report(world, suspicion))


def _report(world: HostileWorld, suspicion: m.Suspect) -> None:
    """Report a corruption, again each second until a head that has the node in its fleet receives it and survives.

    Starts the head if it is down.
    """
    head = world.coordinator
    head.start()
    is_received = head.up and not head.stopped and suspicion.node in head.state.nodes
    if is_received:
        head.receive(suspicion)
    if is_received and head.up:
        world.unreported -= 1
    else:
        world.clock.after(1.0, lambda: _report(world, suspicion))


def _drain(world: HostileWorld) -> None:
    """Drain a node, and admit it later."""
    name = _somebody(world).name
    world.coordinator.receive(m.Drain(name))
    world.clock.after(world.random.uniform(1, 20), lambda: world.coordinator.receive(m.Admit(name)))


def _give_back(world: HostileWorld) -> None:
    """Give one or two nodes back, as an operator does, and request the full size again later. Does nothing if the fleet cannot shrink."""
    state, before = world.coordinator.state, world.conditions.settings
    try:
        names = choose(state, world.random.randint(1, 2), world.coordinator.node)
    except CannotShrinkError:
        return
    world.coordinator.receive(m.GiveBack(names))
    formation = before.formation
    again = m.Enlarge(before.wanted_nodes, before.expected_nodes, formation.legal, formation.fewer)
    world.clock.after(world.random.uniform(1, 30), lambda: world.coordinator.receive(again))


def _take_away(world: HostileWorld) -> None:
    """Mark a machine as about to be removed by its scheduler; with a chance of 0.3 it goes within 20 s in any case."""
    node = _somebody(world)
    node.going = True
    if world.random.random() < 0.3:
        world.clock.after(world.random.uniform(0.1, 20), partial(_end_of_grace, world, node))


def _end_of_grace(world: HostileWorld, node: SimulatedNode) -> None:
    """Crash a node whose machine is still to be removed."""
    if node.going:
        node.going = False
        _crash(world, node)


_FAULTS: dict[str, tuple[float, Callable[[HostileWorld], None]]] = {
    "worker killed": (4, lambda world: _somebody(world).kill_worker()),
    "worker hung": (3, lambda world: _somebody(world).hang(noticed=world.random.random() < 0.7)),
    "node lost": (4, lambda world: _crash(world, _somebody(world))),
    "rack lost": (1, _rack),
    "link broken": (2, _link),
    "node cut off": (2, lambda world: _isolate(world, _somebody(world))),
    "all cut off": (0.5, _cut_all),
    "coordinator crashed": (2, _coordinator),
    "head lost": (1.5, _head),
    "head fell while deciding": (1, _fall),
    "head stood still": (1, _stand_still),
    "network parted": (1, _part),
    "straggler": (1, lambda world: _accuse(world, "straggler")),
    "unsound": (0.5, lambda world: _accuse(world, "health")),
    "corruption": (0.5, _corrupt),
    "not finite": (0.7, _sicken),
    "cannot train": (0.5, _cannot_train),
    "drained": (1, _drain),
    "given back": (1, _give_back),
    "taken away": (1, _take_away),
}


FAULTS_END_S = 60.0
RECOVERED_WITHIN_S = 240.0
"""Longer than every deadline of the core in a row: park, bind, lease, stall twice, growth."""


@dataclass(frozen=True)
class WorldOutcome:
    """Result of a world."""

    seed: int
    faults: dict[str, int]
    recoveries: int
    regroups: int
    epochs: int
    steps: int
    lost_steps: int
    worst_lost_steps: int
    """In one recovery that restored from memory."""
    events: int
    successions: int
    """Number of successions by another node's head."""


def run_seed(seed: int, step: core.CoreStep = core.step) -> WorldOutcome:
    """Run the world of one seed with its faults, until it has recovered.

    Raises BrokenInvariant, with the command that reproduces it. Any other exception becomes one too. ``step`` may be
    a broken core that is to be found out.
    """
    world = HostileWorld(seed, step)
    try:
        return _run(world)
    except Exception as error:
        where = f"at {world.clock.now_s:.3f} s, after {world.heads.events} events"
        raise BrokenInvariant(
            f"{error or type(error).__name__}, {where}. To see it again: phalanx simulate fleet --small --seeds {seed}:{seed + 1}"
        ) from error


def _run(world: HostileWorld) -> WorldOutcome:
    """Start all nodes and the first head, inject faults for ``FAULTS_END_S``, then let the fleet recover.

    Raises BrokenInvariant if it does not.
    """
    for node in world.nodes.values():
        world.clock.after(world.random.uniform(0, 2), node.start)
    world.heads.first("0" if world.conditions.succession_s else "")
    _next_fault(world, world.random.choice((0.5, 2.0, 8.0)))
    world.clock.run_until(FAULTS_END_S)
    _make_peace(world)
    _recover(world)
    state = world.coordinator.state
    return WorldOutcome(
        world.seed,
        dict(world.faults),
        state.recoveries,
        state.regroups,
        state.epoch + 1,
        world.furthest + 1,
        world.lost_steps,
        world.worst_lost_steps,
        world.heads.events,
        world.heads.successions,
    )


def _next_fault(world: HostileWorld, mean_s: float) -> None:
    """Inject a fault now, and again after a random time, until a few seconds before the end of faults.

    Faults come closer together while the fleet recovers.
    """
    if world.clock.now_s >= FAULTS_END_S - 5:
        return
    strike_somewhere(world)
    recovering = world.coordinator.state.phase in (FleetPhase.PARKING, FleetPhase.BINDING)
    # Control planes break during recovery, so faults are most frequent then.
    hurry = 0.05 if recovering and world.random.random() < 0.5 else 1.0
    world.clock.after(world.random.expovariate(1 / (mean_s * hurry)), lambda: _next_fault(world, mean_s))


def _make_peace(world: HostileWorld) -> None:
    """End the faults of network and machines: every machine comes back, and every node is admitted. Requests the full size again.

    Hung workers and corrupt state remain, for the fleet to recover from.
    """
    world.loss = world.repeat = 0.0
    world.delay_s = min(world.delay_s, 0.1)
    world.heads.make_peace()
    for node in world.nodes.values():
        node.cut = node.sick = node.going = False
        node.side = 0
        node.start()
        world.clock.after(1.0, partial(_request, world, m.Admit(node.name)))
        world.clock.after(60.0, partial(_request, world, m.Admit(node.name)))
    settings = world.conditions.settings
    formation = settings.formation
    full_size = m.Enlarge(settings.wanted_nodes, settings.expected_nodes, formation.legal, formation.fewer)
    world.clock.after(2.0, partial(_request, world, full_size))


def _request(world: HostileWorld, request: m.CoreEvent) -> None:
    """Send an operator's request to the head, once there is one."""
    if world.coordinator.up:
        world.coordinator.receive(request)
    else:
        world.clock.after(1.0, partial(_request, world, request))


def _recover(world: HostileWorld) -> None:
    """Run until all wanted nodes train and a new step is done. Raises BrokenInvariant after ``RECOVERED_WITHIN_S``."""
    conditions, state = world.conditions, world.coordinator.state
    settings = conditions.settings
    full = settings.formation.largest(settings.wanted_nodes * conditions.workers)
    while world.clock.now_s < FAULTS_END_S + RECOVERED_WITHIN_S:
        before = world.furthest
        world.clock.run_until(world.clock.now_s + 4 * conditions.step_s + conditions.heartbeat_s)
        state = world.coordinator.state
        if state.phase is FleetPhase.RUNNING and state.ranks == full and world.furthest > before:
            return
    raise BrokenInvariant(
        f"{RECOVERED_WITHIN_S:g} s after the last fault the fleet is {state.phase} with {state.ranks} of {full} "
        f"ranks, at step {world.furthest}; waits for {sorted(state.awaiting)}; {state.reason}"
    )
