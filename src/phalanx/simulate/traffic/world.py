"""A simulated service: gateway, workers, clients and the network between them, all of which fail.

Connections keep the order of what they carry, and lose it all when they are cut. The oracle is the client: it knows every token of its text
from the request alone, so one that is lost, doubled, out of place or changed is noticed as it arrives.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from phalanx.simulate.clock import SimulatedClock
from phalanx.simulate.traffic.text import page_names, token
from phalanx.simulate.traffic.worker import SimulatedWorker
from phalanx.traffic import dispatch
from phalanx.traffic import events as e
from phalanx.traffic.invariants import BrokenInvariant, check
from phalanx.traffic.pools import Link, Pool, PoolSettings
from phalanx.traffic.requests import Ended, EngineOutput, Request, Sampling, Token

Step = Callable[[dispatch.Traffic, e.Event, float], tuple[dispatch.Traffic, list[e.Command]]]
"""The type of ``dispatch.step``; tests also run variants of it that are broken on purpose."""
TICK_S = 0.25


@dataclass
class Client:
    """Someone who asks for one text."""

    request: Request
    came_s: float
    got: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    done: bool = False
    left: bool = False


class World:
    """Everything around one router."""

    def __init__(self, seed: int, step: Step = dispatch.step, *, checked: bool = True) -> None:
        self.seed, self.random, self.clock = seed, random.Random(seed), SimulatedClock()
        self.step_core, self.checked = step, checked
        self.identity = e.Identity("weights", "numerics")
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
        """Starts a gateway that knows nothing; workers connect to it, and clients send their requests again."""
        self.reign += 1
        self.gateway_up = True
        settings = dispatch.Settings(
            Link(1 << 20, 1e9, 2 * self.delay_s), audit_share=self.audit_share, most_losses=50
        )
        pool = Pool(PoolSettings(late_s=2.0, dead_s=8.0, patience_s=2.0, rest_s=5.0), self.identity)
        self.router = dispatch.Traffic(page_names, settings, pool)
        for worker in self.workers.values():
            self.clock.after(self.random.uniform(0, 0.5), worker.join)
        for client in self.clients.values():
            if not client.done and not client.left:
                self._send(client)
        self._tick(self.reign)

    def close_gateway(self) -> None:
        """The gateway dies, with all that it knew."""
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
        if reign == self.reign:
            self.hear(e.Tick(), reign)
            self.clock.after(TICK_S, partial(self._tick, reign))

    def hear(self, event: e.Event, reign: int) -> None:
        """Lets the router answer an event, and sends its commands."""
        if reign != self.reign or not self.gateway_up:
            return
        self.events += 1
        self.router, commands = self.step_core(self.router, event, self.clock.now_s)
        if self.checked:
            check(self.router)
        for command in commands:
            if isinstance(command, e.Tell):
                self._receive(command.output)
            else:
                worker = self.workers[command.worker]
                life = command.life if isinstance(command, e.Refuse) else worker.life
                if not worker.cut:
                    self._in_order(-worker.number - 1, partial(worker.obey, command, life))

    def new_life(self) -> int:
        """The number of a new connection."""
        self.lives += 1
        return self.lives

    # --- the network

    def to_router(self, worker: SimulatedWorker, event: e.Event, *, even_if_cut: bool = False) -> None:
        """Sends what a worker says over its connection."""
        if self.gateway_up and worker.life and (even_if_cut or not worker.cut):
            self._in_order(worker.number, partial(self.hear, event, self.reign))

    def _in_order(self, way: int, action: Callable[[], None]) -> None:
        due_s = self.clock.now_s + self.random.uniform(0.5, 2) * self.delay_s
        self._arrivals[way] = max(self._arrivals.get(way, 0.0), due_s)
        self.clock.at(self._arrivals[way], action)

    def fetch_seconds(self, to: SimulatedWorker, source: SimulatedWorker, pages: int) -> float:
        """How long a pull of pages takes, or until it is given up."""
        if not source.up or source.stopped or (to.number, source.number) in self.cut_links:
            return 1.0
        slow = 50.0 if (to.number, source.number) in self.slow_links else 1.0
        return min(2 * self.delay_s + slow * pages * 1e-3, 2.0)

    def fetch_failure(self, to: SimulatedWorker, source: SimulatedWorker, name: bytes) -> str:
        """Why a page does not come; empty if it does."""
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
        """A client comes with a request."""
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
        self.clock.after(self.delay_s, partial(self._submit, client, self.reign))

    def _submit(self, client: Client, reign: int) -> None:
        if not client.left and not client.done:
            self.hear(e.Submitted(client.request, len(client.got)), reign)

    def leave(self, client: Client) -> None:
        """A client goes away in mid-stream."""
        client.left = True
        self.hear(e.Abandoned(client.request.id), self.reign)

    def _receive(self, output: EngineOutput) -> None:
        client = self.clients[output.request]
        if client.left:
            return
        request = client.request
        if client.done:
            raise BrokenInvariant(f"{request.id} was told {output} after its end")
        index = len(client.got)
        if isinstance(output, Token):
            if output.index != index:
                raise BrokenInvariant(f"{request.id} was told token {output.index} where it has {index}")
            if output.id != token(request.prompt, request.sampling.seed, index):
                raise BrokenInvariant(f"{request.id}: token {index} was changed")
            client.got.append(output.id)
            client.times_s.append(self.clock.now_s)
        elif isinstance(output, Ended):
            client.done = True
            due = token(request.prompt, request.sampling.seed, index)
            right = (
                "length" if index == request.max_tokens else "stop" if due in request.stop_tokens else "none"
            )
            if output.outcome != right:
                raise BrokenInvariant(
                    f"{request.id} ended by {output.outcome} after {index} tokens: {output.text}"
                )
