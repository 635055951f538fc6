"""Runs simulated services: faults strike for a while, then end; every text must come, and all pages and jobs must be given back.

A world is a function of its seed: workers, roles, network, arrivals and faults are drawn from it. The method is that of FoundationDB (SIGMOD
2021, section 4): one thread, one seed, one truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from phalanx.simulate.traffic.worker import SimulatedWorker
from phalanx.simulate.traffic.world import Step, World
from phalanx.traffic import dispatch
from phalanx.traffic import events as e
from phalanx.traffic.invariants import BrokenInvariant, check

FAULTS_END_S = 20.0
ENDED_WITHIN_S = 600.0


@dataclass(frozen=True)
class Load:
    """What a world is given to do; zeros are drawn from the seed."""

    workers: int = 0
    rate: float = 0.0
    """Requests a second, Poisson."""
    faults_per_s: float = -1.0
    arrivals_s: Sequence[float] = ()
    """A trace of arrivals, instead of Poisson."""


@dataclass(frozen=True)
class TrafficOutcome:
    """How a world went."""

    seed: int
    workers: int
    requests: int
    tokens: int
    events: int
    faults: dict[str, int]
    counts: dict[str, int]
    simulated_s: float
    first_token_s: tuple[float, float]
    """Seconds until a client's first token: median and 99th percentile."""
    longest_gap_s: float
    """Between two tokens of a text."""


def run_seed(seed: int, load: Load | None = None, step: Step = dispatch.step) -> TrafficOutcome:
    """Runs the world of one seed. Raises BrokenInvariant, with the command that reproduces it."""
    load = load or Load()
    world = World(seed, step, checked=load.workers <= 32)
    try:
        return _run(world, load)
    except Exception as error:
        given = f" --workers {load.workers}" * bool(load.workers) + f" --rate {load.rate:g}" * bool(load.rate)
        raise BrokenInvariant(
            f"{error or type(error).__name__}, at {world.clock.now_s:.3f} s, after {world.events} events. To see it "
            f"again: phalanx simulate traffic --seeds {seed}:{seed + 1}{given}"
        ) from error


def _run(world: World, load: Load) -> TrafficOutcome:
    draw = world.random
    count = load.workers or draw.randint(1, 6)
    roles: list[e.Role] = [draw.choice(("prefill", "decode", "both")) for _ in range(count)]
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


def _schedule_arrivals(world: World, rate: float, trace: Sequence[float]) -> None:
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


def _next_fault(world: World, rate: float) -> None:
    if world.clock.now_s < FAULTS_END_S - 2:
        _strike(world)
        world.clock.after(world.random.expovariate(rate), partial(_next_fault, world, rate))


def _strike(world: World) -> None:
    draw = world.random
    worker = draw.choice(list(world.workers.values()))
    other = draw.choice(list(world.workers.values()))
    what = draw.choice(
        ("kill", "kill", "stop", "cut", "break", "link", "slow", "drain", "client", "gateway", "weights")
    )
    world.faults[what] += 1
    after = partial(world.clock.after, draw.choice((0.2, 1.0, 3.0, 12.0)))
    match what:
        case "kill":
            worker.kill()
            after(worker.start)
        case "stop":
            worker.stopped = True
            after(partial(setattr, worker, "stopped", False))
        case "cut":  # nobody is told; only silence shows it
            worker.cut = True
            after(partial(_mend, worker))
        case "break":  # both sides notice
            world.to_router(worker, e.Left(worker.number, worker.life))
            worker.join()
        case "link":
            world.cut_links.add((worker.number, other.number))
        case "slow":
            world.slow_links.add((worker.number, other.number))
        case "drain":
            world.hear(e.Drain(worker.number), world.reign)
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
            worker.identity = e.Identity("other weights", "numerics")
            worker.start()
            after(partial(_right_weights, world, worker))


def _mend(worker: SimulatedWorker) -> None:
    worker.cut = False
    worker.join()


def _right_weights(world: World, worker: SimulatedWorker) -> None:
    worker.kill()
    worker.identity = world.identity
    worker.start()


def _make_peace(world: World) -> None:
    world.cut_links.clear()
    world.slow_links.clear()
    for worker in world.workers.values():
        worker.stopped = False
        if worker.cut:
            _mend(worker)
        if worker.identity != world.identity:
            _right_weights(world, worker)
        worker.start()


def _finish(world: World) -> None:
    end_s = world.clock.now_s + ENDED_WITHIN_S
    while world.clock.now_s < end_s:
        world.clock.run_until(world.clock.now_s + 5.0)
        over = world.gateway_up and not world.router.entries and not world.router.jobs
        if over and all(client.done or client.left for client in world.clients.values()):
            break
    open_texts = [name for name, client in world.clients.items() if not client.done and not client.left]
    if open_texts or world.router.entries or world.router.jobs:
        raise BrokenInvariant(f"texts that do not end: {open_texts[:5]}; jobs {list(world.router.jobs)[:5]}")
    world.clock.run_until(world.clock.now_s + 2 * world.lease_s + 5.0)
    check(world.router)
    for worker in world.workers.values():
        if worker.references or worker.leases.held() or worker.jobs:
            raise BrokenInvariant(
                f"worker {worker.number} still holds {len(worker.references)} pages for jobs {list(worker.jobs)}, {len(worker.leases.held())} under lease"
            )
    guilty = {worker.number for worker in world.workers.values() if worker.miscomputes}
    if innocent := set(world.router.pool.quarantined) - guilty:
        raise BrokenInvariant(f"workers {sorted(innocent)} compute rightly and are in quarantine")


def _outcome(world: World) -> TrafficOutcome:
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
        world.clock.now_s,
        (firsts[len(firsts) // 2], firsts[int(len(firsts) * 0.99)]),
        max(gaps, default=0.0),
    )
