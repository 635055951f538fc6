"""Rules on speed: a run that makes steps, but more slowly than it could.

Its samples come late, steps take longer than before, much of its time is not training, or a machine is throttled or
has too few cores for its threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import numpy as np
from numpy.typing import NDArray

from phalanx.observe import events as run_events
from phalanx.observe.throughput import format_duration, usual_deviation
from phalanx_watch.why import observed as o

_MOST_REASONS = 8
"""Causes of throttling that are listed."""
_START = "start."
_HOST_GAP = "step.host_gap"
"""It is within steps, and nothing computes."""
_GOODPUT_REMEDIES = {
    "eval": "; evaluate less often (evaluation.every_steps), or fewer sequences (evaluation.sequences)",
    "ckpt.blocking": "; save less often (checkpoint.every_steps), or to a faster disk",
    _HOST_GAP: "; phalanx logs of that time: a process that was stopped, a disk or a hook that waited",
}


def slow_data(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the newest steps of a live run, or all steps of an ended one, wait for samples for at least ``DATA_SHARE`` of their time.

    None with fewer than half of ``RECENT_STEPS``.
    """
    steps = observed.recent if observed.running else observed.settled
    if len(steps) < o.RECENT_STEPS // 2:
        return
    took = sum(step.logged_s for _, step in steps)
    waited = sum(step.data_wait_s for _, step in steps)
    span_s = steps[-1][0] - steps[0][0]
    if span_s < o.RECENT_LEAST_S or not took or waited < o.DATA_SHARE * took:
        return
    late = [t for t, step in observed.settled if step.data_wait_s >= o.DATA_SHARE * step.logged_s]
    last = steps[-1][1]
    evidence = [
        f"{waited / took:.0%} of the time of steps {steps[0][1].step:,} to {last.step:,} was waiting for samples: "
        f"{format_duration(waited)} of {format_duration(took)} (first rank)"
    ]
    if last.data_store:
        requested, fetched = last.data_store.get("asked_bytes", 0), last.data_store.get("fetched_bytes", 0)
        evidence.append(
            f"of {requested:,} requested bytes, {fetched:,} had to be fetched from the object store"
        )
    remedy = (
        "more data.read_ahead_mib helps against slow answers; a copy nearby against a slow store: phalanx data copy"
        if last.data_store
        else "put the dataset on a faster disk (phalanx data copy), and look at what else reads from this one"
    )
    yield o.Reason(
        code="slow-data",
        title=f"Training {'waits' if observed.running else 'waited'} for its data: {waited / took:.0%} of the time",
        where="the samples of the first rank",
        since=late[0] if late else steps[0][0],
        evidence=tuple(evidence),
        doing=observed.doing("samples are fetched ahead, as far as data.read_ahead_mib goes"),
        next=remedy,
    )


def slower_than_before(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if throughput has fallen against the run's own past, in the same attempt and with the same
    ranks: since a step from which on it has stayed low, or in the newest steps.

    The newest steps alone need ``PAST_STEPS`` before them.
    """
    if len(observed.recent) < o.RECENT_STEPS:
        return
    ranks = observed.started.ranks if observed.started else 0
    past = [event for event in observed.past if event.attempt == observed.attempt]
    sampled = o.of_kind(run_events.Step, past)
    steps = [*sampled[o.NEW_STEPS :], *observed.settled]
    speeds = np.array([step.tokens_per_s for _, step in steps])
    newest = len(observed.recent)
    now = median(speeds[-newest:].tolist())
    if first := _lasting_fall(speeds, newest):
        usual = float(np.median(speeds[:first]))
        limit, since = (1 - o.SLOWER) * usual, steps[first][0]
    else:
        first = len(steps) - newest
        if first < o.PAST_STEPS:
            return
        usual, limit = _usual_speed(speeds[:first].tolist())
        since = next((t for t, step in observed.settled if step.tokens_per_s < limit), observed.recent[0][0])
    if now >= limit:
        return
    yield o.Reason(
        code="slower",
        title=f"Throughput is {1 - now / usual:.0%} below the run's own past, since step {steps[first][1].step:,}",
        where="the whole run",
        since=since,
        evidence=(
            f"{now:,.0f} tokens/s in the newest {newest} logged steps, {usual:,.0f} before step {steps[first][1].step:,}, in the same attempt"
            + (f" on {ranks:,} ranks" if ranks else ""),
            *_grown([step for _, step in steps[:first]], [step for _, step in steps[first:]]),
            *_crowded(observed),
        ),
        doing=observed.doing("nothing by itself; a fleet replaces a rank that is slower than its peers"),
        next=f"phalanx goodput {observed.run} (where the time goes); phalanx ranks {observed.run} (which rank is slow)",
    )


def _crowded(observed: o.Observed) -> tuple[str, ...]:
    """Return a sentence on other processes that use this machine, if their threads want every core; else empty."""
    load, threads = observed.load, observed.spec.runtime.threads if observed.spec else 1
    own = threads * sum(process.rank is not None for process in observed.processes)
    if load is None or load.runnable - own < load.cores:
        return ()
    return (
        f"{load.runnable:.3g} threads want the {load.cores} cores of this machine (its load), and its ranks have {own}: other processes use it",
    )


def _lasting_fall(speeds: NDArray[np.float64], newest: int) -> int:
    """Return the index of the step from which on throughput is lower than before, though it varies; 0 if there is none.

    The step is that of the largest cumulative sum of ranks (a change-point test as Pettitt's, Applied Statistics 28, 1979, weighted by the
    sizes of both parts). Of ``PAST_STEPS`` on both sides three quarters must be lower than three quarters before; after fewer, a fall to half
    is enough. A fall to half that has no such step, because each step is slower than the one before, begins with the attempt.
    """
    count = len(speeds)
    if count < o.FEW_STEPS + newest:
        return 0
    order = np.argsort(np.argsort(speeds)) - (count - 1) / 2
    # Spearman's correlation with time: that of the ranks
    trend = np.corrcoef(order, np.arange(count))[0, 1]
    if trend < -o.STEADY_FALL and 2 * np.median(speeds[-newest:]) < np.median(speeds[:newest]):
        return newest
    ends = np.arange(o.FEW_STEPS, count - newest + 1)
    first = int(ends[np.argmax(np.cumsum(order)[ends - 1] / np.sqrt(ends * (count - ends)))])
    before, after = speeds[:first], speeds[first:]
    halved = 2 * np.quantile(after, 0.9) < np.quantile(before, 0.1, method="lower")
    lower = np.quantile(after, 0.75) < np.quantile(before, 0.25)
    return first if halved or (lower and min(len(before), len(after)) >= o.PAST_STEPS) else 0


def _usual_speed(speeds: list[float]) -> tuple[float, float]:
    """Return the usual throughput, and the limit below which it has fallen: by ``SLOWER``, and by more than it varied
    before.

    The variation is that of the medians of stretches: on a shared machine full minutes are slow.
    """
    stretches = [
        median(speeds[first : first + o.RECENT_STEPS])
        for first in range(0, len(speeds) - o.RECENT_STEPS + 1, o.RECENT_STEPS)
    ]
    usual = median(stretches)
    deviation = usual_deviation(stretches, usual)
    return usual, usual - max(o.SLOWER * usual, o.SLOWER_DEVIATIONS * deviation)


def _grown(before: list[run_events.Step], now: list[run_events.Step]) -> tuple[str, ...]:
    """Return a sentence on the bucket of a step that has grown most, from the ledgers at the two ends of a stretch; empty if none has."""

    def shares(steps: list[run_events.Step]) -> dict[str, float]:
        """Return the seconds per step of each part of a step between the first and the last of ``steps``."""
        first, last = steps[0].ledger, steps[-1].ledger
        spent = {name: last[name] - first.get(name, 0.0) for name in last if name.startswith("step.")}
        count = max(1, steps[-1].step - steps[0].step)
        return {name: seconds / count for name, seconds in spent.items()}

    old, new = shares(before), shares(now)
    if not old or not new:
        return ()
    name = max(new, key=lambda bucket: new[bucket] - old.get(bucket, 0.0))
    if new[name] <= old.get(name, 0.0):
        return ()
    return (
        f"what has grown most is {name}: {old.get(name, 0.0):.3g} s a step before, {new[name]:.3g} s now",
    )


def low_goodput(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if too little of the attempt's time is training: less than ``GOODPUT`` after ``GOODPUT_AFTER_S``, or sooner less than
    ``GOODPUT_SOON`` of the time since its start.

    Steps that wait for their samples are another rule's. The evidence has the largest other cause.
    """
    if not observed.steps:
        return
    t, step = observed.steps[-1]
    starting_s = sum(seconds for name, seconds in step.ledger.items() if name.startswith(_START))
    total_s = sum(step.ledger.values())
    is_long = total_s >= o.GOODPUT_AFTER_S
    counted_s = total_s if is_long else total_s - starting_s
    other = {
        name: seconds
        for name, seconds in step.ledger.items()
        if (not name.startswith("step.") or name == _HOST_GAP) and (is_long or not name.startswith(_START))
    }
    share = 1 - sum(other.values()) / max(counted_s, 1e-9)
    if counted_s < o.GOODPUT_SOON_S or share >= (o.GOODPUT if is_long else o.GOODPUT_SOON):
        return
    cause = max(other, key=lambda name: other[name])
    yield o.Reason(
        code="low-goodput",
        title=f"Only {share:.0%} of the time {'is' if observed.running else 'was'} training",
        where=cause,
        since=t - total_s,
        evidence=(
            f"{share:.1%} of {format_duration(counted_s)} in this attempt went into steps"
            + ("" if is_long else ", its start not counted"),
            f"the largest other part is {cause}: {format_duration(other[cause])}, {other[cause] / counted_s:.1%}",
        ),
        doing=observed.doing("nothing"),
        next=f"phalanx goodput {observed.run}" + _GOODPUT_REMEDIES.get(cause, ""),
    )


def throttled(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason for each node whose processors are throttled by heat or power, until the run is finished."""
    if observed.finished:
        return
    in_fleet = observed.fleet is not None
    for node in observed.throttled:
        slow = [rank for rank in observed.slow_ranks if rank.node == node.node]
        yield o.Reason(
            code="throttled",
            title=f"Node {node.node} is slowed down: {node.reasons[0]}",
            where=f"node {node.node}",
            since=node.since_s,
            evidence=(
                *node.reasons[:_MOST_REASONS],
                f"seen in {node.looks} look{'s' * (node.looks != 1)} since then",
                *(
                    f"its rank {rank.rank} computes {rank.slowdown:.0%} longer than its peers, which waited {rank.late_share:.0%} of their time for it"
                    for rank in slow
                ),
            ),
            doing="training continues; all ranks wait for the slowest"
            + ("; if it becomes a straggler, a spare takes its place" if in_fleet else ""),
            next=f"look at its cooling, power and CPU limit, as named; to do without it: phalanx fleet drain {observed.run} {node.node}"
            if in_fleet
            else "look at the cooling, power and CPU limit of that machine, as named",
        )


def few_cores(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the ranks on this machine's processors are bound to fewer cores than they have threads, while other cores are free
    to none of them. Nothing unless the run is running."""
    ranks = [process for process in observed.processes if process.rank is not None and process.cores]
    on_cpus = observed.started is not None and observed.started.device == "cpu"
    if not ranks or not observed.running or not on_cpus or observed.load is None or observed.spec is None:
        return
    shared = frozenset[int]().union(*(process.cores for process in ranks))
    threads = observed.spec.runtime.threads * len(ranks)
    if len(shared) >= min(threads, observed.load.cores):
        return
    names = ", ".join(
        f"{rank}" for rank in sorted({process.rank for process in ranks if process.rank is not None})[:8]
    )
    yield o.Reason(
        code="too-many-threads",
        title=f"{threads} threads of {len(ranks)} rank{'s' * (len(ranks) > 1)} are bound to {len(shared)} of the {observed.load.cores} cores",
        where=f"rank{'s' * (len(ranks) > 1)} {names}",
        since=None,
        evidence=(
            f"they may run on core{'s' * (len(shared) > 1)} {', '.join(map(str, sorted(shared)[:32]))} alone (affinity), and the machine has "
            f"{observed.load.cores}",
        ),
        doing="training continues, and the ranks take turns on these cores",
        next=f"taskset -acp 0-{observed.load.cores - 1} PID for each of {', '.join(str(process.pid) for process in ranks[:8])}; or look at how they were "
        "started (taskset, srun --cpu-bind, a container's cpuset)",
    )


def too_many_threads(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the newest start has warned that its ranks have more threads than cores."""
    own_events = (event for event in observed.all_events if event.attempt == observed.attempt)
    for t, message in o.of_kind(run_events.Message, own_events):
        if message.incident is run_events.IncidentKind.THREADS:
            yield o.Reason(
                code="too-many-threads",
                title="The ranks have more threads than their machine has cores for",
                where="runtime.threads",
                since=t,
                evidence=(message.text,),
                doing=observed.doing("training continues, several times slower"),
                next="start fewer ranks on that machine, or a run of its own with fewer threads: phalanx train RUN_FILE --set runtime.threads=...",
            )
            return


def uneven_slots(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if some data-parallel ranks compute a slot more than others, and at least ``UNEVEN`` of the time of all of them is
    waiting."""
    if observed.spec is None or observed.started is None:
        return
    slots, parallel = observed.spec.train.slots, observed.spec.parallel
    # Zero if the start had fewer ranks than a replica of the run file has, as after a change of the file.
    data_ranks = observed.started.ranks // (parallel.pipeline * parallel.context * parallel.tensor)
    if not data_ranks:
        return
    most = -(-slots // data_ranks)
    share = 1 - slots / (most * data_ranks)
    if share < o.UNEVEN:
        return
    yield o.Reason(
        code="uneven-slots",
        # A fleet that shrinks trains on with what it has.
        severity="warning" if observed.fleet is None else "info",
        title=f"{slots} slots on {data_ranks} data-parallel ranks: {share:.0%} of their time {'is' if observed.running else 'was'} waiting",
        where="train.slots",
        since=None,
        evidence=(
            f"some ranks compute {most} slot{'s' * (most > 1)} in each step, the others {most - 1}, and wait for them",
        ),
        doing=observed.doing("training continues"),
        next=f"train on a number of data-parallel ranks that divides {slots} (the weights stay the same), or give the next run a multiple "
        f"of {data_ranks} slots",
    )
