"""A small hostile world: a fleet, its network, its disk, and invariants beyond the core's own.

The network loses, repeats, delays and reorders messages, and may be partitioned. Five oracles check the core from outside. An epoch
restores the newest state of living nodes, and never state that is known to be corrupt. A node is found at fault only if it
computed values that are not finite. A step is attributed to the run only if two epochs found it not finite. A fleet of another size is
placed along its network, with as many units intact as its nodes allow.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.decide import CoreStep
from phalanx.fleet.core.epochs.seating import shape_of
from phalanx.fleet.core.invariants import BrokenInvariant
from phalanx.fleet.core.simulated_clock import SimulatedClock
from phalanx.fleet.core.state import FleetState, NonFiniteDoubt, may_be_restored
from phalanx_plan.simulate.hostile.coordinator import Heads, SimulatedCoordinator
from phalanx_plan.simulate.hostile.node import SimulatedNode
from phalanx_plan.simulate.hostile.training import Disk, Group, GroupMember, draw_conditions


class HostileWorld:
    """A small fleet and everything around it."""

    def __init__(self, seed: int, step: CoreStep) -> None:
        """Draw the conditions of the world of ``seed``, and create its nodes, which are down, and its heads, none of which leads."""
        self.seed, self.random, self.clock = seed, random.Random(seed), SimulatedClock()
        self.conditions = draw_conditions(self.random, random.Random(f"{seed} layout"))
        self.loss, self.repeat = self.conditions.loss, self.conditions.repeat
        self.delay_s = self.conditions.delay_s
        self.disk = Disk()
        self.groups: dict[int, Group] = {}
        self.faults: Counter[str] = Counter()
        """Number of faults by kind."""
        self.unreported = 0
        """Number of corruptions that have happened and are not yet reported to the coordinator."""
        self.found_in: dict[int, set[int]] = {}
        """Step that was not finite -> the epochs in which it was found so."""
        self.ever_sick: set[str] = set()
        self.furthest = m.NO_STEP
        self.lost_steps = self.worst_lost_steps = 0
        settings, racks = self.conditions.settings, self.conditions.racks
        self.sent = 0
        """Number of reports that nodes have sent."""
        self.newest_description: dict[tuple[int, str], int] = {}
        """(reign, node) -> the number of the last description that the head of that reign has received."""
        self.heads = Heads(self, step, self.random)
        self.nodes = {
            str(index): SimulatedNode(self, str(index), ("hall", f"rack{index % racks}") if racks > 1 else ())
            for index in range(settings.wanted_nodes + self.conditions.spares)
        }

    @property
    def coordinator(self) -> SimulatedCoordinator:
        """The current or the last leading head."""
        return self.heads.newest

    # --- the network

    def reaches(self, node: SimulatedNode, other: str) -> bool:
        """Return True if messages pass between a node and the machine of another; the empty name is a machine outside the fleet."""
        if node.name == other:
            return True
        far = self.nodes.get(other)
        return not node.cut and node.side == (far.side if far else 0) and not (far and far.cut)

    def to_coordinator(self, node: SimulatedNode, message: m.AgentReport) -> None:
        """Send a report to a node's head; it may be lost, arrive twice, or be overtaken by another.

        Only descriptions of a node's memory keep their order, as messages of one connection do: an older description is
        dropped. Does nothing for a node without a head.
        """
        head = node.head
        if head is None:
            return
        self.sent += 1
        for delay_s in self._delays(node, head):
            self.clock.after(delay_s, partial(self._hear, head, message, self.sent))

    def _hear(self, head: SimulatedCoordinator, message: m.AgentReport, number: int) -> None:
        """Pass a report to a head, unless it is an outdated description of a node."""
        if isinstance(message, m.Joined | m.Parked):
            key = (head.claim.reign, message.node)
            if number < self.newest_description.get(key, 0):
                return
            self.newest_description[key] = number
        head.receive(message)

    def to_node(self, head: SimulatedCoordinator, name: str, command: c.Command) -> None:
        """Send a command, which may be lost or arrive twice. It is lost with the connection if the node attaches to another head."""
        node = self.nodes[name]
        for delay_s in self._delays(node, head):
            self.clock.after(delay_s, partial(self._arrive, head, node, command))

    def _arrive(self, head: SimulatedCoordinator, node: SimulatedNode, command: c.Command) -> None:
        """Pass a command to a node if it is still attached to this head."""
        if node.up and node.head is head and self.reaches(node, head.node):
            node.on_command(command)

    def _delays(self, node: SimulatedNode, head: SimulatedCoordinator) -> list[float]:
        """Draw the seconds after which a message arrives: none if it is lost or cannot reach the head, two if it is repeated."""
        if not self.reaches(node, head.node) or self.random.random() < self.loss:
            return []
        times = 2 if self.random.random() < self.repeat else 1
        return [0.001 + self.random.random() ** 4 * self.delay_s for _ in range(times)]

    # --- training

    def group(self, bind: c.Bind) -> Group:
        """Return the process group of an epoch.

        Creates it for the first member. Raises BrokenInvariant if ``bind`` skips a step that fewer than two epochs
        found not finite.
        """
        if bind.nonfinite_step is not None and len(self.found_in.get(bind.nonfinite_step, ())) < 2:
            raise BrokenInvariant(
                f"step {bind.nonfinite_step} is called the run's own, and no two epochs found that"
            )
        if bind.epoch not in self.groups:
            self.groups[bind.epoch] = Group(self, bind)
        return self.groups[bind.epoch]

    def fetch(self, node: SimulatedNode, group: Group, bind: c.Bind) -> bool:
        """Restore a node's state from the source in ``bind``; return False if the source lacks it.

        Corrupt sources taint the group. With unchanged ranks, the node gets snapshots of them too. Raises
        BrokenInvariant if a rank has no holder.
        """
        resume = bind.resume
        if isinstance(resume, c.FromDisk):
            if resume.step not in self.disk.steps:
                return False
            group.inherit(self.disk.steps[resume.step])
        elif isinstance(resume, c.FromMemory):
            formation = self.conditions.settings.formation
            named = {formation.key(resume.ranks, rank) for holder in resume.holders for rank in holder.ranks}
            same = resume.ranks == bind.ranks
            mine = {rank: formation.key(bind.ranks, rank) for _, rank in bind.places} if same else {}
            if not named >= set(mine.values()):
                raise BrokenInvariant(f"node {node.name} got no holders for the state of its ranks")
            tainted_by_key: dict[int, bool] = {}
            for key in sorted(named):
                tainted = self._copy(resume, key)
                if tainted is None:
                    return False
                group.inherit(tainted)
                tainted_by_key[key] = tainted
            for rank, key in mine.items():
                node.snapshots[m.RankSnapshot(bind.ranks, rank, resume.step, "own", 1, bind.epoch)] = (
                    tainted_by_key[key]
                )
        return True

    def _copy(self, resume: c.FromMemory, key: int) -> bool | None:
        """Return whether the first holder's copy of state ``key`` is corrupt; None if no living holder in ``resume`` has it."""
        formation = self.conditions.settings.formation
        for holder in resume.holders:
            node = self.nodes[holder.node]
            ranks = [rank for rank in holder.ranks if formation.key(resume.ranks, rank) == key]
            if not ranks or not node.up:
                continue
            for snapshot, tainted in node.snapshots.items():
                if (snapshot.ranks, snapshot.rank, snapshot.step) == (resume.ranks, ranks[0], resume.step):
                    return tainted
        return None

    def epoch_started(self, group: Group) -> None:
        """Count the steps after the restored one as lost, and continue from it.

        The most steps that one restore loses are recorded only from memory, with fast copies and no distrust. Raises
        BrokenInvariant if the restored state was already reported as corrupt.
        """
        limits = self.coordinator.state.distrust
        is_known = limits and group.epoch > limits[-1].epoch and not self.unreported
        if is_known and group.tainted(group.step):
            raise BrokenInvariant(f"epoch {group.epoch} was restored from state known to be corrupt")
        lost = max(0, self.furthest - group.step)
        self.lost_steps += lost
        if (
            isinstance(group.resume, c.FromMemory)
            and self.conditions.copy_s < 0.1 * self.conditions.step_s
            and not limits
        ):
            self.worst_lost_steps = max(self.worst_lost_steps, lost)
        self.furthest = group.step

    def stepped(self, group: Group) -> None:
        """Record that all members have completed a step.

        Every ``save_every`` steps, commits a checkpoint, which the node of rank 0 reports.
        """
        self.furthest = max(self.furthest, group.step)
        first = next((node for node in group.members if node.holds(0, group.epoch)), None)
        if first is None or group.step % self.conditions.save_every:
            return
        if self.disk.commit(group.epoch, group.step, group.tainted(group.step)):
            first.report_durable(group.epoch, group.step)

    def doubted(self, group: Group, step: int) -> None:
        """Record a step that is not finite, and let every member report it, with the ranks whose own losses were not finite."""
        self.found_in.setdefault(step, set()).add(group.epoch)
        chance = random.Random(f"{self.seed} {step}")
        own = step in self.conditions.own_nan_steps
        sick = {node.name for node in group.members if node.sick}
        ranks = tuple(
            rank
            for rank in range(group.ranks)
            if any(node.name in sick and node.holds(rank, group.epoch) for node in group.members)
            or (own and chance.random() < 0.3)
        )
        for node in group.members:
            self.clock.after(self.random.uniform(0, 0.3), partial(node.doubt, group.epoch, step, ranks))

    def broken(self, group: Group) -> None:
        """Fail a collective: each remaining member notices within 0.3 s with a chance of 0.8; none does if a member hangs."""
        if any(node.hung for node in group.members if node.epoch == group.epoch):
            return
        for node in group.members:
            if self.random.random() < 0.8:
                self.clock.after(
                    self.random.uniform(0, 0.3),
                    partial(self._break, node, group.epoch),
                )

    def _break(self, node: GroupMember, epoch: int) -> None:
        """Break the collective of a node that is still in the epoch."""
        if node.computes(epoch):
            node.break_collective()

    # --- oracles

    def check_verdict(self, doubt: NonFiniteDoubt | None, state: FleetState) -> None:
        """Raise BrokenInvariant if a node that never computed wrongly is found at fault; ``doubt`` was open before this
        event. Does nothing while a doubt remains open.
        """
        if doubt is None or state.doubt is not None:
            return
        innocent = sorted(set(doubt.nodes) - self.ever_sick)
        if innocent:
            raise BrokenInvariant(
                f"{innocent} were found at fault for step {doubt.step}, and never computed wrongly"
            )

    def check_laid(self, seats: int, state: FleetState) -> None:
        """Raise BrokenInvariant if a fleet whose number of seats changed from ``seats`` is not placed along its
        network.

        As many units as possible must be in one domain at each level, and units must follow the tree. Skipped without
        domains, or if a doubt moved all nodes.
        """
        count, doubt, settings = len(state.seats), state.doubt, state.settings
        domains = [state.nodes[name].domain for name in state.seats]
        moved_all = doubt is not None and not doubt.nodes and not doubt.confirmed
        if count == seats or moved_all or not all(domains):
            return
        unit, block = shape_of(settings, count)
        stage = count // settings.formation.pipeline
        if settings.order == "pipeline" and count % (settings.formation.pipeline * block) == 0:
            in_order = sorted(
                range(count), key=lambda seat: (seat % stage // block, seat // stage, seat % block)
            )
            domains = [domains[seat] for seat in in_order]
        units = [domains[first : first + unit] for first in range(0, count, unit)]
        for depth in range(1, len(domains[0]) + 1):
            intact = sum(len({domain[:depth] for domain in unit_domains}) == 1 for unit_domains in units)
            most = sum(nodes // unit for nodes in Counter(domain[:depth] for domain in domains).values())
            if intact < most:
                raise BrokenInvariant(
                    f"{most} units of {unit} nodes could be whole, and {intact} are: {domains}"
                )
        first = [unit_domains[0] for unit_domains in units]
        if first != sorted(first):
            raise BrokenInvariant(f"units of {unit} nodes do not follow each other along the tree: {domains}")

    def check_source(self, state: FleetState) -> None:
        """Raise BrokenInvariant if the chosen state is older than a complete one of living nodes, or than the disk's.

        A disk that the fleet distrusts may be newer. A state from scratch is older than all.
        """
        keys: dict[tuple[int, int], set[int]] = {}
        formation = state.settings.formation
        for name, record in state.nodes.items():
            node = self.nodes[name]
            if node.up and record.alive and record.incarnation == node.incarnation:
                for snapshot in node.snapshots:
                    if may_be_restored(state, snapshot):
                        key = formation.key(snapshot.ranks, snapshot.rank)
                        keys.setdefault((snapshot.ranks, snapshot.step), set()).add(key)
        best = max(
            (
                step
                for (ranks, step), complete_keys in keys.items()
                if len(complete_keys) == formation.keys(ranks)
            ),
            default=-1,
        )
        chosen = -1 if isinstance(state.source, c.Fresh) else state.source.step
        if chosen < best:
            raise BrokenInvariant(f"step {best} is complete in memory, and {state.source} was chosen")
        if not state.distrust and chosen < max(self.disk.steps, default=-1):
            raise BrokenInvariant(f"step {max(self.disk.steps)} was committed, and {state.source} was chosen")
