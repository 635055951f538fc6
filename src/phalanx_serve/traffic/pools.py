"""Pool of workers: live, late, draining or quarantined workers and their roles.

``step(state, event, now) -> (state, commands)``. A worker is *late* if its heartbeat is overdue: its jobs continue
elsewhere at once, and it rejoins with its next heartbeat. Roles follow the load: if the queue of one role exceeds its
objective for long enough (hysteresis) while the other role has room, the least loaded worker changes roles. Both
roles have the same weights, so this costs nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx_serve.traffic import events


@dataclass(frozen=True)
class PoolSettings:
    """Thresholds for late and dead workers, and for role changes."""

    late_s: float = 2.0
    dead_s: float = 30.0
    step_rows: int = 512
    """Most rows of an engine step. A worker is not late within the time of such a step and a pull."""
    pull_s: float = 5.0
    """Most seconds of a pull of pages."""
    elastic: bool = True
    wait_s: float = 1.0
    """Objective: mean seconds of rows queued per worker of a role."""
    patience_s: float = 5.0
    """Seconds for which an objective must be exceeded."""
    rest_s: float = 20.0
    """Least seconds between two role changes."""


@dataclass
class PoolWorker:
    """A worker that has joined."""

    number: int
    life: int
    role: events.Role
    identity: events.WorkerIdentity
    pages: int
    rows_per_s: float
    last_heartbeat_s: float
    stepped_s: float
    """Time of its engine's last step, or when it last had nothing to do."""
    steps: int = -1
    late: bool = False
    draining: bool = False
    jobs: set[int] = field(default_factory=set)
    queued_rows: int = 0
    """Rows that its jobs must compute before their first output."""
    hints: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Pages that the worker probably has, the latest last. A wrong hint costs only time."""

    def holds(self, names: Sequence[bytes]) -> int:
        """Return the number of leading ``names`` that the worker probably has."""
        for count, name in enumerate(names):
            if name not in self.hints:
                return count
        return len(names)

    def hint(self, names: Sequence[bytes]) -> None:
        """Record pages that the worker computed or fetched. They become its newest, the first of ``names`` the newest
        of all.

        The oldest pages beyond ``pages`` are dropped.
        """
        for name in reversed(names):  # the first is used last: a chain is evicted from its end
            self.hints[name] = None
            self.hints.move_to_end(name)
        while len(self.hints) > self.pages:
            self.hints.popitem(last=False)


@dataclass
class Pool:
    """All workers."""

    settings: PoolSettings = PoolSettings()
    identity: events.WorkerIdentity | None = None
    """Identity that all workers must have; by default the first worker's."""
    workers: dict[int, PoolWorker] = field(default_factory=dict)
    quarantined: dict[int, str] = field(default_factory=dict)
    strained_s: float = -1.0
    """Time since which a role exceeds its objective; negative if none does."""
    strained: str = ""
    changed_s: float = -1e9
    refused: int = 0
    role_changes: int = 0

    def current(self, number: int, life: int) -> PoolWorker | None:
        """Return the worker if ``life`` is its current life."""
        worker = self.workers.get(number)
        return worker if worker is not None and worker.life == life else None

    def open_to_work(self) -> list[PoolWorker]:
        """Return the workers that accept jobs, by number."""
        return [w for _, w in sorted(self.workers.items()) if not w.late and not w.draining]


def step(pool: Pool, event: events.PoolEvent, now_s: float) -> tuple[Pool, list[events.PoolCommand]]:
    """Update ``pool`` in place by ``event``.

    Return it and the resulting commands. Only a ``ClockTick`` marks workers as late, removes silent ones, dismisses
    drained ones and balances roles.
    """
    commands: list[events.PoolCommand] = []
    match event:
        case events.WorkerJoined():
            _join(pool, event, now_s, commands)
        case events.Beat():
            _beat(pool, event, now_s, commands)
        case events.Left(number, life):
            if pool.current(number, life):
                commands.append(_remove(pool, number))
        case events.DrainWorker(number):
            if number in pool.workers:
                pool.workers[number].draining = True
        case events.AdmitWorker(number):
            pool.quarantined.pop(number, None)
        case _:
            _watch(pool, now_s, commands)
    return pool, commands


def quarantine(pool: Pool, number: int, reason: str) -> list[events.PoolCommand]:
    """Remove a worker; it may join again only after ``AdmitWorker``."""
    pool.quarantined[number] = reason
    worker = pool.workers.get(number)
    return [_remove(pool, number), events.Refuse(number, worker.life, reason)] if worker else []


def _join(pool: Pool, event: events.WorkerJoined, now_s: float, commands: list[events.PoolCommand]) -> None:
    """Add a worker, in place of an earlier life. Refuse one that is quarantined or of another identity; ignore an earlier life."""
    old = pool.workers.get(event.worker)
    if old is not None and event.life <= old.life:
        return
    refusal = pool.quarantined.get(event.worker, "")
    if not refusal and pool.identity not in (None, event.identity):
        refusal = f"it has {event.identity}, and the service has {pool.identity}: give every worker the same weights, libraries and kind of processor"
    if refusal:
        pool.refused += 1
        commands.append(events.Refuse(event.worker, event.life, f"worker {event.worker}: {refusal}"))
        return
    pool.identity = event.identity
    if old is not None:
        commands.append(_remove(pool, event.worker))
    pool.workers[event.worker] = PoolWorker(
        event.worker, event.life, event.role, event.identity, event.pages, event.rows_per_s, now_s, now_s
    )


def _remove(pool: Pool, number: int) -> events.Lost:
    """Remove a worker; return the loss of its jobs."""
    worker = pool.workers.pop(number)
    return events.Lost(number, tuple(sorted(worker.jobs)), is_gone=True)


def _beat(pool: Pool, event: events.Beat, now_s: float, commands: list[events.PoolCommand]) -> None:
    """Record a sign of life, and a step if steps have advanced or the worker has no jobs.

    The worker is no longer late if its last recorded step is recent enough. Refuse a worker that is not in the pool;
    ignore an earlier life.
    """
    worker = pool.current(event.worker, event.life)
    if worker is None:
        # It was declared lost: only a new life is certain to have no job of the old one.
        if event.worker not in pool.workers:
            reason = pool.quarantined.get(event.worker, "")
            commands.append(
                events.Refuse(event.worker, event.life, reason or "it was given up; let it join again")
            )
        return
    worker.last_heartbeat_s = now_s
    if event.steps != worker.steps or not event.jobs:
        worker.steps, worker.stepped_s = event.steps, now_s
    if now_s - worker.stepped_s <= _step_patience_s(pool.settings, worker):
        worker.late = False


def _step_patience_s(settings: PoolSettings, worker: PoolWorker) -> float:
    """Return the seconds without a step after which a worker is late: for a pull of pages and two full steps."""
    return settings.late_s + settings.pull_s + 2 * settings.step_rows / worker.rows_per_s


def _watch(pool: Pool, now_s: float, commands: list[events.PoolCommand]) -> None:
    """Mark workers that are silent for ``late_s`` as late; remove and refuse those silent for ``dead_s``.

    A worker without a step for ``_step_patience_s`` is late too, and removed after ``dead_s`` more.
    Dismiss drained ones without jobs, and balance the roles if the pool is elastic.
    """
    settings = pool.settings
    for number, worker in sorted(pool.workers.items()):
        silent_s = now_s - worker.last_heartbeat_s
        still_s = now_s - worker.stepped_s - _step_patience_s(settings, worker)
        if max(silent_s, still_s) > settings.dead_s:
            commands += [
                _remove(pool, number),
                events.Refuse(number, worker.life, "silent, or without a step of its engine, for too long"),
            ]
        elif (silent_s > settings.late_s or still_s > 0) and not worker.late:
            worker.late = True
            commands.append(events.Lost(number, tuple(sorted(worker.jobs)), is_gone=False))
        elif worker.draining and not worker.jobs:
            del pool.workers[number]
            commands.append(events.Dismiss(number))
    if settings.elastic:
        _balance(pool, now_s)


def waits_s(pool: Pool) -> dict[str, float]:
    """Return the mean seconds of queued rows per worker, for each role that has workers."""
    waits: dict[str, list[float]] = {}
    for worker in pool.open_to_work():
        waits.setdefault(worker.role, []).append(worker.queued_rows / worker.rows_per_s)
    return {role: sum(each) / len(each) for role, each in waits.items()}


def _balance(pool: Pool, now_s: float) -> None:
    """Give the least busy worker of one role to the other if that has been strained for ``patience_s``, at most once
    per ``rest_s``.

    A role is strained if its wait is over ``wait_s`` and the other's below half of that, with a worker to spare.
    """
    waits, limit = waits_s(pool), pool.settings.wait_s
    strained = ""
    if "prefill" in waits and "decode" in waits:
        worse = max(("prefill", "decode"), key=lambda role: waits[role])
        easier = "decode" if worse == "prefill" else "prefill"
        spare = [w for w in pool.open_to_work() if w.role == easier]
        if waits[worse] > limit and 2 * waits[easier] < limit and len(spare) > 1:
            strained = worse
    if strained != pool.strained:
        pool.strained, pool.strained_s = strained, now_s
    if not strained or now_s - pool.strained_s < pool.settings.patience_s:
        return
    if now_s - pool.changed_s < pool.settings.rest_s:
        return
    least = min(spare, key=lambda worker: (worker.queued_rows, len(worker.jobs), worker.number))
    least.role = "prefill" if strained == "prefill" else "decode"
    pool.changed_s, pool.role_changes = now_s, pool.role_changes + 1
