"""Simulation of a hundred thousand accelerators for a month: the core of the fleet under published failure rates.

Reports of healthy nodes are folded into roll calls, so that an incident costs only its changes; all other events are
those of a live fleet. The steps between two incidents are counted, not simulated one by one. The result is the number of
failures and recoveries, and the bucket of each second of the run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from phalanx.fleet.core import commands as c
from phalanx.fleet.core import decide as core
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.epochs.faults import next_deadline_s
from phalanx.fleet.core.epochs.life_cycle import can_grow
from phalanx.fleet.core.invariants import BrokenInvariant, check, mark
from phalanx.fleet.core.settings import CoreSettings, Formation
from phalanx.fleet.core.simulated_clock import (
    BINDING,
    DETECTION,
    INTERRUPTED,
    NS_PER_S,
    PARKING,
    RECOMPUTED,
    USEFUL,
    WAITING,
    Account,
    SimulatedClock,
    to_ns,
)
from phalanx.fleet.core.state import NO_SEAT, FleetPhase, RestorePoint
from phalanx_plan.simulate.spares import SeatsKept, SpareStudy, StepCost
from phalanx_plan.whole_run.failures import DAY_S, DEFAULT_RATE, SILENT, Cause, FailureScope, draw_cause

WORKERS = 8
LEVELS = ("hall", "switch", "rack")
"""Levels of the network, the widest first."""
CHECK_EVERY = 500
"""Events between two checks of all invariants of the core, whose cost grows with the number of nodes."""


OnProgress = Callable[[float, float], None]
_PARTS = 200
"""Number of progress reports of a simulation."""


@dataclass(frozen=True)
class Scenario:
    """The inputs of a simulation. The durations of recovery are best measured on the real fleet."""

    nodes: int = 12_500
    spares: int = 125
    days: float = 30.0
    seed: int = 0
    rate: float = DEFAULT_RATE
    """Failures per 1,000 node-days."""
    step_s: float = 10.0
    exit_seen_s: float = 0.05
    worker_lease_s: float = 1.0
    park_s: float = 0.2
    meet_s: float = 1.0
    """Time for all ranks to connect."""
    restore_s: float = 3.0
    """Time to stream a lost node's shards (16 GB a rank at 50 GB/s a node) from a peer."""
    disk_restore_s: float = 120.0
    warm_up_s: float = 60.0
    save_every_s: float = 1800.0
    audit_every_s: float = 600.0
    unit: int = 1
    """Nodes of a unit, which communicate most and are placed together. Above one, the report shows how well spares keep units together."""
    spares_together: int = 0
    """Spares placed together in a group, with groups at equal distances over the fleet; 0 means that all spares are the last nodes."""
    rack_nodes: int = 4
    switch_nodes: int = 32
    hall_nodes: int = 3200

    def domain(self, node: int) -> tuple[str, ...]:
        """Return the domains of a node, the widest level first."""
        sizes = (self.hall_nodes, self.switch_nodes, self.rack_nodes)
        return tuple(f"{level}{node // size}" for level, size in zip(LEVELS, sizes, strict=True))

    def spread_spares(self) -> Iterator[int]:
        """Yield the numbers of the initial spares: complete groups of ``spares_together`` at equal distances over the fleet.

        Spares that fill no group are left out. Yields nothing if ``spares_together`` is 0.
        """
        together = self.spares_together
        pieces = self.spares // together if together else 0
        places = (self.nodes + self.spares) // max(together, 1)
        for number in range(pieces):
            first = number * places // pieces * together
            yield from range(first, first + together)


@dataclass(frozen=True)
class FleetReport:
    """The result of a simulation. Times in seconds."""

    scenario: Scenario
    elapsed_s: float
    failures: dict[str, int]
    of_members: int
    recoveries: int
    from_memory: int
    from_disk: int
    regroups: int
    steps: int
    goodput: float
    buckets_s: dict[str, float]
    node_s: dict[str, float]
    mean_recovery_s: float
    """Mean seconds from the fault to the next running epoch."""
    fewest_spares: int
    events: int
    units_kept: dict[str, SeatsKept]
    """How well the nearest spares, and any spares, kept units together; empty if a unit is one node."""


class LargeFleet:
    """The simulated machines and their training, and the core that receives their reports."""

    def __init__(self, scenario: Scenario, step_cost: StepCost | None = None) -> None:
        """Set up the fleet of a scenario before any node joins, with a study of its seats if there are units.

        ``step_cost`` prices the study's seats; None prices nothing.
        """
        self.scenario, self.clock, self.random = scenario, SimulatedClock(), random.Random(scenario.seed)
        self.total = scenario.nodes + scenario.spares
        unit = scenario.unit
        legal = tuple(range(WORKERS * unit, scenario.nodes * WORKERS + 1, WORKERS * unit))
        settings = CoreSettings(
            Formation(WORKERS, legal),
            wanted_nodes=scenario.nodes,
            min_nodes=scenario.nodes // 2,
            block=unit,
            unit=unit,
        )
        self.state = core.initial_state(settings, 0.0)
        self.started_as_spares = set(map(str, scenario.spread_spares()))
        self.study: SpareStudy | None = None
        if unit > 1:
            domains = {str(index): scenario.domain(index) for index in range(self.total)}
            self.study = SpareStudy(domains, unit, scenario.seed, step_cost)
        self.incarnation = {str(index): 1 for index in range(self.total)}
        self.down: set[str] = set()
        self.unnoticed: set[str] = set()
        """Nodes that are down and not yet known to be down by the core."""
        self.cold: set[str] = set()
        """Nodes on which a worker is restarting."""
        self.account, self.node_ns = Account(), Counter[str]()
        self.counted_ns = 0
        self.reached = self.furthest = self.started = m.NO_STEP
        self.fault_s: float | None = None
        self.recovery_s: list[float] = []
        self.failures = Counter[str]()
        self.of_members = self.events = self.from_memory = self.from_disk = 0
        self.fewest_spares = self.total
        self.tick_s = float("inf")

    # --- events to the core

    def receive(self, event: m.CoreEvent) -> None:
        """Pass one event to the core, and simulate the effects of its decision: a new phase, and the next tick.

        Checks the invariants every ``CHECK_EVERY`` events. Raises BrokenInvariant.
        """
        self._count_nodes()
        before, planned = mark(self.state), self.state.planned
        self.state, _ = core.step(self.state, event, self.clock.now_s)
        self.events += 1
        if self.events % CHECK_EVERY == 0:
            check(self.state, before)
        state = self.state
        self.unnoticed = {name for name in self.unnoticed if state.nodes[name].alive}
        if (state.phase, state.epoch, state.planned) != (before.phase, before.epoch, planned):
            self._turn()
        self._plan_tick()

    def _turn(self) -> None:
        """Simulate the phase that the fleet has entered: account its time, and plan its end.

        A planned stop waits for the step boundary. Counts sources of restores and the fewest spares. Raises
        BrokenInvariant for a failed fleet.
        """
        state, now_ns = self.state, to_ns(self.clock.now_s)
        if state.phase is FleetPhase.PARKING and state.planned and self.account.bucket == USEFUL:
            step_ns = to_ns(self.scenario.step_s)
            left_ns = step_ns - (now_ns - self.account.since_ns) % step_ns
            self.clock.at((now_ns + left_ns) / NS_PER_S, self._if_still(self._boundary))
        elif state.phase is FleetPhase.PARKING:
            self._halt(PARKING)
            self.account.switch(PARKING, now_ns)
            self.clock.after(self.scenario.park_s, self._if_still(self._all_parked))
        elif state.phase is FleetPhase.BINDING:
            self.account.switch(BINDING, now_ns)
            memory, disk = isinstance(state.source, RestorePoint), isinstance(state.source, c.FromDisk)
            self.from_memory, self.from_disk = self.from_memory + memory, self.from_disk + disk
            restore_s = self.scenario.disk_restore_s if disk else self.scenario.restore_s
            self.clock.after(self.scenario.meet_s + restore_s, self._if_still(self._all_bound))
        elif state.phase is FleetPhase.RUNNING:
            self._run()
        elif state.phase is FleetPhase.WAITING:
            self.account.switch(WAITING, now_ns)
        elif state.phase is not FleetPhase.FORMING:
            raise BrokenInvariant(f"the fleet is {state.phase}: {state.reason}")
        self.fewest_spares = min(self.fewest_spares, len(state.spares))

    def _if_still(self, action: Callable[[], None]) -> Callable[[], None]:
        """Return ``action`` as a function that does nothing if epoch or phase have changed meanwhile."""
        epoch, phase = self.state.epoch, self.state.phase

        def act() -> None:
            if (self.state.epoch, self.state.phase) == (epoch, phase):
                action()

        return act

    def _run(self) -> None:
        """Begin to train: account useful time, and end the recovery that a fault began.

        Raises BrokenInvariant if a member is down or cold.
        """
        dead = [name for name in self.unnoticed | self.cold if self.state.nodes[name].seat != NO_SEAT]
        if dead:
            raise BrokenInvariant(f"epoch {self.state.epoch} runs with the dead: {dead}")
        if self.study is not None:
            self.study.record_seats(self.clock.now_s, self.state.seats, self.state.spares)
        self.started = self.reached = self.state.step
        self.account.switch(USEFUL, to_ns(self.clock.now_s))
        if self.fault_s is not None:
            self.recovery_s.append(self.clock.now_s - self.fault_s)
            self.fault_s = None

    def _halt(self, bucket: str) -> None:
        """Stop training: divide its time since the epoch began into new steps, recomputed steps and the interrupted
        one.

        Time continues in ``bucket``. Does nothing unless training.
        """
        if self.account.bucket != USEFUL:
            return
        now_ns, step_ns = to_ns(self.clock.now_s), to_ns(self.scenario.step_s)
        steps, rest_ns = divmod(now_ns - self.account.since_ns, step_ns)
        again = min(steps, max(0, self.furthest - self.started))
        parts = {
            USEFUL: (steps - again) * step_ns,
            RECOMPUTED: again * step_ns,
            INTERRUPTED: rest_ns,
        }
        self.account.split(parts, bucket, now_ns)
        self.reached = self.started + steps
        self.furthest = max(self.furthest, self.reached)

    def _boundary(self) -> None:
        """Stop at the end of a step, if the fleet trains, and park."""
        if self.account.bucket == USEFUL:
            self._halt(PARKING)
            self.clock.after(self.scenario.park_s, self._if_still(self._all_parked))

    def _all_parked(self) -> None:
        """Report the two newest checkpoints on disk, then the members as parked with the last two steps' snapshots;
        lost ones are absent.
        """
        every = max(1, round(self.scenario.save_every_s / self.scenario.step_s))
        newest = self.reached // every * every
        self.receive(m.DiskHolds(tuple(range(max(every, newest - every), newest + 1, every))))
        epoch = self.state.epoch
        steps = tuple(step for step in (self.reached - 1, self.reached) if step > self.started)
        for name in sorted((self.cold - self.down) & self.state.awaiting):
            no_points = ("",) * WORKERS
            self.receive(
                m.Parked(name, self.incarnation[name], epoch, no_points, self._snapshots_of(name, steps))
            )
        if self.state.phase is FleetPhase.PARKING and self.state.epoch == epoch:
            self.receive(m.Rollcall("parked", epoch, steps=steps, absent=self._down_of(self.state.awaiting)))

    def _down_of(self, names: set[str]) -> tuple[str, ...]:
        """Return the nodes of ``names`` that are down unnoticed, sorted."""
        return tuple(sorted(name for name in self.unnoticed if name in names))

    def _snapshots_of(self, name: str, steps: tuple[int, ...]) -> tuple[m.RankSnapshot, ...]:
        """Return a node's snapshots at ``steps``: of its own ranks and of those that it keeps as a buddy. The node must have a seat."""
        state = self.state
        formation, seat = state.settings.formation, state.nodes[name].seat
        cared_for = state.ring.index(seat)
        ranks = [*formation.ranks_of(seat, state.ranks), *formation.ranks_of(cared_for, state.ranks)]
        return tuple(
            m.RankSnapshot(state.ranks, rank, step, "own", epoch=state.epoch)
            for step in steps
            for rank in ranks
        )

    def _all_bound(self) -> None:
        """Report members of the epoch that are cold by their heartbeats, then that all others have entered it, the
        lost ones absent.

        The rest is left out once the fleet has left the epoch.
        """
        epoch, members = self.state.epoch, self.state.awaiting
        for name in sorted((self.cold - self.down) & members):
            if self.state.epoch == epoch:
                self.receive(
                    m.Heartbeat(name, self.incarnation[name], m.NO_EPOCH, m.NO_STEP, m.WorkerPhase.COLD)
                )
        if self.state.phase is FleetPhase.BINDING and self.state.epoch == epoch:
            self.receive(m.Rollcall("bound", epoch, absent=self._down_of(self.state.awaiting)))

    def _plan_tick(self) -> None:
        """Plan a tick for the core's next deadline if nodes are suspect or lost, or the fleet can grow, and none is planned before."""
        state = self.state
        growing = state.phase is FleetPhase.RUNNING and can_grow(state)
        if state.suspects or self.unnoticed or growing:
            at_s = max(next_deadline_s(state), self.clock.now_s + 0.05)
            if at_s < self.tick_s:
                self.tick_s = at_s
                self.clock.at(at_s, lambda: self._tick(at_s))

    def _tick(self, at_s: float) -> None:
        """Report heartbeats and send a tick; nothing if an earlier tick was planned meanwhile."""
        if at_s == self.tick_s:
            self.tick_s = float("inf")
            self._all_well()
            self.receive(m.Tick())

    def _all_well(self) -> None:
        """Report heartbeats of all nodes but the unnoticed lost ones, with the step that training has reached by now."""
        step = self.reached
        if self.account.bucket == USEFUL:
            running_ns = to_ns(self.clock.now_s) - self.account.since_ns
            step = self.started + running_ns // to_ns(self.scenario.step_s)
        self.receive(
            m.Rollcall("heartbeat", self.state.epoch, step=step, absent=tuple(sorted(self.unnoticed)))
        )

    def _count_nodes(self) -> None:
        """Add the time since the last call to the node-seconds of ranks, spares, and nodes that are out."""
        now_ns, state = to_ns(self.clock.now_s), self.state
        passed_ns, self.counted_ns = now_ns - self.counted_ns, now_ns
        if passed_ns:
            seated, spare = len(state.seats) - len(state.vacant), len(state.spares)
            self.node_ns["holding ranks"] += seated * passed_ns
            self.node_ns["spare"] += spare * passed_ns
            self.node_ns["out"] += (self.total - seated - spare) * passed_ns

    # --- faults

    def _next_incident(self) -> None:
        """Plan the next failure at a random time, by the rate of all nodes."""
        per_s = self.scenario.rate / 1000 / DAY_S * self.total
        self.clock.after(self.random.expovariate(per_s), self._incident)

    def _incident(self) -> None:
        """Draw a failure and its node, let it happen if the node is up, and plan the next one."""
        cause, name = draw_cause(self.random), str(self.random.randrange(self.total))
        if name not in self.down:
            self._strike(cause, name)
        self._next_incident()

    def _strike(self, cause: Cause, name: str) -> None:
        """Simulate a failure and count it: of a result, a worker, a node, or of all nodes of a rack or a switch
        together.

        Nodes come back after a random repair time, and are lost silently with the chance ``SILENT``.
        """
        self.failures[cause.name] += 1
        self.of_members += self.state.nodes[name].seat != NO_SEAT
        if cause.scope is FailureScope.RESULT:
            self._compute_wrongly(name)
        elif cause.scope in (FailureScope.WORKER, FailureScope.HANG):
            self._lose_worker(name, hang=cause.scope is FailureScope.HANG)
        else:
            scenario = self.scenario
            together = {FailureScope.RACK: scenario.rack_nodes, FailureScope.SWITCH: scenario.switch_nodes}
            size = together.get(cause.scope, 1)
            first = int(name) // size * size
            back_s = self.random.expovariate(1 / cause.repair_s) + self.scenario.warm_up_s
            silent = self.random.random() < SILENT
            self._all_well()
            for index in range(first, min(first + size, self.total)):
                if str(index) not in self.down:
                    self._lose_node(str(index), back_s, silent)

    def _stop_if_member(self, name: str) -> bool:
        """Stop training if a node holds ranks; return whether it does. The time of a recovery counts from its first fault."""
        member = self.state.nodes[name].seat != NO_SEAT
        if member and self.fault_s is None:
            self.fault_s = self.clock.now_s
        if member:
            self._halt(DETECTION)
        return member

    def _lose_worker(self, name: str, *, hang: bool) -> None:
        """Lose a worker of a node, which is reported after a moment, or after the lease for a hang; it warms up later.

        Does nothing on a cold node.
        """
        if name in self.cold:
            return
        member, incarnation = self._stop_if_member(name), self.incarnation[name]
        self.cold.add(name)
        epoch = self.state.epoch if member else m.NO_EPOCH
        lease_s = self.scenario.worker_lease_s
        if hang:
            self.clock.after(
                lease_s, lambda: self.receive(m.WorkerHung(name, incarnation, epoch, 0, lease_s))
            )
        else:
            exited = m.WorkerExited(name, incarnation, epoch, 0, 1)
            self.clock.after(self.scenario.exit_seen_s, lambda: self.receive(exited))
        self.clock.after(self.scenario.warm_up_s, lambda: self._warm(name, incarnation))

    def _warm(self, name: str, incarnation: int) -> None:
        """Report a node whose workers are warm again, if it is still the same agent and up."""
        if self.incarnation[name] == incarnation and name not in self.down:
            self.cold.discard(name)
            self.receive(m.Ready(name, incarnation, self._points(name)))

    def _lose_node(self, name: str, back_s: float, silent: bool) -> None:
        """Lose a node until ``back_s`` seconds later; unless ``silent``, its broken connection is reported, and by a
        peer if it holds ranks.
        """
        member, disconnected = self._stop_if_member(name), m.Disconnected(name, self.incarnation[name])
        self.down.add(name)
        self.unnoticed.add(name)
        self.cold.discard(name)
        if not silent:
            self.clock.after(self.scenario.exit_seen_s, lambda: self.receive(disconnected))
            if member:
                self.clock.after(2 * self.scenario.exit_seen_s, self._a_peer_notices)
        self.clock.after(back_s, lambda: self._return(name))
        self._plan_tick()

    def _a_peer_notices(self) -> None:
        """Let the first node that has a seat and is well report a broken connection; nothing if there is none."""
        state = self.state
        for name in state.seats:
            if name not in self.down and name not in self.cold:
                self.receive(
                    m.Broken(name, self.incarnation[name], state.epoch, 0, "connection reset by peer")
                )
                return

    def _return(self, name: str) -> None:
        """Bring a node back under a new incarnation; it joins the fleet."""
        self.down.discard(name)
        self.unnoticed.discard(name)
        self.incarnation[name] += 1
        self.receive(self._joined(name))

    def _compute_wrongly(self, name: str) -> None:
        """Let the next audit report a node as corrupt, with the last audited step as trusted, and admit it a day later.

        Does nothing unless the fleet trains and the node holds ranks.
        """
        audit_s = self.scenario.audit_every_s
        since_s = self.clock.now_s % audit_s
        if self.account.bucket != USEFUL or self.state.nodes[name].seat == NO_SEAT:
            return
        running_s = self.clock.now_s - self.account.since_ns / NS_PER_S
        trusted = max(0, self.started + int((running_s - since_s) // self.scenario.step_s))
        suspicion = m.Suspect(name, "corruption", "checksums differ", trusted_step=trusted)

        def audit() -> None:
            """Report the suspect node, and count the fault from now on if none is open."""
            if self.fault_s is None:
                self.fault_s = self.clock.now_s
            self.receive(suspicion)

        self.clock.after(audit_s - since_s, audit)
        self.clock.after(DAY_S, lambda: self.receive(m.Admit(name)))

    def _points(self, name: str) -> tuple[str, ...]:
        return tuple(f"{name}:{worker}" for worker in range(WORKERS))

    def _joined(self, name: str) -> m.Joined:
        """Return a node's report that it joins, with its domain, and as a spare if it started as one."""
        return m.Joined(
            name,
            self.incarnation[name],
            WORKERS,
            name,
            1,
            self.scenario.domain(int(name)),
            meeting_points=self._points(name),
            started_as_spare=name in self.started_as_spares,
        )

    # --- the run

    def run(self, on_progress: OnProgress) -> FleetReport:
        """Simulate the complete scenario and return its report. Raises BrokenInvariant.

        ``on_progress`` is called with (simulated days, all days) after each node that joins at the start, and after each of ``_PARTS`` parts.
        """
        for name in list(self.incarnation):
            self.receive(self._joined(name))
            on_progress(0.0, self.scenario.days)
        self._next_incident()
        end_s = self.scenario.days * DAY_S
        for part in range(1, _PARTS + 1):
            self.clock.run_until(end_s if part == _PARTS else end_s * part / _PARTS)
            on_progress(self.scenario.days * part / _PARTS, self.scenario.days)
        self._count_nodes()
        self._halt(WAITING)
        self.account.switch(self.account.bucket, to_ns(end_s))
        check(self.state)
        return self._report(end_s)

    def _report(self, end_s: float) -> FleetReport:
        """Return the report: counts, goodput, and seconds by bucket.

        The caller closes all accounts at ``end_s`` before. Raises BrokenInvariant if times or steps do not add up.
        """
        totals_ns, state = self.account.totals_ns, self.state
        if sum(totals_ns.values()) != to_ns(end_s) or sum(self.node_ns.values()) != self.total * to_ns(end_s):
            raise BrokenInvariant(f"{totals_ns} and {self.node_ns} do not add up to {end_s} s")
        if totals_ns.get(USEFUL, 0) != (self.furthest + 1) * to_ns(self.scenario.step_s):
            raise BrokenInvariant(f"{self.furthest + 1} steps in {totals_ns.get(USEFUL, 0)} ns")
        return FleetReport(
            scenario=self.scenario,
            elapsed_s=end_s,
            failures=dict(self.failures.most_common()),
            of_members=self.of_members,
            recoveries=state.recoveries,
            from_memory=self.from_memory,
            from_disk=self.from_disk,
            regroups=state.regroups,
            steps=self.furthest + 1,
            goodput=totals_ns.get(USEFUL, 0) / to_ns(end_s),
            buckets_s={name: total / NS_PER_S for name, total in totals_ns.items()},
            node_s={name: total / NS_PER_S for name, total in self.node_ns.items()},
            mean_recovery_s=sum(self.recovery_s) / max(1, len(self.recovery_s)),
            fewest_spares=self.fewest_spares,
            events=self.events,
            units_kept={} if self.study is None else self.study.results(end_s),
        )


def simulate(
    scenario: Scenario,
    on_progress: OnProgress = lambda _done, _days: None,
    step_cost: StepCost | None = None,
) -> FleetReport:
    """Simulate the fleet of a scenario. Raises BrokenInvariant, with the command that reproduces it.

    ``on_progress`` is called now and then with (simulated days, all days). ``step_cost`` prices the seats of units;
    None prices nothing.
    """
    fleet = LargeFleet(scenario, step_cost)
    try:
        return fleet.run(on_progress)
    except BrokenInvariant as error:
        raise BrokenInvariant(
            f"{error}, at {fleet.clock.now_s:.3f} s, after {fleet.events} events. To see it again: phalanx simulate fleet "
            f"--nodes {scenario.nodes} --days {scenario.days} --seed {scenario.seed} --spares {scenario.spares} "
            f"--rate {scenario.rate} --step-s {scenario.step_s} --unit {scenario.unit} "
            f"--spares-together {scenario.spares_together}"
        ) from error
