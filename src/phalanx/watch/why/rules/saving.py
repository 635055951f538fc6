"""Checkpoints: they fail, they are too old, or the disk that they go to is nearly full."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from phalanx.observe.events import CheckpointFailed, CheckpointSaved
from phalanx.observe.throughput import format_duration
from phalanx.watch.why.observed import Observed
from phalanx.watch.why.reason import Reason
from phalanx.watch.why.thresholds import (
    CHECKPOINT_INTERVALS,
    CHECKPOINT_LEAST_S,
    DISK_CHECKPOINTS,
    DISK_NEXT,
    DISK_SHARE,
)

_URL = "://"


def failed_checkpoints(seen: Observed) -> Iterator[Reason]:
    """The newest checkpoints could not be written."""
    if seen.finished:
        return
    saved = seen.newest(CheckpointSaved)
    good = saved[0] if saved else 0.0
    failures = [
        (event.t, event.body)
        for event in seen.events
        if isinstance(event.body, CheckpointFailed) and event.t > good
    ]
    if not failures:
        return
    (since, _), (_, last) = failures[0], failures[-1]
    store = _URL in last.path
    yield Reason(
        code="checkpoint-failed",
        severity="critical" if not store and (len(failures) > 1 or not seen.saved_step) else "warning",
        title=f"{'Copies of checkpoints' if store else 'Checkpoints'} fail: {len(failures)} since the last good one",
        where=last.path,
        since=since,
        evidence=(
            f"step {last.step:,}: {last.reason}",
            f"the newest good checkpoint is step {seen.saved_step:,}"
            if seen.saved_step
            else "there is no good checkpoint",
        ),
        doing=seen.doing(
            "training goes on, and the next checkpoint is tried when it is due; older ones are kept"
        ),
        next=f"make room or mend {last.path} (df -h; phalanx checkpoint list {seen.run})",
    )


def old_checkpoint(seen: Observed) -> Iterator[Reason]:
    """A crash now would cost more than the run's own interval says."""
    if not seen.running or not seen.steps or seen.spec is None:
        return
    every_s = _interval_s(seen)
    saved_at = max([t for _, t in seen.checkpoints] + [seen.steps[0][0]])
    age_s = seen.now - saved_at
    if every_s is None or age_s <= max(CHECKPOINT_LEAST_S, CHECKPOINT_INTERVALS * every_s):
        return
    step = seen.steps[-1][1].step
    every = seen.spec.checkpoint.every_steps
    if every and step - max(seen.saved_step, seen.steps[0][1].step - 1) <= CHECKPOINT_INTERVALS * every:
        return
    yield Reason(
        code="checkpoint-old",
        severity="warning",
        title=f"The newest checkpoint is {format_duration(age_s)} old",
        where=f"{seen.run}/checkpoints",
        since=saved_at + every_s,
        evidence=(
            f"training is at step {step:,}, the newest checkpoint is step {seen.saved_step:,}",
            f"one is due every {format_duration(every_s)}"
            + (f" (checkpoint.every_steps = {every})" if every else ""),
        ),
        doing="training goes on; a crash now would cost the steps since",
        next=f"phalanx checkpoint list {seen.run}; is one being written for long, or did the disk get slow?",
    )


def _interval_s(seen: Observed) -> float | None:
    """Seconds between two checkpoints as they should be; ``None`` if that is not known."""
    assert seen.spec is not None
    every = seen.spec.checkpoint.every_steps
    if every:
        one = seen.steps[-1][1].step_s
        return every * one if one else None
    times = [event.t for event in seen.events if isinstance(event.body, CheckpointSaved)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return median(gaps) if len(gaps) > 1 else None


def full_disk(seen: Observed) -> Iterator[Reason]:
    """The disk has no room for the next checkpoint, or will soon have none."""
    if seen.disk is None or not seen.running:
        return
    saved = seen.newest(CheckpointSaved)
    size = seen.checkpoint_bytes or (saved[1].size_bytes if saved else 0)
    free, total = seen.disk.free, seen.disk.total
    none_left = free < DISK_NEXT * size or not free
    filling = free < DISK_SHARE * total and free < DISK_CHECKPOINTS * max(size, 1 << 30)
    if not none_left and not filling:
        return
    yield Reason(
        code="disk-full" if none_left else "disk-filling",
        severity="critical" if none_left else "warning",
        title="The disk has no room for the next checkpoint" if none_left else "The disk fills up",
        where=seen.run,
        since=None,
        evidence=(
            f"{free:,} bytes of {total:,} are free ({free / total if total else 0:.1%})",
            *(
                (f"a checkpoint takes {size:,} bytes, and is written before the oldest one is deleted",)
                if size
                else ()
            ),
        ),
        doing="a save that fails costs nothing but itself: training goes on, and older checkpoints are kept",
        next=f"make room (df -h {seen.run}; du -sh {seen.run}/*), or keep fewer: checkpoint.keep_last, checkpoint.keep_every",
    )
