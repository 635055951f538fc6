"""A simulated node: its agent, its workers and its snapshot memory, as the core sees them through messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core import succession
from phalanx.fleet.core.epochs.progress import droppable
from phalanx.fleet.core.succession import NOT_LED
from phalanx_plan.simulate.hostile.coordinator import Heads, SimulatedCoordinator
from phalanx_plan.simulate.hostile.training import Group, TrainingWorld


class WorldView(TrainingWorld, Protocol):
    """A node's view of the world: clock, random numbers, conditions, the network and the other nodes."""

    nodes: dict[str, SimulatedNode]
    heads: Heads

    def reaches(self, node: SimulatedNode, other: str) -> bool:
        """True if messages pass between a node and the machine of another."""

    def to_coordinator(self, node: SimulatedNode, message: m.AgentReport) -> None:
        """Send a report over the unreliable network to the node's head."""

    def group(self, bind: c.Bind) -> Group:
        """Return the process group of an epoch."""

    def fetch(self, node: SimulatedNode, group: Group, bind: c.Bind) -> bool:
        """Restore a node's state from the source in ``bind``; False if the source lacks it."""


class SimulatedNode:
    """A node: its agent's response to commands, and the faults that may strike it."""

    def __init__(self, world: WorldView, name: str, domain: tuple[str, ...]) -> None:
        """Describe a machine that is down; ``domain`` is its place in the network, from the widest level."""
        self.world, self.name, self.domain = world, name, domain
        self.incarnation = 0
        self.life = 0
        """Incremented at the agent's death or fencing, which cancel all actions planned before."""
        self.up = False
        self.cut = False
        """True while no message passes between it and other machines."""
        self.side = 0
        """Number of the network partition that it is in."""
        self.head: SimulatedCoordinator | None = None
        """The head that it is attached to."""
        self.follows = NOT_LED
        """The highest reign that has led it: it attaches to no head of an earlier one."""
        self.alone_since_s: float | None = None
        """Time at which it lost its head, or last gave up succeeding it."""
        self.sick = False
        """True if its workers compute values that are not finite; a restart does not fix that."""
        self.going = False
        """True if its scheduler is about to remove the machine; its agent reports it."""
        self.snapshots: dict[m.RankSnapshot, bool] = {}
        """Snapshot -> True if its content is corrupt."""
        self._forget()

    def _forget(self) -> None:
        """Reset the state of the agent and its workers, as at the agent's death, under a new incarnation. Cancels planned actions.

        The snapshots and the head stay, and so do faults of the machine, such as a network cut. Hung workers end.
        """
        self.life += 1
        self.incarnation += 1
        self.warm = self.hung = self.maimed = self.leaving = self.bound = self.leave_at_boundary = (
            self.doubts
        ) = False
        self.epoch = self.parked = m.NO_EPOCH
        self.step = m.NO_STEP
        self.bind: c.Bind | None = None
        self.group: Group | None = None

    # --- faults

    def start(self) -> None:
        """Boot the machine with cold workers and without snapshots or a head.

        It joins the fleet and begins to send heartbeats. Does nothing if it is up.
        """
        if not self.up:
            self.up, self.snapshots = True, {}
            self.head, self.follows, self.alone_since_s = None, NOT_LED, None
            self.world.heads.machine_is_back(self.name)
            self._begin()

    def _begin(self) -> None:
        """Find a head, join its fleet, start the workers and the heartbeats."""
        self._find_head()
        self.join()
        self._warm_up()
        self._later(self.world.random.uniform(0, self.world.conditions.heartbeat_s), self._beat)

    def crash(self, silently: bool) -> None:
        """Lose the machine with its memory; unless ``silently``, the coordinator sees its connection break.

        Does nothing if it is down.
        """
        if self.up:
            self.up = False
            self.world.heads.lose_machine(self.name)
            if not silently and self.head is not None:
                disconnected = m.Disconnected(self.name, self.incarnation)
                self.world.clock.after(0.01, partial(self.head.receive, disconnected))
            self._forget()

    def kill_worker(self) -> None:
        """Kill a worker; the agent reports the exit at once and warms it up again. Its epoch then counts as maimed.

        Does nothing if no worker is warm.
        """
        if self.up and self.warm:
            self.warm, epoch = False, self.epoch
            self.maimed = epoch != m.NO_EPOCH
            self.send_report(m.WorkerExited(self.name, self.incarnation, epoch, 0, -9))
            self._warm_up()

    def hang(self, noticed: bool) -> None:
        """Hang the workers; the agent kills one after a second if ``noticed``, else they still respond to it.

        Does nothing in no epoch, or after a worker was killed in it.
        """
        if self.up and self.epoch != m.NO_EPOCH and not self.maimed:
            self.hung = True
            if noticed:
                self._later(1.0, self._kill_hung)

    def _kill_hung(self) -> None:
        """Kill the hung worker, report it, and warm up again. Does nothing if none hangs any more."""
        if self.hung:
            self.hung, self.warm, self.maimed = False, False, True
            self.send_report(m.WorkerHung(self.name, self.incarnation, self.epoch, 0, 1.0))
            self._warm_up()

    def break_collective(self) -> None:
        """Fail a collective in its workers, and report it. Does nothing unless they compute an epoch and are not leaving it."""
        if self.up and self.epoch != m.NO_EPOCH and not (self.hung or self.maimed or self.leaving):
            self.leaving = True
            self.send_report(m.Broken(self.name, self.incarnation, self.epoch, 0, "connection reset by peer"))

    def doubt(self, epoch: int, step: int, ranks: tuple[int, ...]) -> None:
        """Report a step that is not finite, and wait for the order to leave the epoch. Does nothing unless it computes ``epoch``."""
        if self.computes(epoch):
            self.doubts = True
            self.send_report(
                m.Suspect(self.name, "nonfinite", "loss nan", epoch=epoch, ranks=ranks, step=step)
            )

    # --- reports

    def send_report(self, message: m.AgentReport) -> None:
        """Send a report to the coordinator."""
        self.world.to_coordinator(self, message)

    def join(self) -> None:
        """Send a complete description of the node: workers, domain, snapshots, epoch and meeting points."""
        self.send_report(
            m.Joined(
                self.name,
                self.incarnation,
                self.world.conditions.workers,
                self.name,
                1,
                self.domain,
                tuple(self.snapshots),
                self.epoch,
                self.bound,
                self._points(),
                leaving=self.going,
            )
        )

    def _points(self) -> tuple[str, ...]:
        """Return a meeting point for each worker, named after the incarnation; empty ones while cold."""
        return (f"{self.name}:{self.incarnation}" if self.warm else "",) * self.world.conditions.workers

    def _beat(self) -> None:
        """Send a heartbeat, and plan the next. If no head leads it, first look for one and send the description again."""
        if not self._is_led():
            self.head = None
            self._find_head()
            self.join()
        phase = self._phase()
        self.send_report(
            m.Heartbeat(self.name, self.incarnation, self.epoch, self.step, phase, leaving=self.going)
        )
        self._later(self.world.conditions.heartbeat_s, self._beat)

    def _phase(self) -> m.WorkerPhase:
        """Return the workers' phase for a heartbeat: cold, else warm without an epoch, else leaving, else bound or binding."""
        if not self.warm:
            return m.WorkerPhase.COLD
        if self.epoch == m.NO_EPOCH:
            return m.WorkerPhase.WARM
        if self.leaving:
            return m.WorkerPhase.LEAVING
        return m.WorkerPhase.BOUND if self.bound else m.WorkerPhase.BINDING

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Plan an action, which is cancelled if the agent dies meanwhile."""
        life = self.life

        def act() -> None:
            if self.life == life:
                action()

        self.world.clock.after(delay_s, act)

    def _warm_up(self) -> None:
        """Plan the end of the workers' warm-up at a random time."""
        self._later(self.world.random.uniform(*self.world.conditions.warm_up_s), self._is_warm)

    def _is_warm(self) -> None:
        """Mark the workers as warm, and report it if they are in no epoch."""
        if not self.warm:
            self.warm = True
            if self.epoch == m.NO_EPOCH:
                self.send_report(m.Ready(self.name, self.incarnation, self._points()))

    # --- heads

    def _is_led(self) -> bool:
        """Return True if it is attached to a head that is up; False with a chance of 0.3 if that one is silent."""
        head = self.head
        if head is None or not head.up:
            return False
        silent = head.stopped or not self.world.reaches(self, head.node)
        return not (silent and self.world.random.random() < 0.3)

    def _find_head(self) -> None:
        """Attach to a random reachable head of no earlier reign; without one, vote for candidates and perhaps become
        one.

        Attaching withdraws its own candidacy.
        """
        heads, world = self.world.heads, self.world
        reachable = [
            head
            for head in heads.leading()
            if not head.stopped and head.claim.reign >= self.follows and world.reaches(self, head.node)
        ]
        if reachable:
            self.head, self.alone_since_s = world.random.choice(reachable), None
            self.follows = self.head.claim.reign
            heads.withdraw(self.name)
            return
        self._stand()
        for candidate in list(heads.candidates):
            if candidate in heads.candidates and world.reaches(self, candidate):
                heads.vote(candidate, self.name)

    def _stand(self) -> None:
        """Become a candidate after ``stands_after_s`` without a head, which begins to count at the first call; never
        if it may not succeed.
        """
        heads, now_s = self.world.heads, self.world.clock.now_s
        if self.alone_since_s is None:
            self.alone_since_s = now_s
        patience_s = succession.stands_after_s(heads.claim, self.name, self.world.conditions.succession_s)
        if patience_s is not None and now_s - self.alone_since_s >= patience_s:
            self.alone_since_s = now_s
            heads.stand(self.name)

    # --- commands

    def on_command(self, command: c.Command) -> None:
        """Execute a command to park, enter an epoch, fence, describe the node, or shut down; others are ignored.

        A fence of its incarnation, or of a later one, restarts the agent.
        """
        if isinstance(command, c.Park):
            self._park(command)
        elif isinstance(command, c.Bind):
            self._enter(command)
        elif isinstance(command, c.Fence) and command.incarnation >= self.incarnation:
            self._forget()
            self._begin()
        elif isinstance(command, c.TellAll):
            self.join()
        elif isinstance(command, c.Shutdown):
            self._leave_fleet()

    def _leave_fleet(self) -> None:
        """Leave the fleet and lose the memory; the machine comes back after 0.5 to 30 s."""
        self.crash(silently=False)
        self.going = False
        self.world.clock.after(self.world.random.uniform(0.5, 30), self.start)

    def _park(self, command: c.Park) -> None:
        """Leave the epoch: within 0.05 s, at the next step boundary if planned, or after a hung worker is killed.

        Reports parked at once if it is in no epoch. Ignores an earlier epoch.
        """
        if self.epoch > command.epoch:
            return
        if self.epoch == m.NO_EPOCH:
            self._is_parked(command.epoch)
        elif command.planned and self.bound and not (self.maimed or self.doubts):
            self.leave_at_boundary = True
        elif self.hung:
            # A hanging worker cannot respond; the agent kills it, and the new worker is in no epoch.
            self._later(1.0, self._kill_hung)
            self._later(1.1, self.leave)
        else:
            self.leaving = True
            self._later(self.world.random.uniform(0.001, 0.05), self.leave)

    def leave(self) -> None:
        """Leave the epoch with all workers. Reports that it is parked. Does nothing in no epoch."""
        if self.epoch != m.NO_EPOCH:
            epoch, self.epoch = self.epoch, m.NO_EPOCH
            self.maimed = self.leaving = self.bound = self.leave_at_boundary = self.doubts = False
            self._is_parked(epoch)

    def _is_parked(self, epoch: int) -> None:
        """Report that the node has parked, with its snapshots."""
        self.parked = max(self.parked, epoch)
        self.send_report(m.Parked(self.name, self.incarnation, epoch, self._points(), tuple(self.snapshots)))

    def _enter(self, bind: c.Bind) -> None:
        """Enter the process group of a new epoch, drop snapshots later than its step, and restore the state after a
        while.

        Ignores an old epoch, or any with cold workers.
        """
        if bind.epoch <= max(self.parked, self.epoch) or not self.warm:
            return
        self.epoch, self.bind, self.bound, self.step = bind.epoch, bind, False, m.NO_STEP
        resumed = m.NO_STEP if isinstance(bind.resume, c.Fresh) else bind.resume.step
        # Steps after the restored one are computed again.
        self.snapshots = {
            snapshot: tainted for snapshot, tainted in self.snapshots.items() if snapshot.step <= resumed
        }
        self.group = self.world.group(bind)
        self.group.enter(self, bind)
        self._later(
            self.world.random.uniform(0.01, self.world.conditions.restore_s), lambda: self._restore(bind)
        )

    def _restore(self, bind: c.Bind) -> None:
        """Copy the state from the source in ``bind``, or break the collective if it is not there.

        Does nothing if the node no longer computes that epoch.
        """
        if self.computes(bind.epoch) and self.group is not None:
            if self.world.fetch(self, self.group, bind):
                self.group.has_restored(self)
            else:
                self.break_collective()

    def begin(self) -> None:
        """Start training: all members are connected and have restored."""
        self.bound, self.step = True, self.group.step if self.group else m.NO_STEP
        self.send_report(m.Bound(self.name, self.incarnation, self.epoch))

    def report_durable(self, epoch: int, step: int) -> None:
        """Report a committed checkpoint to the coordinator."""
        self.send_report(m.Durable(self.name, self.incarnation, epoch, step))

    # --- training

    def computes(self, epoch: int) -> bool:
        """True if its workers take part in the collectives of ``epoch``."""
        return self.up and self.epoch == epoch and not (self.hung or self.maimed or self.leaving)

    def holds(self, rank: int, epoch: int) -> bool:
        """True if the node is in ``epoch`` and bound to it, and one of its workers is ``rank``."""
        bind = self.bind
        return (
            bind is not None and self.epoch == bind.epoch == epoch and any(rank == r for _, r in bind.places)
        )

    def copies_to_keep(self) -> Iterator[tuple[int, bool]]:
        """Yield (rank, True if it is the buddy's copy) of each snapshot that it keeps or sends."""
        if self.bind is not None:
            yield from ((rank, False) for _, rank in self.bind.places)
            yield from ((rank, True) for buddy in self.bind.buddies for rank in buddy.ranks)

    def complete(self, group: Group, step: int) -> None:
        """End a step and drop snapshots no longer needed. If the group snapshots this step, keep it and send copies to the buddies."""
        self.step = step
        for old in droppable(self.snapshots, group.safe):
            del self.snapshots[old]
        if self.bind is None or group.newest != step:
            return
        for _, rank in self.bind.places:
            self._keep(group, rank, step, "own")
        for buddy in self.bind.buddies:
            for rank in buddy.ranks:
                self._send(group, self.world.nodes[buddy.node], rank, step)

    def _send(self, group: Group, to: SimulatedNode, rank: int, step: int) -> None:
        """Copy a rank's snapshot to another node, which takes up to ``copy_s``; lost if either is down or has left the epoch by then."""

        def arrive() -> None:
            if self.epoch == to.epoch == group.epoch and self.up and to.up:
                to._keep(group, rank, step, "buddy")

        self._later(self.world.random.uniform(0.001, self.world.conditions.copy_s), arrive)

    def _keep(self, group: Group, rank: int, step: int, kind: str) -> None:
        """Add a rank's snapshot, its own or a ``buddy``'s copy, and report it to the group."""
        second = kind == "buddy"
        holding = m.RankSnapshot(group.ranks, rank, step, "buddy" if second else "own", 1, group.epoch)
        self.snapshots[holding] = group.tainted(step)
        group.copy_arrived(rank, step, second)
