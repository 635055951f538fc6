"""The run has ended before its last step: with a reason, or without a word."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.fleet.core.state import FleetPhase
from phalanx.observe.throughput import format_duration
from phalanx.watch.why.observed import FirstFailureSeen, Observed
from phalanx.watch.why.reason import Reason
from phalanx.watch.why.thresholds import SILENT_ELSEWHERE_S, STALL_STEPS

_BURST_S = 60.0
"""From the first failure of a start until its last event: ranks that wait for a lost one log nothing more."""


def failed(seen: Observed) -> Iterator[Reason]:
    """A process has left word of why it failed, and training has not gone on since; or the fleet has given up."""
    if seen.finished or seen.held or (seen.job is not None and seen.job.is_waiting):
        return
    after = seen.last_t - 1.0
    left = [failure for failure in seen.failures if failure.at >= after]
    given_up = seen.fleet is not None and seen.fleet.phase is FleetPhase.FAILED
    logged = _logged(seen)
    if not left and not given_up and (logged is None or seen.over):
        return
    first = left[0] if left else None
    evidence = [f"{failure.who}: {failure.kind}: {failure.message}" for failure in left[:3]]
    if given_up and seen.fleet is not None:
        evidence.append(f"the fleet has given up: {seen.fleet.reason}")
    if logged is not None:
        evidence.append(f"failed first: {logged.who}: {logged.text}")
    if first:
        failure = first.kind
    elif given_up or logged is None:
        failure = "the fleet has given up"
    else:
        failure = f"{logged.who}: {logged.text}"
    remedy = (
        f"{first.remedy}; then"
        if first and first.remedy
        else f"see phalanx logs {seen.run}, and the kernel's log (dmesg) if a process was killed; then"
    )
    yield Reason(
        code="failed",
        severity="critical",
        title=f"The run has failed: {failure}",
        where=first.who if first else logged.who if logged else "the fleet",
        since=first.at if first else logged.at if logged else seen.last_t or None,
        evidence=tuple(evidence),
        doing=seen.after_end,
        next=f"{remedy} phalanx train {seen.run}",
    )


def _logged(seen: Observed) -> FirstFailureSeen | None:
    """The first failure by the logs, if the newest start has ended of it: later steps would show that it was recovered from."""
    failure = seen.first_failure
    return failure if failure is not None and failure.at >= seen.last_t - _BURST_S else None


def gone(seen: Observed) -> Iterator[Reason]:
    """The processes of the run are gone and have not said why; or, from another machine, nothing is heard of them."""
    if seen.over or (seen.job is not None and seen.job.is_waiting) or any(failed(seen)):
        return
    silent_s = max(0.0, seen.now - seen.last_t)
    if not seen.events:
        yield from _gone_at_start(seen)
    elif seen.held is False:
        yield Reason(
            code="gone",
            severity="critical",
            title="The run's processes are gone, without a word",
            where="the whole run",
            since=seen.last_t,
            evidence=(
                "no process holds the run directory (its file lock)",
                f"the newest event is {format_duration(silent_s)} old and tells no end: killed, out of memory, or the machine was switched off",
            ),
            doing=seen.after_end,
            next=f"phalanx train {seen.run} (see {seen.run}/logs and the kernel's log, dmesg, for what killed it)",
        )
    elif seen.held is None and silent_s > max(SILENT_ELSEWHERE_S, STALL_STEPS * seen.step_s):
        yield Reason(
            code="silent",
            severity="warning",
            title=f"Nothing is heard of the run for {format_duration(silent_s)}",
            where="the machine that it runs on",
            since=seen.last_t,
            evidence=(
                f"the newest event is {format_duration(silent_s)} old and tells no end",
                "it runs, or ran, on another machine: whether its processes are there cannot be told from this one",
            ),
            doing="not known",
            next=f"look on that machine (its name stands in {seen.run}/lock); if it is gone: phalanx train {seen.run}",
        )


def _gone_at_start(seen: Observed) -> Iterator[Reason]:
    """The processes of a start are gone, and it has written no event."""
    if seen.held is not False or not seen.starts or seen.job is not None:
        return
    yield Reason(
        code="gone",
        severity="critical",
        title="The run's processes are gone, and it has not begun",
        where="the whole run",
        since=None,
        evidence=(
            "no process holds the run directory (its file lock), and there is no event",
            f"the last line of its logs: {seen.last_line or 'there is none'}",
        ),
        doing=seen.after_end,
        next=f"phalanx train {seen.run} (see the kernel's log, dmesg, if a process was killed)",
    )


def never_began(seen: Observed) -> Iterator[Reason]:
    """The job of the run has ended before its first event, and no process has logged why."""
    job = seen.job
    if job is None or not job.has_ended or seen.events or seen.finished or any(failed(seen)):
        return
    yield Reason(
        code="failed",
        severity="critical",
        title=f"{job.title} has ended before the run's first event",
        where=job.title,
        since=None,
        evidence=(job.doing,),
        doing="nothing: it has ended, and nothing was trained",
        next=f"read that log, then give the same phalanx submit again (phalanx status {seen.run})",
    )


def queued(seen: Observed) -> Iterator[Reason]:
    """The run's job is held, or waits in a queue."""
    job = seen.job
    if job is None or not job.is_waiting or seen.finished:
        return
    yield Reason(
        code="job-held" if job.is_held else "job-waiting",
        severity="warning" if job.is_held else "info",
        title=f"{job.title} is held: nothing starts it" if job.is_held else f"{job.title} waits to start",
        where=job.title,
        since=None,
        evidence=(job.doing,),
        doing="nothing, until it is released" if job.is_held else "the scheduler starts it",
        next="scontrol release JOB, or ask who holds it" if job.is_held else f"phalanx status {seen.run}",
    )
