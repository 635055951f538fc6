"""Pool of workers: who is there, in which role, late, draining or in quarantine; and which worker computes a request.

``step(state, event, now) -> (state, commands)``. A worker is *late* when it has given no sign of life for a while: its jobs go on elsewhere
at once, and it is taken back when it speaks again. Roles follow the load: when the queue of one role breaks its objective while the other
has room, for long enough (hysteresis), the least loaded worker changes sides. Both roles hold the same weights, so this costs nothing.

A request is routed to the worker with the least seconds until its next token.
The cost is that of the design of disaggregated servers (Mooncake, arXiv 2407.00079; NVIDIA Dynamo's router): prefill rows that are not held,
rows queued before them, and pages to fetch over the link's rate. Ties go to the lower worker number, so that the same state gives the same
route, in a replay too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from phalanx_serve.traffic.events import (
    NOBODY,
    Admit,
    Beat,
    Dismiss,
    Drain,
    Identity,
    Joined,
    Left,
    Lost,
    PoolCommand,
    PoolEvent,
    Refuse,
    Role,
)


@dataclass(frozen=True)
class PoolSettings:
    """When a worker is late, dead, or changes sides."""

    late_s: float = 2.0
    dead_s: float = 30.0
    step_rows: int = 512
    """Rows of an engine's longest step, and """
    pull_s: float = 5.0
    """the longest pull of pages: for the time of both a busy worker may make no step, and is not late for it."""
    elastic: bool = True
    wait_s: float = 1.0
    """The objective: seconds of rows queued before a worker of a role, on average."""
    patience_s: float = 5.0
    """For how long an objective must be broken."""
    rest_s: float = 20.0
    """After a change, before the next."""


@dataclass
class Worker:
    """A worker that has joined."""

    number: int
    life: int
    role: Role
    identity: Identity
    pages: int
    rows_per_s: float
    heard_s: float
    stepped_s: float
    """When its engine last made a step, or had nothing to do."""
    steps: int = -1
    late: bool = False
    draining: bool = False
    jobs: set[int] = field(default_factory=set)
    queued_rows: int = 0
    """Rows that its jobs have yet to compute before they tell anything."""
    hints: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Pages that it most likely holds, the latest last; a wrong one costs time only."""

    def holds(self, names: Sequence[bytes]) -> int:
        """So many pages from the first on are there, most likely."""
        for count, name in enumerate(names):
            if name not in self.hints:
                return count
        return len(names)

    def hint(self, names: Sequence[bytes]) -> None:
        """Notes that it has computed or fetched pages."""
        for name in reversed(names):  # the first is used last: a chain is evicted from its end
            self.hints[name] = None
            self.hints.move_to_end(name)
        while len(self.hints) > self.pages:
            self.hints.popitem(last=False)


@dataclass
class Pool:
    """All workers."""

    settings: PoolSettings = PoolSettings()
    identity: Identity | None = None
    """What all must be; the first worker's, if nothing is given."""
    workers: dict[int, Worker] = field(default_factory=dict)
    quarantined: dict[int, str] = field(default_factory=dict)
    strained_s: float = -1.0
    """Since when a role's objective is broken; negative while none is."""
    strained: str = ""
    changed_s: float = -1e9
    refused: int = 0
    role_changes: int = 0

    def current(self, number: int, life: int) -> Worker | None:
        """The worker, if this is its present life."""
        worker = self.workers.get(number)
        return worker if worker is not None and worker.life == life else None

    def open_to_work(self) -> list[Worker]:
        """Workers that may be given jobs, by number."""
        return [w for _, w in sorted(self.workers.items()) if not w.late and not w.draining]


def step(pool: Pool, event: PoolEvent, now_s: float) -> tuple[Pool, list[PoolCommand]]:
    """The pool after ``event``, and what follows. Mutates the given pool."""
    commands: list[PoolCommand] = []
    match event:
        case Joined():
            _join(pool, event, now_s, commands)
        case Beat():
            _beat(pool, event, now_s, commands)
        case Left(number, life):
            if pool.current(number, life):
                commands.append(_remove(pool, number))
        case Drain(number):
            if number in pool.workers:
                pool.workers[number].draining = True
        case Admit(number):
            pool.quarantined.pop(number, None)
        case _:
            _watch(pool, now_s, commands)
    return pool, commands


def quarantine(pool: Pool, number: int, why: str) -> list[PoolCommand]:
    """Takes a worker out for good; it may join again only after ``Admit``."""
    pool.quarantined[number] = why
    worker = pool.workers.get(number)
    return [_remove(pool, number), Refuse(number, worker.life, why)] if worker else []


def _join(pool: Pool, event: Joined, now_s: float, commands: list[PoolCommand]) -> None:
    old = pool.workers.get(event.worker)
    if old is not None and event.life <= old.life:
        return
    why = pool.quarantined.get(event.worker, "")
    if not why and pool.identity not in (None, event.identity):
        why = f"it has {event.identity}, and the service has {pool.identity}: give every worker the same weights, libraries and kind of processor"
    if why:
        pool.refused += 1
        commands.append(Refuse(event.worker, event.life, f"worker {event.worker}: {why}"))
        return
    pool.identity = event.identity
    if old is not None:
        commands.append(_remove(pool, event.worker))
    pool.workers[event.worker] = Worker(
        event.worker, event.life, event.role, event.identity, event.pages, event.rows_per_s, now_s, now_s
    )


def _remove(pool: Pool, number: int) -> Lost:
    worker = pool.workers.pop(number)
    return Lost(number, tuple(sorted(worker.jobs)), gone=True)


def _beat(pool: Pool, event: Beat, now_s: float, commands: list[PoolCommand]) -> None:
    worker = pool.current(event.worker, event.life)
    if worker is None:
        # Given up for dead: only a new life can be trusted to hold no job of the old one.
        if event.worker not in pool.workers:
            reason = pool.quarantined.get(event.worker, "")
            commands.append(Refuse(event.worker, event.life, reason or "it was given up; let it join again"))
        return
    worker.heard_s = now_s
    if event.steps != worker.steps or not event.jobs:
        worker.steps, worker.stepped_s = event.steps, now_s
    if now_s - worker.stepped_s <= _step_patience_s(pool.settings, worker):
        worker.late = False


def _step_patience_s(settings: PoolSettings, worker: Worker) -> float:
    return settings.late_s + settings.pull_s + 2 * settings.step_rows / worker.rows_per_s


def _watch(pool: Pool, now_s: float, commands: list[PoolCommand]) -> None:
    settings = pool.settings
    for number, worker in sorted(pool.workers.items()):
        silent_s = now_s - worker.heard_s
        still_s = now_s - worker.stepped_s - _step_patience_s(settings, worker)
        if max(silent_s, still_s) > settings.dead_s:
            commands += [
                _remove(pool, number),
                Refuse(number, worker.life, "silent, or without a step of its engine, for too long"),
            ]
        elif (silent_s > settings.late_s or still_s > 0) and not worker.late:
            worker.late = True
            commands.append(Lost(number, tuple(sorted(worker.jobs)), gone=False))
        elif worker.draining and not worker.jobs:
            del pool.workers[number]
            commands.append(Dismiss(number))
    if settings.elastic:
        _balance(pool, now_s)


def waits_s(pool: Pool) -> dict[str, float]:
    """Seconds of rows queued before the workers of each role, on average; of roles that somebody has."""
    waits: dict[str, list[float]] = {}
    for worker in pool.open_to_work():
        waits.setdefault(worker.role, []).append(worker.queued_rows / worker.rows_per_s)
    return {role: sum(each) / len(each) for role, each in waits.items()}


def _balance(pool: Pool, now_s: float) -> None:
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


# Routing.


PAGE_ROWS = 64


@dataclass(frozen=True)
class Bidder:
    """What the router knows of a worker with regard to one request."""

    number: int
    role: Role
    queued_rows: int
    held_pages: int
    """The first so many pages of the request are there."""
    rows_per_s: float


@dataclass(frozen=True)
class Link:
    """How pages travel."""

    page_bytes: int = 1 << 20
    bytes_per_s: float = 1e9
    round_trip_s: float = 1e-3

    def seconds(self, pages: int) -> float:
        """The time to fetch so many pages."""
        return self.round_trip_s + pages * self.page_bytes / self.bytes_per_s if pages > 0 else 0.0


@dataclass(frozen=True)
class Route:
    """Where a request goes next."""

    worker: int
    prefill: bool
    """It computes the prompt and one token, and another worker goes on."""
    source: int
    """Whose pages it fetches first; NOBODY: it computes what it does not hold."""
    cost_s: float


def choose(
    rows: int,
    pages: int,
    candidates: Iterable[Bidder],
    sources: Iterable[tuple[int, int]],
    link: Link,
    small_rows: int = PAGE_ROWS,
) -> Route | None:
    """The route of a request of ``rows`` tokens, whose first ``pages`` pages have names; None if nobody can take it.

    Args:
        rows: Tokens of prompt and text so far.
        pages: Whole pages among them.
        candidates: Workers that may be given work.
        sources: (worker, pages held) of those that pages can be fetched from.
        link: How pages travel.
        small_rows: A worker that decodes computes so many rows itself, rather than wait for one that prefills.

    A decode worker is given a whole prompt only if nobody else prefills; and a prefill worker decodes only if nobody else does.
    """
    workers = sorted(candidates, key=lambda worker: worker.number)
    decoders = [worker for worker in workers if worker.role != "prefill"] or workers
    prefillers = [worker for worker in workers if worker.role != "decode"]
    ranked = sorted(sources, key=lambda source: (-source[1], source[0]))
    routes = []
    for worker in decoders:
        route = _at(worker, rows, pages, ranked, link)
        left = rows - PAGE_ROWS * max(worker.held_pages, ranked[0][1] if route.source != NOBODY else 0)
        if worker.role != "decode" or left <= small_rows or not prefillers:
            routes.append(route)
    for worker in prefillers if pages else ():
        if worker.role == "prefill" and decoders[0].role != "prefill":
            route = _at(worker, rows, pages, ranked, link)
            routes.append(Route(worker.number, True, route.source, route.cost_s + link.seconds(pages)))
    if not routes:
        routes = [_at(worker, rows, pages, ranked, link) for worker in decoders]
    return min(routes, key=lambda route: (route.cost_s, route.worker), default=None)


def _at(worker: Bidder, rows: int, pages: int, ranked: list[tuple[int, int]], link: Link) -> Route:
    """The better of computing and fetching what a worker does not hold."""
    held = min(worker.held_pages, pages)
    queued_s = worker.queued_rows / worker.rows_per_s
    compute_s = (rows - PAGE_ROWS * held) / worker.rows_per_s
    other = next((source for source in ranked if source[0] != worker.number), None)
    if other is not None and other[1] > held:
        got = min(other[1], pages)
        fetch_s = link.seconds(got - held) + (rows - PAGE_ROWS * got) / worker.rows_per_s
        if fetch_s < compute_s:
            return Route(worker.number, False, other[0], queued_s + fetch_s)
    return Route(worker.number, False, NOBODY, queued_s + compute_s)
