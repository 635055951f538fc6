"""Simulated training: the process groups of epochs, the steps they take together, and checkpoints on disk.

A group makes steps only while every rank is held by a living node that is in its epoch and does not hang; a step ends at
slightly different times on different nodes, so that a fault may fall between. Snapshots follow the commit rule
(``phalanx.fleet.core.epochs.retention``), on which the workers of a real run agree by flags in the step's all-reduce.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Protocol

from phalanx.fleet.core.commands import (
    Bind,
    Fresh,
)
from phalanx.fleet.core.epochs.retention import may_begin
from phalanx.fleet.core.invariants import BrokenInvariant
from phalanx.fleet.core.messages import NO_STEP
from phalanx.simulate.clock import SimulatedClock
from phalanx.simulate.hostile.conditions import Conditions

KEPT = 8
FOREVER = 2**60


class Disk:
    """Committed checkpoints: step -> whether its content is corrupt. A commit of a fenced epoch is refused."""

    def __init__(self) -> None:
        self.steps: dict[int, bool] = {}
        self.fence = -1

    def commit(self, epoch: int, step: int, tainted: bool) -> bool:
        """Commits a checkpoint; False if its epoch is fenced. Raises BrokenInvariant if the step is there already."""
        if epoch < self.fence:
            return False
        if step in self.steps:
            raise BrokenInvariant(f"step {step} was committed twice")
        self.steps[step] = tainted
        for old in sorted(self.steps)[:-KEPT]:
            del self.steps[old]
        return True

    def delete(self, steps: list[int]) -> None:
        """Deletes checkpoints, as the coordinator's shell does with those that the core has condemned."""
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
        """Starts training: all members have met and restored."""

    def complete(self, group: Group, step: int) -> None:
        """Ends a step."""

    def leave(self) -> None:
        """Leaves the epoch."""

    def break_collective(self) -> None:
        """Reports a failed collective."""

    def holds(self, rank: int, epoch: int) -> bool:
        """True if one of its workers is ``rank`` in ``epoch``."""

    def copies_wanted(self) -> Iterator[tuple[int, bool]]:
        """(rank, True if it is the buddy's copy) of each snapshot that it keeps or sends."""

    def doubt(self, epoch: int, step: int, ranks: tuple[int, ...]) -> None:
        """Reports a step that is not finite."""

    def report_durable(self, epoch: int, step: int) -> None:
        """Reports a committed checkpoint to the coordinator."""


class TrainingWorld(Protocol):
    """A process group's view of the world, and its reports to it."""

    clock: SimulatedClock
    random: random.Random
    conditions: Conditions

    def begun(self, group: Group) -> None:
        """An epoch starts to train."""

    def stepped(self, group: Group) -> None:
        """All members have completed a step."""

    def broken(self, group: Group) -> None:
        """A collective fails."""

    def doubted(self, group: Group, step: int) -> None:
        """A step is not finite, and not applied."""


class Group:
    """The process group of one epoch: all its workers."""

    def __init__(self, world: TrainingWorld, bind: Bind) -> None:
        self.world, self.epoch, self.ranks, self.resume = world, bind.epoch, bind.ranks, bind.resume
        self.seats = world.conditions.settings.formation.seats(bind.ranks)
        self.owners: dict[int, str] = {}
        self.members: list[GroupMember] = []
        self.restored: set[str] = set()
        self.step = -1 if isinstance(bind.resume, Fresh) else bind.resume.step
        self.newest = self.safe = self.step
        self.done: set[str] = set()
        self.copied: set[tuple[int, bool]] = set()
        self.wanted: set[tuple[int, bool]] = set()
        self.right_until = FOREVER
        """Steps after this one are computed wrongly."""
        self.running = False
        self.skips = bind.nonfinite_step
        """The step that is known not to be finite, whoever computes it."""

    def tainted(self, step: int) -> bool:
        """True if the state after ``step`` is corrupt."""
        return step > self.right_until

    def inherit(self, tainted: bool) -> None:
        """Takes over restored state, with its corruption if ``tainted``."""
        if tainted:
            self.right_until = NO_STEP - 1

    def enter(self, node: GroupMember, bind: Bind) -> None:
        """A node takes its ranks. Raises BrokenInvariant if another node has them."""
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
        """A node has restored its state; with the last one, training begins."""
        self.restored.add(node.name)
        if len(self.restored) == self.seats and self.whole():
            self.running = True
            self.world.begun(self)
            for member in self.members:
                member.begin()
            self._next()

    def whole(self) -> bool:
        """True if every rank is held by a node that can compute."""
        return len(self.members) == self.seats and all(node.computes(self.epoch) for node in self.members)

    def _next(self) -> None:
        self.world.clock.after(self.world.random.uniform(0.5, 1.5) * self.world.conditions.step_s, self._ends)

    def _ends(self) -> None:
        if not self.whole():
            return self.world.broken(self)
        if self.not_finite(self.step + 1) and self.skips != self.step + 1:
            return self.world.doubted(self, self.step + 1)
        self.step += 1
        self.done = set()
        if may_begin(self.newest, self.safe):
            self.newest, self.copied = self.step, set()
            self.wanted = {(rank, kind) for node in self.members for rank, kind in node.copies_wanted()}
        for node in self.members:
            self.world.clock.after(
                self.world.random.uniform(0, 0.02), partial(self._completes, node, self.step)
            )
        return None

    def not_finite(self, step: int) -> bool:
        """True if a loss or gradient of ``step`` is not finite in this group."""
        return step in self.world.conditions.own_nan_steps or any(node.sick for node in self.members)

    def _completes(self, node: GroupMember, step: int) -> None:
        if step != self.step or not node.computes(self.epoch):
            return
        node.complete(self, step)
        self.done.add(node.name)
        if len(self.done) == self.seats:
            self._boundary()

    def _boundary(self) -> None:
        self.world.stepped(self)
        if all(node.leave_at_boundary for node in self.members):
            for node in self.members:
                node.leave()
        else:
            self._next()

    def copy_arrived(self, rank: int, step: int, second: bool) -> None:
        """A copy of the newest snapshot is complete; with the last one it is safe."""
        if step == self.newest:
            self.copied.add((rank, second))
            if self.copied >= self.wanted:
                self.safe = step
