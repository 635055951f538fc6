"""The run goes on, more slowly than it could: samples come late, it has slowed down, or much of its time is no training."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from phalanx.observe.events import Step
from phalanx.observe.spread import usual_deviation
from phalanx.observe.throughput import format_duration
from phalanx.watch.why.observed import Observed
from phalanx.watch.why.reason import Reason
from phalanx.watch.why.thresholds import (
    DATA_SHARE,
    GOODPUT,
    GOODPUT_AFTER_S,
    NEW_STEPS,
    PAST_STEPS,
    RECENT_STEPS,
    SLOWER,
    SLOWER_DEVIATIONS,
)


def slow_data(seen: Observed) -> Iterator[Reason]:
    """Steps wait for their samples."""
    if not seen.running or len(seen.recent) < RECENT_STEPS // 2:
        return
    took = sum(step.logged_s for _, step in seen.recent)
    waited = sum(step.data_wait_s for _, step in seen.recent)
    if not took or waited < DATA_SHARE * took:
        return
    late = [t for t, step in seen.settled if step.data_wait_s >= DATA_SHARE * step.logged_s]
    last = seen.recent[-1][1]
    evidence = [
        f"{waited / took:.0%} of the time of steps {seen.recent[0][1].step:,} to {last.step:,} was waiting for samples: "
        f"{format_duration(waited)} of {format_duration(took)} (first rank)"
    ]
    if last.data_store:
        asked, fetched = last.data_store.get("asked_bytes", 0), last.data_store.get("fetched_bytes", 0)
        evidence.append(f"of {asked:,} bytes asked for, {fetched:,} had to be fetched from the object store")
    remedy = (
        "more data.read_ahead_mib helps against slow answers; a copy nearby against a slow store: phalanx data copy"
        if last.data_store
        else "put the dataset on a faster disk (phalanx data copy), and look at what else reads from this one"
    )
    yield Reason(
        code="slow-data",
        severity="warning",
        title=f"Training waits for its data: {waited / took:.0%} of the time",
        where="the samples of the first rank",
        since=late[0] if late else seen.recent[0][0],
        evidence=tuple(evidence),
        doing="samples are fetched ahead, as far as data.read_ahead_mib goes",
        next=remedy,
    )


def slower_than_before(seen: Observed) -> Iterator[Reason]:
    """Throughput has fallen against the run's own past, on as many ranks."""
    if not seen.running or len(seen.recent) < RECENT_STEPS:
        return
    ranks = seen.started.ranks if seen.started else 0
    sampled = [
        event.body for event in seen.past if isinstance(event.body, Step) and event.attempt == seen.attempt
    ]
    before = [*sampled[NEW_STEPS:], *(step for _, step in seen.settled[: -len(seen.recent)])]
    if len(before) < PAST_STEPS:
        return
    usual, limit = _usual_speed([step.tokens_per_s for step in before])
    now = median(step.tokens_per_s for _, step in seen.recent)
    if now >= limit:
        return
    slow = [t for t, step in seen.settled if step.tokens_per_s < limit]
    yield Reason(
        code="slower",
        severity="warning",
        title=f"Throughput is {1 - now / usual:.0%} below the run's own past",
        where="the whole run",
        since=slow[0] if slow else seen.recent[0][0],
        evidence=(
            f"{now:,.0f} tokens/s in the newest {len(seen.recent)} logged steps, {usual:,.0f} before, in the same attempt"
            + (f" on {ranks:,} ranks" if ranks else ""),
            *_grown(before, [step for _, step in seen.recent]),
        ),
        doing="nothing by itself; a fleet replaces a rank that is slower than its peers",
        next=f"phalanx goodput {seen.run} (where the time goes); phalanx ranks {seen.run} (which rank is slow)",
    )


def _usual_speed(speeds: list[float]) -> tuple[float, float]:
    """The usual throughput, and below which it has fallen: by ``SLOWER``, and by more than it has varied before.

    What varies is taken from the medians of stretches: on a machine with neighbors whole minutes are slow.
    """
    stretches = [
        median(speeds[first : first + RECENT_STEPS])
        for first in range(0, len(speeds) - RECENT_STEPS + 1, RECENT_STEPS)
    ]
    usual = median(stretches)
    deviation = usual_deviation(stretches, usual)
    return usual, usual - max(SLOWER * usual, SLOWER_DEVIATIONS * deviation)


def _grown(before: list[Step], now: list[Step]) -> tuple[str, ...]:
    """The bucket of a step that has grown most, from the ledgers at the two ends of a stretch."""

    def shares(steps: list[Step]) -> dict[str, float]:
        first, last = steps[0].ledger, steps[-1].ledger
        spent = {name: last[name] - first.get(name, 0.0) for name in last if name.startswith("step.")}
        count = max(1, steps[-1].step - steps[0].step)
        return {name: seconds / count for name, seconds in spent.items()}

    old, new = shares(before), shares(now)
    if not old or not new:
        return ()
    name = max(new, key=lambda one: new[one] - old.get(one, 0.0))
    if new[name] <= old.get(name, 0.0):
        return ()
    return (
        f"what has grown most is {name}: {old.get(name, 0.0):.3g} s a step before, {new[name]:.3g} s now",
    )


def low_goodput(seen: Observed) -> Iterator[Reason]:
    """Little of the time that the run holds its machines is training; the largest other cause is named."""
    if not seen.running or not seen.steps:
        return
    t, step = seen.steps[-1]
    held = sum(step.ledger.values())
    if held < GOODPUT_AFTER_S or step.goodput is None or step.goodput >= GOODPUT:
        return
    other = {name: seconds for name, seconds in step.ledger.items() if not name.startswith("step.")}
    cause = max(other, key=lambda name: other[name])
    yield Reason(
        code="low-goodput",
        severity="warning",
        title=f"Only {step.goodput:.0%} of the time is training",
        where=cause,
        since=t - held,
        evidence=(
            f"{step.goodput:.1%} of {format_duration(held)} in this attempt went into steps",
            f"the largest other part is {cause}: {format_duration(other[cause])}, {other[cause] / held:.1%}",
        ),
        doing="nothing",
        next=f"phalanx goodput {seen.run}",
    )
