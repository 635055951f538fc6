"""Simulated services: faults occur for a while, then end; every text must be delivered, and all pages and jobs must
be freed.

A simulation is a function of its seed: workers, roles, network, arrivals and faults are drawn from it. The method is
that of FoundationDB (SIGMOD 2021, section 4): one thread, one seed, one truth. After each event the invariants of the
router's state are checked.

Connections keep messages in order, and lose them all when they are cut. The oracle is the client: it derives every
token of its text from the request, so a token that is lost, repeated, out of order or changed is detected on arrival.
"""

from __future__ import annotations

import math
import random
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from phalanx.fleet.core.simulated_clock import SimulatedClock
from phalanx_serve.traffic import dispatch, events
from phalanx_serve.traffic.dispatch import RouterState
from phalanx_serve.traffic.events import Ended, EngineOutput, Request, Sampling, Token
from phalanx_serve.traffic.pools import Pool, PoolSettings
from phalanx_serve.traffic.routing import Link
from phalanx_serve.traffic.simulated_worker import SimulatedWorker, page_names, token

# The world: gateway, workers, clients and the network between them, all of which fail.


TICK_S = 0.25


@dataclass
class Client:
    """A simulated client of one text."""

    request: Request
    came_s: float
    got: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    done: bool = False
    left: bool = False


class SimulatedService:
    """Gateway, workers, clients and network of one simulation."""

    def __init__(self, seed: int, *, checked: bool) -> None:
        """Draw the delays, corruption and audits of the world of ``seed``, and open its gateway; it has no workers
        yet.

        ``checked`` checks the router's invariants after each event.
        """
        self.seed, self.random, self.clock = seed, random.Random(seed), SimulatedClock()
        self.checked = checked
        self.identity = events.WorkerIdentity("weights", "numerics")
        self.workers: dict[int, SimulatedWorker] = {}
        self.clients: dict[str, Client] = {}
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.lives = self.events = 0
        self.lease_s = self.random.choice((2.0, 10.0))
        self.delay_s = self.random.choice((0.0005, 0.005, 0.05))
        self.corruption = self.random.choice((0.0, 0.02, 0.3))
        self.slow_links: set[tuple[int, int]] = set()
        self.cut_links: set[tuple[int, int]] = set()
        self.audit_share = self.random.choice((0.0, 0.3, 1.0))
        self.gateway_up = False
        self.reign = 0
        self._arrivals: dict[int, float] = {}
        self.open_gateway()

    # --- the gateway

    def open_gateway(self) -> None:
        """Start a gateway with no state; workers connect to it, and clients send their requests again."""
        self.reign += 1
        self.gateway_up = True
        settings = dispatch.DispatchSettings(
            Link(1 << 20, 1e9, 2 * self.delay_s), audit_share=self.audit_share, most_losses=50
        )
        pool = Pool(PoolSettings(late_s=2.0, dead_s=8.0, patience_s=2.0, rest_s=5.0), self.identity)
        self.router = dispatch.RouterState(page_names, settings, pool)
        for worker in self.workers.values():
            self.clock.after(self.random.uniform(0, 0.5), worker.join)
        for client in self.clients.values():
            if not client.done and not client.left:
                self._send(client)
        self._tick(self.reign)

    def close_gateway(self) -> None:
        """Kill the gateway; its state and all jobs are lost, its counts are kept. Another starts within 2 s."""
        self.gateway_up = False
        self.reign += 1
        for worker in self.workers.values():
            worker.life = 0
            worker.jobs.clear()
            worker.references.clear()
        for name, count in self.router.counts.items():
            self.counts[name] += count
        self.clock.after(self.random.uniform(0.1, 2.0), self.open_gateway)

    def _tick(self, reign: int) -> None:
        """Send a tick to the router, and plan the next; ends with the gateway."""
        if reign == self.reign:
            self.hear(events.ClockTick(), reign)
            self.clock.after(TICK_S, partial(self._tick, reign))

    def hear(self, event: events.Event, reign: int) -> None:
        """Pass an event to the router, give its outputs to clients, and send its commands to workers that are not cut
        off.

        Ignores events of an earlier gateway. Raises RouterInvariantError.
        """
        if reign != self.reign or not self.gateway_up:
            return
        self.events += 1
        self.router, commands = dispatch.step(self.router, event, self.clock.now_s)
        if self.checked:
            check(self.router)
        for command in commands:
            if isinstance(command, events.DeliverOutput):
                self._receive(command.output)
            else:
                worker = self.workers[command.worker]
                life = command.life if isinstance(command, events.Refuse) else worker.life
                if not worker.cut:
                    self._in_order(-worker.number - 1, partial(worker.obey, command, life))

    def new_life(self) -> int:
        """Return the number of a new connection."""
        self.lives += 1
        return self.lives

    # --- the network

    def to_router(self, worker: SimulatedWorker, event: events.Event, *, even_if_cut: bool = False) -> None:
        """Send a worker's event over its connection."""
        if self.gateway_up and worker.life and (even_if_cut or not worker.cut):
            self._in_order(worker.number, partial(self.hear, event, self.reign))

    def _in_order(self, way: int, action: Callable[[], None]) -> None:
        """Plan an action after a random delay, but not before earlier ones of the same ``way``."""
        due_s = self.clock.now_s + self.random.uniform(0.5, 2) * self.delay_s
        self._arrivals[way] = max(self._arrivals.get(way, 0.0), due_s)
        self.clock.at(self._arrivals[way], action)

    def fetch_seconds(self, to: SimulatedWorker, source: SimulatedWorker, pages: int) -> float:
        """Return the seconds that a pull of pages takes: 1 s if the source does not respond, at most 2 s on a slow link."""
        if not source.up or source.stopped or (to.number, source.number) in self.cut_links:
            return 1.0
        slow = 50.0 if (to.number, source.number) in self.slow_links else 1.0
        return min(2 * self.delay_s + slow * pages * 1e-3, 2.0)

    def fetch_failure(self, to: SimulatedWorker, source: SimulatedWorker, name: bytes) -> str:
        """Return why a page does not arrive; empty if it does. Corruption and slow links are drawn at random."""
        if not source.up or source.stopped or (to.number, source.number) in self.cut_links:
            return "no connection"
        if source.identity != to.identity:
            return "other weights"
        if (to.number, source.number) in self.slow_links and self.random.random() < 0.2:
            return "too slow"
        if name not in source.cache:
            return "evicted, or its lease is over"
        return "corrupt" if self.random.random() < self.corruption else ""

    # --- clients

    def arrive(self, number: int, prompt: tuple[int, ...], tokens: int) -> None:
        """Add client ``r{number}`` with a request of at most ``tokens`` tokens, and send it; one in five has a stop
        token that it will draw.
        """
        seed = self.random.randrange(1 << 30)
        stop = (
            frozenset({token(prompt, seed, self.random.randrange(1, tokens))})
            if tokens > 1 and self.random.random() < 0.2
            else frozenset()
        )
        request = Request(f"r{number}", prompt, tokens, Sampling(seed=seed), stop)
        self.clients[request.id] = client = Client(request, self.clock.now_s)
        self._send(client)

    def _send(self, client: Client) -> None:
        """Submit a client's request to the present gateway after the usual delay."""
        self.clock.after(self.delay_s, partial(self._submit, client, self.reign))

    def _submit(self, client: Client, reign: int) -> None:
        """Submit a client's request, with the tokens that it has seen, unless it is over."""
        if not client.left and not client.done:
            self.hear(events.RequestSubmitted(client.request, len(client.got)), reign)

    def leave(self, client: Client) -> None:
        """Disconnect a client in mid-stream."""
        client.left = True
        self.hear(events.Abandoned(client.request.id), self.reign)

    def _receive(self, output: EngineOutput) -> None:
        """Record an output of a client, and the time of a token; ignore those of a client that left.

        Raises RouterInvariantError for a wrong, repeated or late one, or a wrong end.
        """
        client = self.clients[output.request]
        if client.left:
            return
        request = client.request
        if client.done:
            raise RouterInvariantError(f"{request.id} received {output} after its end")
        index = len(client.got)
        if isinstance(output, Token):
            if output.index != index:
                raise RouterInvariantError(f"{request.id} received token {output.index} where it has {index}")
            if output.id != token(request.prompt, request.sampling.seed, index):
                raise RouterInvariantError(f"{request.id}: token {index} was changed")
            client.got.append(output.id)
            client.times_s.append(self.clock.now_s)
        elif isinstance(output, Ended):
            client.done = True
            due = token(request.prompt, request.sampling.seed, index)
            right = (
                "length" if index == request.max_tokens else "stop" if due in request.stop_tokens else "none"
            )
            if output.outcome != right:
                raise RouterInvariantError(
                    f"{request.id} ended by {output.outcome} after {index} tokens: {output.text}"
                )


# Runs.


FAULTS_END_S = 20.0
ENDED_WITHIN_S = 600.0


@dataclass(frozen=True)
class Load:
    """Load of a simulation; zeros are drawn from the seed."""

    workers: int = 0
    rate: float = 0.0
    """Requests per second, Poisson."""
    faults_per_s: float = -1.0
    arrivals_s: Sequence[float] = ()
    """Trace of arrival times, instead of Poisson."""
    trace: str = ""
    """File of ``arrivals_s``; empty without a file."""


@dataclass(frozen=True)
class TrafficOutcome:
    """Results of a simulation."""

    seed: int
    workers: int
    requests: int
    tokens: int
    events: int
    faults: dict[str, int]
    counts: dict[str, int]
    first_token_s: tuple[float, float]
    """Seconds until a client's first token: median and 99th percentile."""
    longest_gap_s: float
    """Longest time between two tokens of a text."""


def run_seed(seed: int, load: Load | None = None) -> TrafficOutcome:
    """Run the simulation of one seed; ``load`` None draws its size, and invariants are checked up to 32 workers.

    Raises RouterInvariantError, with the command that reproduces it. Any other exception becomes one too.
    """
    load = load or Load()
    world = SimulatedService(seed, checked=load.workers <= 32)
    try:
        return _run(world, load)
    except Exception as error:
        arrivals = f"--trace {shlex.quote(load.trace)}" if load.trace else f"--rate {load.rate}"
        raise RouterInvariantError(
            f"{error or type(error).__name__}, at {world.clock.now_s:.3f} s, after {world.events} events. To see it "
            f"again: phalanx simulate traffic --seeds {seed}:{seed + 1} --workers {load.workers} {arrivals} "
            f"--faults {load.faults_per_s}"
        ) from error


def _run(world: SimulatedService, load: Load) -> TrafficOutcome:
    """Build the world, inject faults for a while, end them, and return the outcome once all requests have ended.

    Values that ``load`` does not set are drawn. Raises RouterInvariantError.
    """
    draw = world.random
    count = load.workers or draw.randint(1, 6)
    roles: list[events.Role] = [draw.choice(("prefill", "decode", "both")) for _ in range(count)]
    for number, role in enumerate(roles):
        pages = draw.choice((20, 1000)) if not load.workers else 4096
        rate = draw.choice((60.0, 500.0, 10_000.0)) if not load.workers else 10_000.0
        worker = world.workers[number] = SimulatedWorker(world, number, role, rate, pages)
        worker.miscomputes = not load.workers and count >= 4 and number == 0 and draw.random() < 0.2
        world.clock.after(draw.uniform(0, 1), worker.start)
    rate = load.rate or draw.choice((0.5, 2.0))
    _schedule_arrivals(world, rate, load.arrivals_s)
    faults_per_s = (
        load.faults_per_s if load.faults_per_s >= 0 else draw.choice((0.0, 0.3, 1.5)) * (1 + count / 50)
    )
    if faults_per_s:
        world.clock.after(draw.expovariate(faults_per_s), partial(_next_fault, world, faults_per_s))
    end_s = max([FAULTS_END_S, *load.arrivals_s])
    world.clock.run_until(end_s)
    _make_peace(world)
    _finish(world)
    return _outcome(world)


def _schedule_arrivals(world: SimulatedService, rate: float, trace: Sequence[float]) -> None:
    """Plan the arrivals of clients: at the times (s) of ``trace``, or if it is empty, randomly at ``rate`` a second.

    Half of the prompts begin with a shared prefix.
    """
    draw, now_s, number = world.random, 0.0, 0
    shared = tuple(draw.randrange(50_000) for _ in range(draw.choice((64, 200))))
    times = list(trace)
    if not times:
        while (now_s := now_s + draw.expovariate(rate)) < FAULTS_END_S:
            times.append(now_s)
    for number, at_s in enumerate(times):
        own = tuple(draw.randrange(50_000) for _ in range(draw.choice((3, 40, 130, 400))))
        prompt = (shared if draw.random() < 0.5 else ()) + own
        world.clock.at(at_s, partial(world.arrive, number, prompt, draw.choice((1, 2, 10, 60))))


def _next_fault(world: SimulatedService, rate: float) -> None:
    """Inject a fault, and plan the next one until shortly before the end of faults."""
    if world.clock.now_s < FAULTS_END_S - 2:
        _strike(world)
        world.clock.after(world.random.expovariate(rate), partial(_next_fault, world, rate))


def _strike(world: SimulatedService) -> None:
    """Inject one random fault, which mostly ends by itself after a while."""
    draw = world.random
    worker = draw.choice(list(world.workers.values()))
    other = draw.choice(list(world.workers.values()))
    fault = draw.choice(
        ("kill", "kill", "stop", "cut", "break", "link", "slow", "drain", "client", "gateway", "weights")
    )
    world.faults[fault] += 1
    after = partial(world.clock.after, draw.choice((0.2, 1.0, 3.0, 12.0)))
    match fault:
        case "kill":
            worker.kill()
            after(worker.start)
        case "stop":
            worker.stopped = True
            after(partial(setattr, worker, "stopped", False))
        case "cut":  # no message reports it; only missing heartbeats show it
            worker.cut = True
            after(partial(_mend, worker))
        case "break":  # both sides notice
            world.to_router(worker, events.Left(worker.number, worker.life))
            worker.join()
        case "link":
            world.cut_links.add((worker.number, other.number))
        case "slow":
            world.slow_links.add((worker.number, other.number))
        case "drain":
            world.hear(events.DrainWorker(worker.number), world.reign)
        case "client":
            open_clients = [
                client for client in world.clients.values() if not client.done and not client.left
            ]
            if open_clients:
                world.leave(draw.choice(open_clients))
        case "gateway":
            if world.gateway_up:
                world.close_gateway()
        case _:  # it comes back with another step's weights, and later with the right ones
            worker.kill()
            worker.identity = events.WorkerIdentity("other weights", "numerics")
            worker.start()
            after(partial(_right_weights, world, worker))


def _mend(worker: SimulatedWorker) -> None:
    """Reconnect a worker that was cut off."""
    worker.cut = False
    worker.join()


def _right_weights(world: SimulatedService, worker: SimulatedWorker) -> None:
    """Restart a worker with the right weights."""
    worker.kill()
    worker.identity = world.identity
    worker.start()


def _make_peace(world: SimulatedService) -> None:
    """End all faults: links, stopped and cut workers, and wrong weights; start all workers."""
    world.cut_links.clear()
    world.slow_links.clear()
    for worker in world.workers.values():
        worker.stopped = False
        if worker.cut:
            _mend(worker)
        if worker.identity != world.identity:
            _right_weights(world, worker)
        worker.start()


def _finish(world: SimulatedService) -> None:
    """Run until all requests have ended, for at most ``ENDED_WITHIN_S`` of simulated time, and then until leases are over.

    Raises RouterInvariantError if they do not end, or the router breaks an invariant (``check``). Also raises it if workers still hold
    pages, leases or jobs, or rightly computing ones are in quarantine.
    """
    end_s = world.clock.now_s + ENDED_WITHIN_S
    while world.clock.now_s < end_s:
        world.clock.run_until(world.clock.now_s + 5.0)
        over = world.gateway_up and not world.router.entries and not world.router.jobs
        if over and all(client.done or client.left for client in world.clients.values()):
            break
    open_texts = [name for name, client in world.clients.items() if not client.done and not client.left]
    if open_texts or world.router.entries or world.router.jobs:
        raise RouterInvariantError(
            f"texts that do not end: {open_texts[:5]}; jobs {list(world.router.jobs)[:5]}"
        )
    world.clock.run_until(world.clock.now_s + 2 * world.lease_s + 5.0)
    check(world.router)
    for worker in world.workers.values():
        if worker.references or worker.leases.leased_pages() or worker.jobs:
            raise RouterInvariantError(
                f"worker {worker.number} still holds {len(worker.references)} pages for jobs {list(worker.jobs)}, {len(worker.leases.leased_pages())} under lease"
            )
    guilty = {worker.number for worker in world.workers.values() if worker.miscomputes}
    if innocent := set(world.router.pool.quarantined) - guilty:
        raise RouterInvariantError(f"workers {sorted(innocent)} compute rightly and are in quarantine")


def _outcome(world: SimulatedService) -> TrafficOutcome:
    """Return the counts, the median and P99 of the time to first token, and the longest gap between tokens, of all clients."""
    clients = world.clients.values()
    firsts = sorted(client.times_s[0] - client.came_s for client in clients if client.times_s) or [0.0]
    gaps = [b - a for client in clients for a, b in zip(client.times_s, client.times_s[1:], strict=False)]
    counts = world.counts + world.router.counts
    return TrafficOutcome(
        world.seed,
        len(world.workers),
        len(clients),
        sum(len(client.got) for client in clients),
        world.events,
        dict(world.faults),
        dict(counts),
        (statistics.median(firsts), firsts[math.ceil(0.99 * len(firsts)) - 1]),
        max(gaps, default=0.0),
    )


# Invariants of the router's state.


class RouterInvariantError(AssertionError):
    """The router's state breaks an invariant, which the message names."""


def check(state: RouterState) -> None:
    """Raise RouterInvariantError naming every broken invariant. Costs O(workers + jobs + requests)."""
    wrong = [*_requests(state), *_jobs(state), *_workers(state), *_audits(state)]
    if wrong:
        raise RouterInvariantError("; ".join(wrong))


def _requests(state: RouterState) -> Iterator[str]:
    """Yield contradictions between requests, jobs and the queue."""
    for name, entry in state.entries.items():
        job = state.jobs.get(entry.job)
        if (job is None) != (name in state.waiting):
            yield f"request {name} has job {entry.job} and {'waits' if name in state.waiting else 'does not wait'}"
        if job is not None and job.request != name:
            yield f"request {name} has job {entry.job} of request {job.request}"
        if len(entry.tokens) > entry.request.max_tokens:
            yield f"request {name} has {len(entry.tokens)} of {entry.request.max_tokens} tokens"
        if not len(entry.tokens) == len(entry.logprobs) == len(entry.makers):
            yield f"request {name}: tokens, log-probabilities and their makers are not as many"
    if stray := state.waiting.keys() - state.entries.keys():
        yield f"requests that have ended wait: {sorted(stray)}"
    if state.waiting and state.pool.open_to_work():
        yield f"{len(state.waiting)} requests wait while workers {[w.number for w in state.pool.open_to_work()]} are there"


def _jobs(state: RouterState) -> Iterator[str]:
    """Yield contradictions between jobs, their workers and their requests."""
    for number, job in state.jobs.items():
        worker = state.pool.workers.get(job.worker)
        if worker is None or number not in worker.jobs:
            yield f"job {number} is on worker {job.worker}, which does not have it"
        elif worker.late:
            yield f"job {number} is on worker {job.worker}, which is late"
        if job.request and (job.request not in state.entries or state.entries[job.request].job != number):
            yield f"job {number} is of request {job.request}, which runs elsewhere or has ended"


def _workers(state: RouterState) -> Iterator[str]:
    """Yield contradictions between workers, their jobs and the pool."""
    for number, worker in state.pool.workers.items():
        rows = sum(state.jobs[job].rows for job in worker.jobs if job in state.jobs)
        if worker.jobs - state.jobs.keys() or rows != worker.queued_rows:
            yield f"worker {number} has {worker.queued_rows} rows queued by its record, and {rows} by its jobs"
        if number in state.pool.quarantined:
            yield f"worker {number} is in quarantine and in the pool"
        if worker.identity != state.pool.identity:
            yield f"worker {number} computes other bits than the service"


def _audits(state: RouterState) -> Iterator[str]:
    """Yield audits that wait for workers without a job for them."""
    scoring = {(job.audit, job.worker) for job in state.jobs.values() if job.audit}
    for number, audit in state.audits.items():
        if not audit.scoring or {(number, worker) for worker in audit.scoring} - scoring:
            yield f"audit {number} waits for {sorted(audit.scoring)}, who are not scoring"
