"""Runs small hostile worlds: everything that can fail does, at any moment, recovery included; the core must hold.

A world is a function of its seed: fleet, layout, network and faults are drawn from it. The network loses, repeats,
delays and reorders messages; workers die and hang, machines die alone and by racks and come back, links break, the
coordinator is cut off, stands still, crashes and replays its journal, or is lost with its machine and succeeded, nodes turn out slow, unsound or wrong, or alone with an error, and steps are not finite. After every event the
invariants of the core and of the world are checked; when the faults have ended, training must go on within a bound.
The method is that of FoundationDB (SIGMOD 2021, section 4) and TigerBeetle: one thread, one seed, one truth.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from phalanx.fleet.core import decide as core
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.invariants import BrokenInvariant
from phalanx.fleet.core.state import FleetPhase
from phalanx.simulate.hostile.faults import strike_somewhere
from phalanx.simulate.hostile.world import World

FAULTS_END_S = 60.0
RECOVERED_WITHIN_S = 240.0
"""Longer than every deadline of the core in a row: park, bind, lease, stall twice, growth."""


@dataclass(frozen=True)
class WorldOutcome:
    """How a world went."""

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
    """How often another node's head took over."""


def run_seed(seed: int, step: core.CoreStep = core.step) -> WorldOutcome:
    """Runs the world of one seed. Raises BrokenInvariant, with the command that reproduces it."""
    world = World(seed, step)
    try:
        return _run(world)
    except Exception as error:
        where = f"at {world.clock.now_s:.3f} s, after {world.heads.events} events"
        raise BrokenInvariant(
            f"{error or type(error).__name__}, {where}. To see it again: phalanx simulate fleet --small --seeds {seed}:{seed + 1}"
        ) from error


def _run(world: World) -> WorldOutcome:
    """Lets faults strike for a minute, then lets the fleet recover."""
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


def _next_fault(world: World, mean_s: float) -> None:
    """Strikes now, and again after a random time."""
    if world.clock.now_s >= FAULTS_END_S - 5:
        return
    strike_somewhere(world)
    recovering = world.coordinator.state.phase in (FleetPhase.PARKING, FleetPhase.BINDING)
    # Recovery is where control planes break, so that is where faults fall most.
    hurry = 0.05 if recovering and world.random.random() < 0.5 else 1.0
    world.clock.after(world.random.expovariate(1 / (mean_s * hurry)), lambda: _next_fault(world, mean_s))


def _make_peace(world: World) -> None:
    """Ends all faults: the network is reliable, every machine comes back, every node is admitted."""
    world.loss = world.repeat = 0.0
    world.delay_s = min(world.delay_s, 0.1)
    world.heads.make_peace()
    for node in world.nodes.values():
        node.cut = node.sick = node.going = False
        node.side = 0
        node.start()
        world.clock.after(1.0, partial(_tell, world, m.Admit(node.name)))
        world.clock.after(60.0, partial(_tell, world, m.Admit(node.name)))
    settings = world.conditions.settings
    formation = settings.formation
    whole = m.Enlarge(settings.wanted_nodes, settings.expected_nodes, formation.legal, formation.fewer)
    world.clock.after(2.0, partial(_tell, world, whole))


def _tell(world: World, request: m.CoreEvent) -> None:
    """Tells the head what an operator wants, once there is one."""
    if world.coordinator.up:
        world.coordinator.hear(request)
    else:
        world.clock.after(1.0, partial(_tell, world, request))


def _recover(world: World) -> None:
    """Waits until all wanted nodes train. Raises BrokenInvariant if they do not within the bound."""
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
