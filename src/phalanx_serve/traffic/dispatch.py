"""Router of a service: every decision about requests and workers, as ``(state, event, now) -> (state, commands)``.

The function has no clock, I/O or randomness, and handles every event in every state; stale ones are counted. It
combines the journal (tokens that clients have), the route (cheapest worker), the pool (live workers) and audits
(correct workers). The live gateway and the simulator drive this same function.

A request runs as a job on one worker. A prefill worker computes one token, which is sent at once, and offers its
pages; then a decode worker pulls the pages and continues. If a job's worker dies, is late, drains, miscomputes or
sends tokens out of order, the request continues under another job with the tokens that the client has. If a pull of
pages fails, the worker computes them itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from phalanx_serve.traffic import events, journal, pools, routing
from phalanx_serve.traffic.journal import (
    AuditResult,
    Entry,
    GapError,
    TextAudit,
    bits,
    chosen,
    evidence,
    judge,
)
from phalanx_serve.traffic.scheduler import PAGE

Names = Callable[[Sequence[int]], Sequence[bytes]]
"""Function that returns the chained names of a text's full pages."""


@dataclass(frozen=True)
class DispatchSettings:
    """Settings of the router's decisions."""

    link: routing.Link = field(default_factory=routing.Link)
    small_rows: int = PAGE
    audit_share: float = 0.0
    most_losses: int = 8
    """Number of consecutive lost or failed workers without a new token after which a request is canceled: it may
    be the cause.
    """


@dataclass
class RouterJob:
    """A unit of work on one worker."""

    worker: int
    rows: int
    """Rows counted in the worker's queue until the first output."""
    request: str = ""
    audit: int = 0
    prefill: bool = False
    source: int = events.NOBODY
    names: tuple[bytes, ...] = ()
    began_s: float = 0.0


@dataclass
class RouterState:
    """The router's state. ``step`` consumes it: use the returned one."""

    names: Names
    settings: DispatchSettings = DispatchSettings()
    pool: pools.Pool = field(default_factory=pools.Pool)
    entries: dict[str, Entry] = field(default_factory=dict)
    jobs: dict[int, RouterJob] = field(default_factory=dict)
    waiting: dict[str, None] = field(default_factory=dict)
    """Requests that no worker can take now, in order."""
    audits: dict[int, TextAudit] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """Number of events by kind: moved, stale, audits, differences, ..."""
    numbers: int = 0
    now_s: float = 0.0
    """Time of the present event."""
    commands: list[events.Command] = field(default_factory=list)
    """Commands of the present event so far, in order."""


def step(state: RouterState, event: events.Event, now_s: float) -> tuple[RouterState, list[events.Command]]:
    """Update ``state`` in place by ``event``. Return it, and the resulting commands in order.

    Jobs of a drained worker move if another accepts work. Waiting requests are then assigned, in order, while workers
    accept work.
    """
    state.now_s, state.commands = now_s, []
    match event:
        case events.RequestSubmitted():
            _submit(state, event)
        case events.Abandoned(request):
            _abandon(state, request)
        case events.OutputReceived():
            _hear(state, event)
        case _:
            state.pool, orders = pools.step(state.pool, event, now_s)
            _follow(state, orders)
            if isinstance(event, events.Beat):
                _reconcile(state, event)
            elif isinstance(event, events.DrainWorker):
                # Its jobs move, and it still offers its pages. If there is no other worker, it finishes them.
                worker = state.pool.workers.get(event.worker)
                if worker is not None and state.pool.open_to_work():
                    for job in sorted(worker.jobs):
                        _move(state, job, is_gone=False, loss=False)
    while state.waiting and state.pool.open_to_work():  # in order
        first = next(iter(state.waiting))
        del state.waiting[first]
        _place(state, first)
    return state, state.commands


def _submit(state: RouterState, event: events.RequestSubmitted) -> None:
    """Record a request and assign it to a worker; one that is known already is only counted."""
    request = event.request
    if request.id in state.entries:
        state.counts["repeated"] += 1
        return
    audited = chosen(request.id, state.settings.audit_share)
    state.entries[request.id] = journal.open_entry(request, event.seen, audited=audited)
    _place(state, request.id)


def _abandon(state: RouterState, request: str) -> None:
    """Cancel a request that its client has left, and its job; nothing if it is no longer open."""
    entry = state.entries.get(request)
    if entry is None:
        return
    _drop(state, entry.job)
    _close(state, entry, events.Ended(request, "cancelled"))


# --- placing ------------------------------------------------------------------------------------


def _place(state: RouterState, request_id: str, avoid: int = events.NOBODY) -> None:
    """Assign a request without a job to the cheapest worker, or queue it.

    Use ``avoid`` only if there is no other worker. Ends it if it is complete, or has failed too often.
    """
    entry = state.entries[request_id]
    entry.job = 0
    if entry.complete:  # its worker was lost between the last token and the last word
        _close(state, entry, events.Ended(request_id, "length"))
        return
    if entry.losses >= state.settings.most_losses:
        message = (
            f"{entry.losses} workers in a row were lost or failed with this request before its next token"
        )
        _close(state, entry, events.Ended(request_id, "error", message))
        return
    request = journal.remaining_request(entry)
    text = request.prompt + request.generated
    names = tuple(state.names(text))
    workers = state.pool.open_to_work()
    workers = [w for w in workers if w.number != avoid] or workers
    candidates = [
        routing.Bidder(w.number, w.role, w.queued_rows + len(w.jobs), w.holds(names), w.rows_per_s)
        for w in workers
    ]
    sources = [(w.number, w.holds(names)) for w in state.pool.workers.values() if not w.late]
    route = routing.choose(
        len(text),
        len(names),
        candidates,
        [each for each in sources if each[1]],
        state.settings.link,
        state.settings.small_rows,
    )
    if route is None:
        state.waiting[request_id] = None
        return
    _start(state, entry, request, route, names)


def _start(
    state: RouterState,
    entry: Entry,
    request: events.Request,
    route: routing.Route,
    names: tuple[bytes, ...],
    source_job: int = 0,
) -> None:
    """Record a job of a request on a worker, and command it, with the pages to pull from ``route.source``.

    A prefill job ends after one token. ``source_job`` is the prefill job whose pages are offered; 0 for none.
    """
    worker = state.pool.workers[route.worker]
    cached_pages = worker.holds(names)
    rows = max(len(request.prompt) + len(request.generated) - PAGE * cached_pages, 1)
    number = _number(state)
    state.jobs[number] = RouterJob(
        worker.number, rows, entry.request.id, 0, route.prefill, route.source, names, state.now_s
    )
    worker.jobs.add(number)
    worker.queued_rows += rows
    entry.job = number
    if route.prefill:
        request = structs.replace(request, max_tokens=len(request.generated) + 1)
    pull = names[cached_pages:] if route.source != events.NOBODY else ()
    if pull:
        entry.pages_from.add(route.source)
    state.commands.append(
        events.ComputeJob(worker.number, number, request, route.source, source_job, pull, route.prefill)
    )


def _number(state: RouterState) -> int:
    """Return the next number of a job or an audit."""
    state.numbers += 1
    return state.numbers


def _drop(state: RouterState, number: int, *, is_gone: bool = False) -> RouterJob | None:
    """Remove a job, and cancel it on its worker unless that is gone. Returns it; ``None`` if there is no such job.

    The entry of its request keeps the job's number.
    """
    job = state.jobs.pop(number, None)
    if job is None:
        return None
    worker = state.pool.workers.get(job.worker)
    if worker is not None and number in worker.jobs:
        worker.jobs.discard(number)
        worker.queued_rows -= job.rows
    if worker is not None and not is_gone:
        state.commands.append(events.CancelJob(job.worker, number))
    return job


def _close(state: RouterState, entry: Entry, output: events.Ended) -> None:
    """Remove a request, command the delivery of its end, and count it by outcome."""
    del state.entries[entry.request.id]
    state.waiting.pop(entry.request.id, None)
    state.commands.append(events.DeliverOutput(journal.ended(entry, output)))
    state.counts[output.outcome] += 1


def _move(state: RouterState, number: int, *, is_gone: bool, loss: bool) -> None:
    """Continue a job's request or audit, preferably on another worker. Does nothing for an unknown job.

    ``is_gone`` saves the cancellation. ``loss`` counts against the request.
    """
    job = _drop(state, number, is_gone=is_gone)
    if job is None:
        return
    if job.audit:
        audit = state.audits[job.audit]
        audit.scoring.discard(job.worker)
        _go_on(state, job.audit)
        return
    entry = state.entries[job.request]
    entry.losses += loss
    entry.moves += 1
    state.counts["moved"] += 1
    _place(state, job.request, avoid=job.worker)


# --- worker events --------------------------------------------------------------------------------


def _follow(state: RouterState, orders: list[events.PoolCommand]) -> None:
    """Carry out the pool's commands: jobs of lost and late workers move, all else is passed on.

    Only lost workers count against requests.
    """
    for order in orders:
        if isinstance(order, events.Lost):
            state.counts["lost" if order.is_gone else "late"] += 1
            for number in order.jobs:
                _move(state, number, is_gone=order.is_gone, loss=order.is_gone)
        else:
            state.commands.append(order)


def _reconcile(state: RouterState, beat: events.Beat) -> None:
    """Compare the jobs in a worker's heartbeat with the expected ones; ignores an earlier life.

    Jobs that the worker should not have are canceled. A job that it lacks after twice ``late_s`` is lost, and moves.
    """
    worker = state.pool.current(beat.worker, beat.life)
    if worker is None:
        return
    for number in sorted(set(beat.jobs) - worker.jobs):
        state.commands.append(events.CancelJob(worker.number, number))
    patience_s = 2 * state.pool.settings.late_s
    for number in sorted(worker.jobs - set(beat.jobs)):
        if state.now_s - state.jobs[number].began_s > patience_s:
            _move(state, number, is_gone=False, loss=True)


def _hear(state: RouterState, event: events.OutputReceived) -> None:
    """Record an output of a job and deliver it; one of an earlier life or job is only counted as stale.

    It also ends the job's claim on queued rows. A gap in the tokens moves the request.
    """
    worker = state.pool.current(event.worker, event.life)
    job = state.jobs.get(event.job)
    if worker is None or job is None or job.worker != event.worker:
        state.counts["stale"] += 1
        return
    worker.queued_rows -= job.rows
    job.rows = 0
    if job.audit:
        _hear_score(state, event, job)
        return
    worker.hint(job.names)
    entry = state.entries[job.request]
    if isinstance(event.output, events.Ended):
        _end_job(state, event.job, event.output, entry)
        return
    try:
        state.commands += [
            events.DeliverOutput(output) for output in journal.take(entry, event.output, event.worker)
        ]
    except GapError:
        state.counts["gaps"] += 1
        _move(state, event.job, is_gone=False, loss=True)


def _end_job(state: RouterState, number: int, output: events.Ended, entry: Entry) -> None:
    """Close a request whose job has ended, or continue it on a decode worker after prefill. May begin an audit.

    A job that the worker canceled or that ended too early moves to another worker. A job that failed moves too,
    unless it is the second failure or loss since the request's last token: then the request ends with the error.
    """
    if output.outcome == "cancelled" or (
        output.outcome == "length" and not entry.complete and not state.jobs[number].prefill
    ):
        # It was not canceled here, so it continues elsewhere.
        _move(state, number, is_gone=True, loss=True)
        return
    if output.outcome == "error":
        state.counts["failed"] += 1
        entry.losses += 1
        if entry.losses < min(2, state.settings.most_losses):
            _move(state, number, is_gone=True, loss=False)
            return
    job = _drop(state, number, is_gone=True)
    assert job is not None
    if output.outcome == "length" and not entry.complete:
        entry.cached = output.cached_tokens if entry.moves == 0 else entry.cached
        _go_to_decode(state, entry, job, number)
        return
    audit = entry.audited and output.outcome in ("stop", "length") and bool(entry.tokens)
    _close(state, entry, output)
    if audit:
        _begin_audit(state, entry)


def _go_to_decode(state: RouterState, entry: Entry, prefill: RouterJob, number: int) -> None:
    """Continue a request after its first token: the prefill worker offers the pages, and the cheapest decode worker
    pulls them.

    Without workers that decode, it is assigned or queued as a new one, perhaps to the same worker.
    """
    workers = [w for w in state.pool.open_to_work() if w.role != "prefill"]
    if not workers:
        _place(state, entry.request.id)
        return
    names, link = prefill.names, state.settings.link
    best = min(
        workers,
        key=lambda w: (
            (w.queued_rows + len(w.jobs)) / w.rows_per_s + link.seconds(len(names) - w.holds(names)),
            w.number,
        ),
    )
    route = routing.Route(best.number, False, prefill.worker, 0.0)
    _start(state, entry, journal.remaining_request(entry), route, names, source_job=number)


# --- audits ---------------------------------------------------------------------------------------


def _begin_audit(state: RouterState, entry: Entry) -> None:
    """Let the least busy worker that had no part in a text score it; skipped, and counted, if there is none."""
    makers = frozenset(entry.makers) | entry.pages_from
    others = [w for w in state.pool.open_to_work() if w.number not in makers]
    if not others:
        state.counts["audits_skipped"] += 1
        return
    state.counts["audits"] += 1
    number = _number(state)
    tokens = entry.request.prompt + tuple(entry.tokens)
    state.audits[number] = TextAudit(tokens, len(entry.tokens), bits(entry.logprobs), makers)
    least = min(others, key=lambda worker: (worker.queued_rows, worker.number))
    _ask(state, number, least.number)


def _ask(state: RouterState, number: int, worker_number: int) -> None:
    """Command a worker to score an audit's text, and record the job."""
    audit, worker, job = state.audits[number], state.pool.workers[worker_number], _number(state)
    audit.scoring.add(worker_number)
    state.jobs[job] = RouterJob(worker_number, len(audit.tokens), "", number, began_s=state.now_s)
    worker.jobs.add(job)
    worker.queued_rows += len(audit.tokens)
    request = events.Request(f"audit-{number}", audit.tokens, 1, prompt_logprobs=True, top_logprobs=0)
    state.commands.append(events.ComputeJob(worker_number, job, request))


def _hear_score(state: RouterState, event: events.OutputReceived, job: RouterJob) -> None:
    """Record a worker's score of an audit, cancel its job, and advance the audit.

    A job that ends without a score is left out; the token behind a score is ignored.
    """
    audit = state.audits[job.audit]
    if isinstance(event.output, events.PromptScored):
        audit.scores[job.worker] = bits(event.output.logprobs[len(event.output.logprobs) - audit.text :])
        _drop(state, event.job)
    elif isinstance(event.output, events.Token):
        return
    else:
        _drop(state, event.job, is_gone=True)
    audit.scoring.discard(job.worker)
    _go_on(state, job.audit)


def _go_on(state: RouterState, number: int) -> None:
    """Advance an audit as far as its scores allow: request more scores, or count its result and quarantine workers
    found wrong.

    Without any score and worker left, it is skipped.
    """
    audit = state.audits[number]
    others = frozenset(worker.number for worker in state.pool.open_to_work())
    if not audit.scoring and not audit.scores:
        fresh = sorted(others - audit.makers)
        if fresh:
            _ask(state, number, fresh[0])
        else:
            del state.audits[number]
            state.counts["audits_skipped"] += 1
        return
    verdict = judge(audit, others)
    if not isinstance(verdict, AuditResult):
        for worker in sorted(verdict):
            _ask(state, number, worker)
        return
    del state.audits[number]
    state.counts["differences"] += verdict.difference
    state.counts["undecided"] += verdict.undecided
    state.counts["unexplained"] += verdict.unexplained
    for worker in sorted(verdict.wrong):
        _condemn(state, worker, evidence(audit, worker, verdict.right))


def _condemn(state: RouterState, number: int, reason: str) -> None:
    """Quarantine a worker that miscomputes, and discard everything that may come from it.

    Other workers fetched its pages and computed pages from them, which their names do not show. So all workers drop all
    pages, and all requests start again from their journal: one prefill each, once per broken machine. Does nothing if
    it is quarantined already.
    """
    if number in state.pool.quarantined:
        return
    state.counts["quarantined"] += 1
    orders = pools.quarantine(state.pool, number, reason)
    running = [job for job, each in sorted(state.jobs.items()) if not each.audit and each.worker != number]
    requests = [job.request for job in (_drop(state, each) for each in running) if job is not None]
    for other, worker in sorted(state.pool.workers.items()):
        worker.hints.clear()
        state.commands.append(events.Forget(other))
    _follow(state, orders)
    for request in requests:
        state.counts["moved"] += 1
        _place(state, request)
