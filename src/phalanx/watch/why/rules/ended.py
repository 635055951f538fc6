"""The run has ended before its last step: with a reason, or without a word."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.fleet.core.state import FleetPhase
from phalanx.observe.throughput import format_duration
from phalanx.watch.why.observed import Observed
from phalanx.watch.why.reason import Reason
from phalanx.watch.why.thresholds import SILENT_ELSEWHERE_S, STALL_STEPS


def failed(seen: Observed) -> Iterator[Reason]:
    """A process has left word of why it failed, and training has not gone on since; or the fleet has given up."""
    if seen.finished or seen.held:
        return
    after = seen.last_t - 1.0
    left = [failure for failure in seen.failures if failure.at >= after]
    given_up = seen.fleet is not None and seen.fleet.phase is FleetPhase.FAILED
    if not left and not given_up:
        return
    first = left[0] if left else None
    evidence = [f"{failure.who}: {failure.kind}: {failure.message}" for failure in left[:3]]
    if given_up and seen.fleet is not None:
        evidence.append(f"the fleet has given up: {seen.fleet.reason}")
    if seen.first_failure:
        evidence.append(f"said first: {seen.first_failure}")
    what = first.kind if first else "the fleet has given up"
    remedy = f"{first.remedy}; then" if first and first.remedy else "mend what it names;"
    yield Reason(
        code="failed",
        severity="critical",
        title=f"The run has failed: {what}",
        where=first.who if first else "the fleet",
        since=first.at if first else seen.last_t or None,
        evidence=tuple(evidence),
        doing=f"nothing: it has ended; {_kept(seen)}",
        next=f"{remedy} phalanx train {seen.run}",
    )


def gone(seen: Observed) -> Iterator[Reason]:
    """The processes of the run are gone and have not said why; or, from another machine, nothing is heard of them."""
    if seen.over or not seen.events or any(failed(seen)):
        return
    silent_s = seen.now - seen.last_t
    if seen.held is False:
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
            doing=f"nothing: it has ended; {_kept(seen)}",
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


def _kept(seen: Observed) -> str:
    step = seen.saved_step
    return f"step {step:,} is saved, and it goes on from there" if step else "no checkpoint was saved"
