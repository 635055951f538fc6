"""Simulated worker: computes rows at a rate, caches, pulls and offers pages, dies, stalls, and may compute wrong
numbers.

Each token and its log-probability are functions of the request and the position alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from phalanx.fleet.core.simulated_clock import SimulatedClock
from phalanx_serve.traffic import events, scheduler
from phalanx_serve.traffic.events import Ended, EngineOutput, Outcome, PromptScored, Token
from phalanx_serve.traffic.scheduler import Leases

# Tokens of a simulated model.


page_names = partial(scheduler.page_names, root=b"simulated")
"""Names of a text's full pages."""


def token(prompt: tuple[int, ...], seed: int, index: int) -> int:
    """Return the token at a position of the text that continues ``prompt``."""
    return _number(prompt[0], len(prompt), prompt[-1], seed, index) % 50_000


def logprob(tokens: Sequence[int], place: int) -> float:
    """Return the log-probability of a token at a position of a text."""
    return -(_number(place, tokens[0], tokens[place]) % 10_000) / 1024


def _number(*parts: int) -> int:
    """Return a 64-bit hash of the numbers."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


# The worker.


BEAT_S = 0.5


class WorkerEnvironment(Protocol):
    """Clock, network and other workers, as a simulated worker uses them."""

    clock: SimulatedClock
    identity: events.WorkerIdentity
    gateway_up: bool
    lease_s: float
    counts: Counter[str]

    @property
    def workers(self) -> Mapping[int, SimulatedWorker]: ...

    def new_life(self) -> int: ...

    def to_router(
        self, worker: SimulatedWorker, event: events.Event, *, even_if_cut: bool = False
    ) -> None: ...

    def fetch_seconds(self, to: SimulatedWorker, source: SimulatedWorker, pages: int) -> float: ...

    def fetch_failure(self, to: SimulatedWorker, source: SimulatedWorker, name: bytes) -> str: ...


@dataclass
class SimulatedJob:
    """A job on a worker."""

    order: events.ComputeJob
    text: list[int]
    rows: int = 0
    """Rows to compute before its next token."""
    ready: bool = False
    pages: list[bytes] = field(default_factory=list)
    """Pages that the job references."""
    wrong: bool = False
    """True if it has read a miscomputed page."""


class SimulatedWorker:
    """A simulated worker process and its machine."""

    def __init__(
        self, world: WorkerEnvironment, number: int, role: events.Role, rows_per_s: float, pages: int
    ) -> None:
        """Describe a worker that is down; it computes ``rows_per_s`` and has room for ``pages`` pages."""
        self.world, self.number, self.role = world, number, role
        self.rows_per_s, self.pages = rows_per_s, pages
        self.identity = world.identity
        self.miscomputes = False
        self.up = self.stopped = self.cut = False
        self.life = self.steps = self.process = 0
        self.jobs: dict[int, SimulatedJob] = {}
        self.cache: OrderedDict[bytes, tuple[int, bool]] = OrderedDict()
        """Page -> (the worker that it came from, whether it was miscomputed); the least recently used first."""
        self.references: dict[bytes, int] = {}
        self.leases = Leases(lease_s=world.lease_s)
        self.stepping = False

    # --- life

    def start(self) -> None:
        """Start a new process with empty memory. It joins, and begins to send heartbeats. Does nothing if one runs."""
        if self.up:
            return
        self.up, self.stopped, self.steps = True, False, 0
        self.process += 1
        self.cache.clear()
        self._forget_work()
        self.join()
        self._beat(self.process)

    def join(self) -> None:
        """Connect to the gateway: a new life without jobs, with the pages of the last one. Does nothing if it cannot connect."""
        if not self.up or self.cut or not self.world.gateway_up:
            return
        self._forget_work()
        self.life = self.world.new_life()
        joined = events.WorkerJoined(
            self.number, self.life, self.identity, self.role, self.pages, self.rows_per_s
        )
        self.world.to_router(self, joined)

    def kill(self) -> None:
        """End the process at once, with all its jobs; the gateway detects the closed connection unless it is cut.

        Does nothing if it is down.
        """
        if self.up:
            self.up = False
            self.process += 1
            self._forget_work()
            self.world.to_router(self, events.Left(self.number, self.life), even_if_cut=not self.cut)

    def _forget_work(self) -> None:
        """Drop all jobs, page references and leases."""
        self.jobs.clear()
        self.references.clear()
        self.leases = Leases(lease_s=self.world.lease_s)
        self.stepping = False

    def _beat(self, process: int) -> None:
        """Expire leases, evict pages and send a heartbeat; none of these while stopped, and no heartbeat while cut.

        Plans the next call in any case, until the process ends.
        """
        if process != self.process or not self.up:
            return
        if not self.stopped:
            self.leases.expire(self.world.clock.now_s)
            self._evict()
            if not self.cut:
                self.world.to_router(self, events.Beat(self.number, self.life, self.steps, tuple(self.jobs)))
        self.world.clock.after(BEAT_S, partial(self._beat, process))

    # --- orders

    def obey(self, order: events.Command, life: int) -> None:
        """Execute a command of the router for the current life; ignores commands for an earlier one.

        While the process is stopped, tries again each 0.1 s. A refused or dismissed worker drops its jobs and joins
        again 2 or 5 s later. Raises AssertionError for another command.
        """
        if not self.up or life != self.life:
            return
        if self.stopped:
            self.world.clock.after(0.1, partial(self.obey, order, life))
            return
        match order:
            case events.ComputeJob():
                job = SimulatedJob(order, list(order.request.prompt + order.request.generated))
                self.jobs[order.job] = job
                self._pull(job)
            case events.CancelJob(_, number):
                self._end(number)
            case events.Forget():
                self.cache.clear()
            case events.Refuse():
                self.life = 0
                self._forget_work()
                self.world.clock.after(2.0, self.join)
            case events.Dismiss():
                self.life = 0
                self._forget_work()
                self.world.clock.after(5.0, self.join)
            case _:
                raise AssertionError(f"a worker was sent {order}")

    def _pull(self, job: SimulatedJob) -> None:
        """Begin to fetch the missing pages of a job; it is ready at once if none is missing or it has no source."""
        order, world = job.order, self.world
        missing = [name for name in order.pages if name not in self.cache]
        if order.source == events.NOBODY or not missing:
            self._ready(job)
            return
        seconds = world.fetch_seconds(self, world.workers[order.source], len(missing))
        world.clock.after(seconds, partial(self._pulled, job, missing, self.process))

    def _pulled(self, job: SimulatedJob, missing: list[bytes], process: int) -> None:
        """Cache the pages that came, up to the first failure, end the source's lease, and make the job ready.

        Does nothing if the process or the job has ended.
        """
        if process != self.process or self.jobs.get(job.order.job) is not job:
            return
        world, source = self.world, self.world.workers[job.order.source]
        for name in missing:  # in order: pages after a missing one are useless
            failure = world.fetch_failure(self, source, name)
            if failure:
                world.counts[f"pull: {failure}"] += 1
                break
            self._keep(name, source.number, source.cache[name][1])
            world.counts["pulled"] += 1
        source.leases.end(job.order.source_job)
        self._ready(job)

    def _ready(self, job: SimulatedJob) -> None:
        """Use the cached pages of a job (none if it scores its prompt), count the remaining rows, and begin a step if none runs."""
        request, cached_pages = job.order.request, 0
        scoring = request.prompt_logprobs
        for name in () if scoring else page_names(job.text):
            if name not in self.cache:
                break
            cached_pages += 1
            self._refer(job, name)
        job.rows = max(len(job.text) - scheduler.PAGE * cached_pages, 1)
        self.world.counts["rows"] += job.rows
        job.ready = True
        if not self.stepping:
            self._begin_step()

    # --- computing

    def _begin_step(self) -> None:
        """Plan the end of a step over the rows of all ready jobs, about 512 rows; none if there are no such jobs.

        Each job gets a row at least.
        """
        ready = [job for job in self.jobs.values() if job.ready]
        self.stepping = bool(ready)
        if not ready:
            return
        rows, budget = 0, 512
        for job in ready:
            rows += min(job.rows, max(budget - rows, 1))
        self.world.clock.after(
            0.002 + rows / self.rows_per_s, partial(self._end_step, ready, budget, self.process, self.life)
        )

    def _end_step(self, ready: list[SimulatedJob], budget: int, process: int, life: int) -> None:
        """Advance the jobs by their rows, send the outputs of those whose rows are done, and begin the next step.

        Waits while stopped; does nothing for an earlier process or life.
        """
        if process != self.process or life != self.life:
            return
        if self.stopped:
            self.world.clock.after(0.1, partial(self._end_step, ready, budget, process, life))
            return
        self.steps += 1
        rows = 0
        for job in ready:
            if self.jobs.get(job.order.job) is not job:
                continue
            computed = min(job.rows, max(budget - rows, 1))
            rows += computed
            job.rows -= computed
            if not job.rows:
                self._speak(job)
                job.rows = 1
        self._begin_step()

    def _speak(self, job: SimulatedJob) -> None:
        """Cache a job's full pages, send its prompt scores and next token, and finish it at a stop token or its length."""
        order, request = job.order, job.order.request
        for name in page_names(job.text)[len(job.pages) :]:
            if name not in self.cache:
                self._keep(name, self.number, self.miscomputes or job.wrong)
            if not request.prompt_logprobs:
                self._refer(job, name)
        if request.prompt_logprobs and len(job.text) == len(request.prompt) + len(request.generated):
            numbers = (self._logprob(job, place) for place in range(1, len(request.prompt)))
            self._tell(order.job, PromptScored("", tuple(numbers)))
        index = len(job.text) - len(request.prompt)
        if index < request.max_tokens:
            job.text.append(token(request.prompt, request.sampling.seed, index))
            if job.text[-1] in request.stop_tokens:
                self._finish(job, "stop")
                return
            self._tell(order.job, Token("", index, job.text[-1], self._logprob(job, len(job.text) - 1)))
        if index + 1 >= request.max_tokens:
            self._finish(job, "length")

    def _logprob(self, job: SimulatedJob, place: int) -> float:
        """Return the log-probability of a token, slightly wrong if the worker or the job's pages are."""
        number = logprob(job.text, place)
        return number - 2.0**-20 if self.miscomputes or job.wrong else number

    def _finish(self, job: SimulatedJob, outcome: Outcome) -> None:
        """Send the end of a job and remove it; a prefill job's cached pages are put under lease first."""
        order = job.order
        if order.offer:
            names = [name for name in page_names(job.text) if name in self.cache]
            self.leases.offer(order.job, names, self.world.clock.now_s)
        self._tell(order.job, Ended("", outcome))
        self._end(order.job)

    def _tell(self, job: int, output: EngineOutput) -> None:
        """Send an output of a job to the router."""
        self.world.to_router(self, events.OutputReceived(self.number, self.life, job, output))

    # --- pages

    def _keep(self, name: bytes, source: int, wrong: bool) -> None:
        """Cache a page as the most recently used one, and evict others."""
        self.cache[name] = (source, wrong)
        self.cache.move_to_end(name)
        self._evict()

    def _refer(self, job: SimulatedJob, name: bytes) -> None:
        """Let a job use a page, and inherit its wrongness."""
        job.pages.append(name)
        job.wrong |= self.cache[name][1] if name in self.cache else False
        self.references[name] = self.references.get(name, 0) + 1

    def _end(self, number: int) -> None:
        """Remove a job and its page references, if it is known."""
        job = self.jobs.pop(number, None)
        for name in job.pages if job else ():
            self.references[name] -= 1
            if not self.references[name]:
                del self.references[name]

    def _evict(self) -> None:
        """Drop the least recently used pages beyond ``pages``, except those in use or under lease."""
        if len(self.cache) <= self.pages:
            return
        names_in_use = self.references.keys() | self.leases.leased_pages()
        for name in [name for name in self.cache if name not in names_in_use][: len(self.cache) - self.pages]:
            del self.cache[name]
