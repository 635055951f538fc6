"""Small hostile worlds: everything that can fail does, at any moment, recovery included; the core must hold.

A world is a function of its seed: fleet, layout, network and faults are drawn from it. The network loses, repeats,
delays and reorders messages; workers die and hang, machines die alone and by racks and come back, links break, the
coordinator is cut off or crashes and replays its journal, nodes turn out slow, unsound or wrong. After every event the
invariants of the core and of the world are checked; when the faults have ended, training must go on within a bound.
The method is that of FoundationDB (SIGMOD 2021, section 4) and TigerBeetle: one thread, one seed, one truth.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from phalanx.fleet.core import decide as real_core
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.invariants import BrokenInvariant
from phalanx.fleet.core.orders import Order
from phalanx.fleet.core.state import CoreSettings, FleetPhase, FleetState, Formation, trusted
from phalanx.simulate.clock import SimulatedClock
from phalanx.simulate.hostile.coordinator import SimulatedCoordinator
from phalanx.simulate.hostile.faults import strike_somewhere
from phalanx.simulate.hostile.node import SimulatedNode
from phalanx.simulate.hostile.training import Disk, Group

CoreStep = Callable[[FleetState, m.CoreEvent, float], tuple[FleetState, list[Order]]]
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


class World:
    """A small fleet and everything around it."""

    def __init__(self, seed: int, step: CoreStep = real_core.step) -> None:
        self.seed, self.random, self.clock = seed, random.Random(seed), SimulatedClock()
        draw = self.random
        self.workers = draw.choice((1, 1, 2))
        self.settings = _settings(draw, self.workers)
        self.heartbeat_s = draw.choice((0.5, 1.0, 2.0))
        self.step_s = draw.choice((0.2, 1.0, 4.0))
        self.copy_s = draw.choice((0.05, 0.5, 4.0)) * self.step_s
        self.restore_s = draw.choice((0.1, 1.0, 5.0))
        self.warm_up_s = (0.5, draw.choice((1.0, 10.0)))
        self.loss, self.repeat = draw.choice((0.0, 0.02, 0.15)), draw.choice((0.0, 0.05))
        self.delay_s = draw.choice((0.005, 0.1, 1.0))
        self.save_every = draw.choice((7, 30))
        self.disk = Disk()
        self.groups: dict[int, Group] = {}
        self.faults: Counter[str] = Counter()
        self.unheard = 0
        """Corruptions that the coordinator cannot know of yet."""
        self.furthest = m.NO_STEP
        self.lost_steps = self.worst_lost_steps = 0
        self.coordinator = SimulatedCoordinator(self, step)
        spares, racks = draw.randint(0, 3), draw.choice((1, 3, 4))
        count = self.settings.wanted_nodes + spares
        self.nodes = {
            str(index): SimulatedNode(self, str(index), ("hall", f"rack{index % racks}") if racks > 1 else ())
            for index in range(count)
        }

    # --- the network

    def to_coordinator(self, node: SimulatedNode, message: m.AgentReport) -> None:
        """Sends a report, perhaps never, perhaps twice."""
        for delay_s in self._delays(node):
            self.clock.after(delay_s, lambda: self.coordinator.hear(message))

    def to_node(self, name: str, command: m.Command) -> None:
        """Sends a command, perhaps never, perhaps twice."""
        node = self.nodes[name]
        for delay_s in self._delays(node):
            self.clock.after(delay_s, lambda: node.on_command(command) if node.up and not node.cut else None)

    def _delays(self, node: SimulatedNode) -> list[float]:
        if node.cut or self.random.random() < self.loss:
            return []
        times = 2 if self.random.random() < self.repeat else 1
        return [0.001 + self.random.random() ** 4 * self.delay_s for _ in range(times)]

    # --- training

    def group(self, bind: m.Bind) -> Group:
        """The group of an epoch."""
        if bind.epoch not in self.groups:
            self.groups[bind.epoch] = Group(self, bind)
        return self.groups[bind.epoch]

    def fetch(self, node: SimulatedNode, group: Group, bind: m.Bind) -> bool:
        """Whether a node finds the state that it needs where it was told to look."""
        resume = bind.resume
        if isinstance(resume, m.FromDisk):
            if resume.step not in self.disk.steps:
                return False
            group.inherit(self.disk.steps[resume.step])
        elif isinstance(resume, m.FromMemory):
            formation = self.settings.formation
            named = {formation.key(resume.ranks, holder.rank) for holder in resume.holders}
            same = resume.ranks == bind.ranks
            mine = {rank: formation.key(bind.ranks, rank) for _, rank in bind.places} if same else {}
            if not named >= set(mine.values()):
                raise BrokenInvariant(f"node {node.name} was not told who holds the state of its ranks")
            found: dict[int, bool] = {}
            for key in sorted(named):
                tainted = self._copy(resume, key)
                if tainted is None:
                    return False
                group.inherit(tainted)
                found[key] = tainted
            for rank, key in mine.items():
                node.held[m.HeldSnapshot(bind.ranks, rank, resume.step, "own", 1, bind.epoch)] = found[key]
        return True

    def _copy(self, resume: m.FromMemory, key: int) -> bool | None:
        """Whether the copy of a state that a node finds is tainted; ``None`` if nobody of those named has what is named."""
        formation = self.settings.formation
        for holder in resume.holders:
            node = self.nodes[holder.node]
            if formation.key(resume.ranks, holder.rank) != key or not node.up:
                continue
            for held, tainted in node.held.items():
                if (held.ranks, held.rank, held.step) == (resume.ranks, holder.rank, resume.step):
                    return tainted
        return None

    def begun(self, group: Group) -> None:
        """An epoch trains: what it restored is what counts."""
        limits = self.coordinator.state.distrust
        known = limits and group.epoch > limits[-1].epoch and not self.unheard
        if known and group.tainted(group.step):
            raise BrokenInvariant(f"epoch {group.epoch} was restored from state known to be corrupt")
        lost = max(0, self.furthest - group.step)
        self.lost_steps += lost
        if isinstance(group.resume, m.FromMemory) and self.copy_s < 0.1 * self.step_s and not limits:
            self.worst_lost_steps = max(self.worst_lost_steps, lost)
        self.furthest = group.step

    def stepped(self, group: Group) -> None:
        """All members have completed a step."""
        self.furthest = max(self.furthest, group.step)
        first = next((node for node in group.members if node.holds(0, group.epoch)), None)
        if first is None or group.step % self.save_every:
            return
        if self.disk.commit(group.epoch, group.step, group.tainted(group.step)):
            first.say(m.Durable(first.name, first.incarnation, group.epoch, group.step))

    def broken(self, group: Group) -> None:
        """A collective fails: who is left in it notices, unless his peer merely hangs."""
        if any(node.hung for node in group.members if node.epoch == group.epoch):
            return
        for node in group.members:
            if self.random.random() < 0.8:
                self.clock.after(
                    self.random.uniform(0, 0.3),
                    partial(self._break, node, group.epoch),
                )

    def _break(self, node: SimulatedNode, epoch: int) -> None:
        if node.computes(epoch):
            node.break_collective()

    # --- what must hold

    def check_source(self, state: FleetState) -> None:
        """No state is lost while a copy lives: nothing newer can be put together from what living nodes hold."""
        keys: dict[tuple[int, int], set[int]] = {}
        formation = state.settings.formation
        for name, known in state.nodes.items():
            node = self.nodes[name]
            if node.up and known.alive and known.incarnation == node.incarnation:
                for held in node.held:
                    if trusted(state, held):
                        key = formation.key(held.ranks, held.rank)
                        keys.setdefault((held.ranks, held.step), set()).add(key)
        best = max(
            (step for (ranks, step), found in keys.items() if len(found) == formation.keys(ranks)), default=-1
        )
        chosen = -1 if isinstance(state.source, m.Fresh) else state.source.step
        if chosen < best:
            raise BrokenInvariant(f"step {best} is held completely, and {state.source} was chosen")
        if not state.distrust and chosen < max(self.disk.steps, default=-1):
            raise BrokenInvariant(f"step {max(self.disk.steps)} was committed, and {state.source} was chosen")

    # --- the run of things

    def run(self) -> WorldOutcome:
        """Lives through the faults, then lets the fleet recover. Raises BrokenInvariant."""
        for node in self.nodes.values():
            self.clock.after(self.random.uniform(0, 2), node.start)
        self.coordinator.start()
        self._next_fault(self.random.choice((0.5, 2.0, 8.0)))
        self.clock.run_until(FAULTS_END_S)
        self._make_peace()
        self._recover()
        state = self.coordinator.state
        return WorldOutcome(
            self.seed,
            dict(self.faults),
            state.recoveries,
            state.regroups,
            state.epoch + 1,
            self.furthest,
            self.lost_steps,
            self.worst_lost_steps,
            len(self.coordinator.journal),
        )

    def _recover(self) -> None:
        state, full = (
            self.coordinator.state,
            self.settings.formation.largest(self.settings.wanted_nodes * self.workers),
        )
        while self.clock.now_s < FAULTS_END_S + RECOVERED_WITHIN_S:
            before = self.furthest
            self.clock.run_until(self.clock.now_s + 4 * self.step_s + self.heartbeat_s)
            state = self.coordinator.state
            if state.phase is FleetPhase.RUNNING and state.ranks == full and self.furthest > before:
                return
        raise BrokenInvariant(
            f"{RECOVERED_WITHIN_S:g} s after the last fault the fleet is {state.phase} with {state.ranks} of {full} "
            f"ranks, at step {self.furthest}; waits for {sorted(state.awaiting)}; {state.reason}"
        )

    def _next_fault(self, mean_s: float) -> None:
        if self.clock.now_s < FAULTS_END_S - 5:
            strike_somewhere(self)
            phase = self.coordinator.state.phase
            # Recovery is where control planes break, so that is where faults fall most.
            hurry = (
                0.05
                if phase in (FleetPhase.PARKING, FleetPhase.BINDING) and self.random.random() < 0.5
                else 1.0
            )
            self.clock.after(self.random.expovariate(1 / (mean_s * hurry)), lambda: self._next_fault(mean_s))

    def _make_peace(self) -> None:
        self.loss = self.repeat = 0.0
        self.delay_s = min(self.delay_s, 0.1)
        self.coordinator.start()
        for node in self.nodes.values():
            node.cut = False
            node.start()
            self.clock.after(1.0, partial(self.coordinator.hear, m.Admit(node.name)))
            self.clock.after(60.0, partial(self.coordinator.hear, m.Admit(node.name)))


def _settings(draw: random.Random, workers: int) -> CoreSettings:
    model_ranks, pipeline = draw.choice((1, 1, 2)), draw.choice((1, 1, 2))
    unit = model_ranks * pipeline
    wanted = draw.randint(max(2, -(-unit // workers)), 8)
    shard = draw.choice((0, 0, 1, 2))
    step = unit * (shard or 1)
    legal = tuple(range(step, wanted * workers + 1, step)) or (wanted * workers,)
    if wanted * workers < step:
        shard, legal = 0, tuple(range(unit, wanted * workers + 1, unit))
    formation = Formation(workers, legal, pipeline, model_ranks, shard)
    return CoreSettings(
        formation=formation,
        wanted_nodes=wanted,
        min_nodes=draw.randint(1, max(1, wanted - 2)),
        lease_s=draw.choice((5.0, 10.0)),
        confirm_s=draw.choice((0.5, 2.0)),
        park_s=draw.choice((4.0, 8.0)),
        bind_s=20.0,
        stall_s=20.0,
        form_s=10.0,
        grow_s=draw.choice((2.0, 10.0)),
        strikes=draw.choice((4, 1000)),
        max_tries=10**6,
    )


def run_seed(seed: int, step: CoreStep = real_core.step) -> WorldOutcome:
    """The world of one seed. Raises BrokenInvariant, with the command that shows it again."""
    world = World(seed, step)
    try:
        return world.run()
    except Exception as error:
        where = f"at {world.clock.now_s:.3f} s, after {len(world.coordinator.journal)} events"
        raise BrokenInvariant(
            f"{error or type(error).__name__}, {where}. To see it again: phalanx simulate fleet --small --seeds {seed}:{seed + 1}"
        ) from error
