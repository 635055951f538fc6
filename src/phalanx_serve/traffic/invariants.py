"""Invariants of the router's state: what must hold after every event, whatever has happened."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx_serve.traffic.dispatch import Traffic


class BrokenInvariant(AssertionError):  # noqa: N818
    """The router has contradicted itself; the text says how."""


def check(state: Traffic) -> None:
    """Raises BrokenInvariant naming everything that does not hold. Costs O(workers + jobs + requests)."""
    wrong = [*_requests(state), *_jobs(state), *_workers(state), *_audits(state)]
    if wrong:
        raise BrokenInvariant("; ".join(wrong))


def _requests(state: Traffic) -> Iterator[str]:
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


def _jobs(state: Traffic) -> Iterator[str]:
    for number, job in state.jobs.items():
        worker = state.pool.workers.get(job.worker)
        if worker is None or number not in worker.jobs:
            yield f"job {number} is on worker {job.worker}, which does not have it"
        elif worker.late:
            yield f"job {number} is on worker {job.worker}, which is late"
        if job.request and (job.request not in state.entries or state.entries[job.request].job != number):
            yield f"job {number} is of request {job.request}, which runs elsewhere or has ended"


def _workers(state: Traffic) -> Iterator[str]:
    for number, worker in state.pool.workers.items():
        rows = sum(state.jobs[job].rows for job in worker.jobs if job in state.jobs)
        if worker.jobs - state.jobs.keys() or rows != worker.queued_rows:
            yield f"worker {number} has {worker.queued_rows} rows queued by its record, and {rows} by its jobs"
        if number in state.pool.quarantined:
            yield f"worker {number} is in quarantine and in the pool"
        if worker.identity != state.pool.identity:
            yield f"worker {number} computes other bits than the service"


def _audits(state: Traffic) -> Iterator[str]:
    asked = {(job.audit, job.worker) for job in state.jobs.values() if job.audit}
    for number, audit in state.audits.items():
        if not audit.asked or {(number, worker) for worker in audit.asked} - asked:
            yield f"audit {number} waits for {sorted(audit.asked)}, who are not asked"
