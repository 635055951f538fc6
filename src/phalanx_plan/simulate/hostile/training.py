"""Simulated training in a hostile world: its conditions, the process groups of epochs with their steps, and checkpoints on disk.

Fleet size, layout, patience, network and speeds are drawn from the world's seed.

A group makes steps only while a living node in its epoch holds every rank and does not hang. A step ends at
slightly different times on different nodes, so that a fault may occur in between. Snapshots follow the commit rule
(``phalanx.fleet.core.epochs.progress``), on which the workers of a real run agree by flags in the step's all-reduce.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from phalanx.fleet.core.commands import Bind, Fresh
from phalanx.fleet.core.epochs.progress import may_begin
from phalanx.fleet.core.invariants import BrokenInvariant
from phalanx.fleet.core.messages import NO_STEP
from phalanx.fleet.core.settings import CoreSettings, Formation
from phalanx.fleet.core.simulated_clock import SimulatedClock
from phalanx.launch.placing import block_seats

# Conditions.


@dataclass(frozen=True)
class Conditions:
    """Parameters of one world. Durations in seconds, probabilities from 0 to 1."""

    workers: int
    """Workers of each node."""
    settings: CoreSettings
    heartbeat_s: float
    step_s: float
    """Mean time of an optimizer step."""
    copy_s: float
    """Longest time to copy a snapshot to a buddy."""
    restore_s: float
    """Longest time to restore a node's state."""
    warm_up_s: tuple[float, float]
    """Shortest and longest time to start a worker."""
    loss: float
    """Probability that a message is lost."""
    repeat: float
    """Probability that a message arrives twice."""
    delay_s: float
    """Longest delay of a message."""
    save_every: int
    """Steps between two checkpoints on disk."""
    spares: int
    racks: int
    own_nan_steps: frozenset[int]
    """Steps that are not finite on any node: faults of the run itself."""
    succession_s: float
    """Patience of the next in line when there is no head; 0: the head runs on a machine that is never lost."""


def draw_conditions(draw: random.Random, draw_layout: random.Random) -> Conditions:
    """Draw the conditions of one world from its random numbers; ``draw_layout`` draws those of the layout in the network."""
    workers = draw.choice((1, 1, 2))
    settings = _laid(draw_layout, _settings(draw, workers))
    heartbeat_s = draw.choice((0.5, 1.0, 2.0))
    step_s = draw.choice((0.2, 1.0, 4.0))
    return Conditions(
        workers=workers,
        settings=settings,
        heartbeat_s=heartbeat_s,
        step_s=step_s,
        copy_s=draw.choice((0.05, 0.5, 4.0)) * step_s,
        restore_s=draw.choice((0.1, 1.0, 5.0)),
        warm_up_s=(0.5, draw.choice((1.0, 10.0))),
        loss=draw.choice((0.0, 0.02, 0.15)),
        repeat=draw.choice((0.0, 0.05)),
        delay_s=draw.choice((0.005, 0.1, 1.0)),
        save_every=draw.choice((7, 30)),
        spares=draw.randint(0, 3),
        racks=draw.choice((1, 3, 4)),
        own_nan_steps=frozenset(draw.sample(range(3, 60), draw.choice((0, 0, 1, 3)))),
        succession_s=draw.choice((0.0, 3.0, 8.0)),
    )


def _settings(draw: random.Random, workers: int) -> CoreSettings:
    """Draw the core's settings, with legal numbers of ranks and timeouts, for nodes of ``workers`` workers."""
    model_ranks, pipeline = draw.choice((1, 1, 2)), draw.choice((1, 1, 2))
    unit = model_ranks * pipeline
    nodes = draw.randint(max(2, -(-unit // workers)), 8)
    shard = draw.choice((0, 0, 1, 2))
    step = unit * (shard or 1)
    legal = tuple(range(step, nodes * workers + 1, step)) or (nodes * workers,)
    if nodes * workers < step:
        shard, legal = 0, tuple(range(unit, nodes * workers + 1, unit))
    formation = Formation(workers, legal, pipeline, model_ranks, shard)
    alone = range(pipeline * (shard or 1), legal[0], pipeline * (shard or 1))
    if model_ranks == 2 and alone and draw.random() < 0.5:  # a tensor degree that may fall to 1
        formation = replace(formation, legal=(*alone, *legal), fewer=((legal[0], 1),))
    return CoreSettings(
        formation=formation,
        wanted_nodes=nodes,
        min_nodes=draw.randint(1, max(1, nodes - 2)),
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


def _laid(draw: random.Random, settings: CoreSettings) -> CoreSettings:
    """Return the settings with a drawn block, a unit and an order of seats."""
    formation = settings.formation
    stage = formation.largest(settings.wanted_nodes * formation.workers_per_node) // formation.pipeline
    block = block_seats(formation.model_ranks, stage, formation.workers_per_node)
    unit = block * draw.choice((1, 1, 2, formation.pipeline))
    return replace(settings, block=block, unit=unit, order=draw.choice(("data", "pipeline")))


# Training.


KEPT = 8
FOREVER = 2**60


class Disk:
    """Committed checkpoints: step -> whether its content is corrupt. A commit of a fenced epoch is refused."""

    def __init__(self) -> None:
        """Begin without checkpoints (step -> True if corrupt) and without a fence."""
        self.steps: dict[int, bool] = {}
        self.fence = -1

    def commit(self, epoch: int, step: int, tainted: bool) -> bool:
        """Commit a checkpoint; False if its epoch is fenced.

        Raises BrokenInvariant if the step exists already. Only the newest few are kept. ``tainted`` marks corrupt
        state.
        """
        if epoch < self.fence:
            return False
        if step in self.steps:
            raise BrokenInvariant(f"step {step} was committed twice")
        self.steps[step] = tainted
        for old in sorted(self.steps)[:-KEPT]:
            del self.steps[old]
        return True

    def delete(self, steps: list[int]) -> None:
        """Delete checkpoints, as the coordinator's shell does with those that the core has condemned."""
        for step in steps:
            self.steps.pop(step, None)


class GroupMember(Protocol):
    """A node's workers, as the process group of their epoch sees them."""

    name: str
    incarnation: int
    epoch: int
    hung: bool
    sick: bool
    leave_at_boundary: bool

    def computes(self, epoch: int) -> bool:
        """True if its workers take part in the collectives of ``epoch``."""

    def begin(self) -> None:
        """Start training: all members are connected and have restored."""

    def complete(self, group: Group, step: int) -> None:
        """End a step."""

    def leave(self) -> None:
        """Leave the epoch."""

    def break_collective(self) -> None:
        """Report a failed collective."""

    def holds(self, rank: int, epoch: int) -> bool:
        """True if one of its workers is ``rank`` in ``epoch``."""

    def copies_to_keep(self) -> Iterator[tuple[int, bool]]:
        """Yield (rank, True if it is the buddy's copy) of each snapshot that it keeps or sends."""

    def doubt(self, epoch: int, step: int, ranks: tuple[int, ...]) -> None:
        """Report a step that is not finite."""

    def report_durable(self, epoch: int, step: int) -> None:
        """Report a committed checkpoint to the coordinator."""


class TrainingWorld(Protocol):
    """A process group's view of the world, and its reports to it."""

    clock: SimulatedClock
    random: random.Random
    conditions: Conditions

    def epoch_started(self, group: Group) -> None:
        """Record that an epoch starts to train."""

    def stepped(self, group: Group) -> None:
        """Record that all members have completed a step."""

    def broken(self, group: Group) -> None:
        """Fail a collective."""

    def doubted(self, group: Group, step: int) -> None:
        """Report a step that is not finite, and not applied."""


class Group:
    """The process group of one epoch: all its workers."""

    def __init__(self, world: TrainingWorld, bind: Bind) -> None:
        """Begin the process group of ``bind``'s epoch without members, at the step that it resumes from (-1: none)."""
        self.world, self.epoch, self.ranks, self.resume = world, bind.epoch, bind.ranks, bind.resume
        self.seats = world.conditions.settings.formation.seats(bind.ranks)
        self.owners: dict[int, str] = {}
        self.members: list[GroupMember] = []
        self.restored: set[str] = set()
        self.step = -1 if isinstance(bind.resume, Fresh) else bind.resume.step
        self.newest = self.safe = self.step
        self.finished: set[str] = set()
        self.copied: set[tuple[int, bool]] = set()
        self.expected_copies: set[tuple[int, bool]] = set()
        self.right_until = FOREVER
        """Steps after this one are computed wrongly."""
        self.running = False
        self.skips = bind.nonfinite_step
        """The step that is known not to be finite on any node."""

    def tainted(self, step: int) -> bool:
        """True if the state after ``step`` is corrupt."""
        return step > self.right_until

    def inherit(self, tainted: bool) -> None:
        """Adopt restored state, with its corruption if ``tainted``."""
        if tainted:
            self.right_until = NO_STEP - 1

    def enter(self, node: GroupMember, bind: Bind) -> None:
        """Add a node with its ranks. A node that enters twice is listed twice.

        Raises BrokenInvariant if another node, or an earlier incarnation, has one of the ranks. It also does if the
        number of ranks or the kind of ``resume`` in ``bind`` is not the group's. Other fields, such as the step, are
        not compared.
        """
        who = f"{node.name} (incarnation {node.incarnation})"
        for _, rank in bind.places:
            if self.owners.setdefault(rank, who) != who:
                raise BrokenInvariant(
                    f"rank {rank} of epoch {self.epoch} belongs to {self.owners[rank]} and {who}"
                )
        if (bind.ranks, type(bind.resume)) != (self.ranks, type(self.resume)):
            raise BrokenInvariant(f"epoch {self.epoch} was described in two ways")
        self.members.append(node)

    def has_restored(self, node: GroupMember) -> None:
        """Record that a node has restored its state; with the last one, training begins and the first step is planned."""
        self.restored.add(node.name)
        if len(self.restored) == self.seats and self.is_complete():
            self.running = True
            self.world.epoch_started(self)
            for member in self.members:
                member.begin()
            self._next()

    def is_complete(self) -> bool:
        """True if a node that can compute holds every rank."""
        return len(self.members) == self.seats and all(node.computes(self.epoch) for node in self.members)

    def _next(self) -> None:
        """Plan the end of the next step, after 0.5 to 1.5 times its usual time."""
        self.world.clock.after(self.world.random.uniform(0.5, 1.5) * self.world.conditions.step_s, self._ends)

    def _ends(self) -> None:
        """End a step: count it, begin a snapshot if the last is safe, and let each member complete it within 0.02 s.

        A group with a missing member breaks. A step that is not finite is reported instead, unless the epoch skips
        it.
        """
        if not self.is_complete():
            return self.world.broken(self)
        if self.not_finite(self.step + 1) and self.skips != self.step + 1:
            return self.world.doubted(self, self.step + 1)
        self.step += 1
        self.finished = set()
        if may_begin(self.newest, self.safe):
            self.newest, self.copied = self.step, set()
            self.expected_copies = {
                (rank, kind) for node in self.members for rank, kind in node.copies_to_keep()
            }
        for node in self.members:
            self.world.clock.after(
                self.world.random.uniform(0, 0.02), partial(self._completes, node, self.step)
            )
        return None

    def not_finite(self, step: int) -> bool:
        """True if a loss or gradient of ``step`` is not finite in this group."""
        return step in self.world.conditions.own_nan_steps or any(node.sick for node in self.members)

    def _completes(self, node: GroupMember, step: int) -> None:
        """Let a member complete a step; at the last one either all members leave, if all are to, or the next step
        begins.

        Ignored if the step is over, or the node no longer computes.
        """
        if step != self.step or not node.computes(self.epoch):
            return
        node.complete(self, step)
        self.finished.add(node.name)
        if len(self.finished) == self.seats:
            self.world.stepped(self)
            # Members that are to leave leave here, all at once; else the next step begins.
            if all(node.leave_at_boundary for node in self.members):
                for node in self.members:
                    node.leave()
            else:
                self._next()

    def copy_arrived(self, rank: int, step: int, second: bool) -> None:
        """Record that a copy of the newest snapshot is complete; with the last one the snapshot is safe."""
        if step == self.newest:
            self.copied.add((rank, second))
            if self.copied >= self.expected_copies:
                self.safe = step
