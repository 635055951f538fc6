"""Rules on checkpoints: failing, slow, old, damaged and removed ones, late copies, and a nearly full disk."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from phalanx.observe.events import (
    CheckpointCopied,
    CheckpointFailed,
    CheckpointSaved,
    IncidentKind,
    Message,
    Restored,
    Step,
)
from phalanx.observe.throughput import format_duration
from phalanx.store.open_store import joined
from phalanx_watch.why import observed as o

_NAMED = 8
_URL = "://"
_FAILED_SAVE = "a save that fails costs nothing but itself: training continues, and {newest}"


def failed_checkpoints(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if saves have failed since the newest checkpoint, and one if copies to the store have since the newest copy.

    Of a finished run only copies: its last checkpoint is there. Critical only on disk: for a second failure, or if no checkpoint is saved.
    """
    saved, copied = observed.newest(CheckpointSaved), observed.newest(CheckpointCopied)
    saves, copies = list[tuple[float, CheckpointFailed]](), list[tuple[float, CheckpointFailed]]()
    for t, failure in o.of_kind(CheckpointFailed, observed.events):
        in_store = _is_in_store(observed, failure.path)
        good = copied if in_store else saved
        if good is None or t > good[0]:
            (copies if in_store else saves).append((t, failure))
    step = observed.saved_step
    if saves and not observed.finished:
        is_critical = len(saves) > 1 or not step
        yield _failing(observed, "Checkpoints", saves, observed.newest_checkpoint, is_critical=is_critical)
    if copies:
        newest = f"the newest copy is step {copied[1].step:,}" if copied else "there is no copy"
        if step:
            newest += f"; the newest checkpoint on disk is step {step:,}"
        yield _failing(observed, "Copies of checkpoints", copies, newest, is_critical=False)


def _is_in_store(observed: o.Observed, path: str) -> bool:
    """Return True if a failed checkpoint was to be written to the run's store."""
    store = observed.spec.checkpoint.store if observed.spec else ""
    return _URL in path or path == joined(store)


def _failing(
    observed: o.Observed,
    kind: str,
    failures: list[tuple[float, CheckpointFailed]],
    newest: str,
    *,
    is_critical: bool,
) -> o.Reason:
    """Return the reason for saves, or copies, that have failed since the last good one; ``newest`` names that one."""
    (since, _), (_, last) = failures[0], failures[-1]
    return o.Reason(
        code="checkpoint-failed",
        severity="critical" if is_critical else "warning",
        title=f"{kind} fail: {len(failures)} since the last good one",
        where=last.path,
        since=since,
        evidence=(f"step {last.step:,}: {last.reason}", newest),
        doing=observed.doing("training continues, and the next checkpoint is tried when it is due"),
        next=f"see what became of the fleet's coordinator, and whether this node reaches it: phalanx status {observed.run}"
        if last.is_held
        else f"mend what the error names at {last.path} (for room: df -h); phalanx checkpoint list {observed.run}",
    )


def old_checkpoint(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the newest checkpoint is older, in time and steps, than the run's interval allows: a crash would cost more.

    Nothing unless the run is running.
    """
    if not observed.running or not observed.steps or observed.spec is None:
        return
    every_s = _interval_s(observed)
    saved_at = max([t for _, t in observed.checkpoints] + [observed.steps[0][0]])
    age_s = observed.now - saved_at
    if every_s is None or age_s <= max(o.CHECKPOINT_LEAST_S, o.CHECKPOINT_INTERVALS * every_s):
        return
    step = observed.steps[-1][1].step
    every = observed.spec.checkpoint.every_steps
    if (
        every
        and step - max(observed.saved_step, observed.steps[0][1].step - 1) <= o.CHECKPOINT_INTERVALS * every
    ):
        return
    yield o.Reason(
        code="checkpoint-old",
        title=f"The newest checkpoint is {format_duration(age_s)} old"
        if observed.saved_step
        else f"No checkpoint in {format_duration(age_s)}",
        where=f"{observed.run}/checkpoints",
        since=saved_at + every_s,
        evidence=(
            f"training is at step {step:,}, {observed.newest_checkpoint}",
            f"one is due every {format_duration(every_s)}"
            + (f" (checkpoint.every_steps = {every})" if every else ""),
        ),
        doing="training continues; a crash now would cost the steps since",
        next=f"phalanx checkpoint list {observed.run}; is one being written for long, or did the disk get slow?",
    )


def unsaved_starts(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if ``LOST_STARTS`` starts before the newest one began at the same step as it and ended before the first checkpoint.

    Nothing unless the run is running. A fleet that regroups continues at a later step.
    """
    every = observed.spec.checkpoint.every_steps if observed.spec else 0
    if not observed.running or not observed.steps or not every or observed.saved_step:
        return
    first, last = observed.steps[0][1].step, observed.steps[-1][1].step
    steps: dict[int, list[int]] = {}
    for event in observed.events:
        if isinstance(event.body, Step) and event.attempt < observed.attempt:
            steps.setdefault(event.attempt, []).append(event.body.step)
    lost = [
        numbers[-1] for numbers in steps.values() if len(numbers) >= o.RECENT_STEPS and numbers[0] == first
    ]
    if len(lost) < o.LOST_STARTS or last >= every:
        return
    yield o.Reason(
        code="checkpoint-old",
        title=f"{len(lost)} starts have ended before the first checkpoint, and all their steps are lost",
        where=f"{observed.run}/checkpoints",
        since=observed.began_at,
        evidence=(
            f"no checkpoint was ever saved: the first is due at step {every:,} (checkpoint.every_steps), and training is at step {last:,}",
            f"earlier starts, which began at step {first:,} too, ended after steps {', '.join(f'{step:,}' for step in lost[-_NAMED:])}",
        ),
        doing="training continues; if this start ends as early, its steps are lost too",
        next=f"end it with Ctrl-C or SIGTERM, which saves; then save more often: phalanx train {observed.run} --set "
        f"checkpoint.every_steps={max(1, min(lost) // 2)}",
    )


def slow_checkpoints(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the newest saves delay training for much of its time, since the one before is still being written."""
    saves = o.of_kind(CheckpointSaved, observed.mine)[-o.SAVES - 1 :]
    if not observed.running or len(saves) < 3:
        return
    (began, _), *newest = saves
    stalled_s, elapsed_s = sum(save.blocked_s for _, save in newest), newest[-1][0] - began
    if stalled_s < max(o.RECENT_LEAST_S, o.SAVE_SHARE * elapsed_s):
        return
    last = newest[-1][1]
    usual_s = median(save.seconds for _, save in newest)
    rate = f", {last.size_bytes / usual_s / 1e6:,.3g} MB/s" if usual_s else ""
    yield o.Reason(
        code="slow-checkpoints",
        title=f"Training waits for checkpoints: {stalled_s / elapsed_s:.0%} of the time",
        where=last.path,
        since=began,
        evidence=(
            f"the newest {len(newest)} saves, up to step {last.step:,}, delayed training by {format_duration(stalled_s)} of {format_duration(elapsed_s)}",
            f"one takes {format_duration(usual_s)} to write {last.size_bytes:,} bytes{rate}, while {format_duration(elapsed_s / len(newest))} are between two",
        ),
        doing="training waits while the checkpoint before is being written",
        next="put the run directory on a faster disk, or see what else writes to it (iostat -x 5); or save more rarely: "
        f"phalanx train {observed.run} --set checkpoint.every_steps=0 chooses the time between two",
    )


def passed_over_checkpoints(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason for some minutes after a start that has found checkpoints with other bytes than were written."""
    messages = [
        (t, message.text)
        for t, message in o.of_kind(Message, observed.mine)
        if message.incident is IncidentKind.DAMAGED_CHECKPOINT
    ]
    if not messages or observed.finished or observed.now - messages[-1][0] >= o.NEWS_S:
        return
    restored = observed.newest(Restored)
    yield o.Reason(
        code="checkpoint-damaged",
        title="The newest start has passed over a damaged checkpoint",
        where=f"{observed.run}/checkpoints",
        since=messages[0][0],
        evidence=tuple(text for _, text in messages[:_NAMED]),
        doing=observed.doing(
            f"training continues from step {restored[1].step:,}" if restored else "training continues"
        ),
        next=f"bytes changed on that disk or on the way to it: look at its errors (dmesg, smartctl), and at the others: phalanx checkpoint list {observed.run}",
    )


def damaged_checkpoints(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the run has ended and its newest checkpoints lack files. Critical if it cannot be resumed."""
    if not observed.damaged_checkpoints or observed.finished:
        return
    newest, _ = observed.damaged_checkpoints[0]
    intact = observed.saved_step
    yield o.Reason(
        code="checkpoint-damaged",
        severity="warning" if intact else "critical",
        title=f"The newest checkpoint, step {newest:,}, lacks files"
        if intact
        else "No checkpoint can be restored: files of each are missing or cut short",
        where=f"{observed.run}/checkpoints",
        evidence=tuple(f"step {step:,}: {error}" for step, error in observed.damaged_checkpoints[:_NAMED]),
        doing=observed.after_end,
        next="copy the files back (a backup, or checkpoint.store); does something remove old files there, such as a purge of scratch? "
        + (
            f"To resume from step {intact:,}: phalanx train {observed.run}"
            if intact
            else f"To start from scratch: remove {observed.run}/checkpoints"
        ),
    )


def removed_checkpoint(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the newest checkpoint that was saved is gone, which the run's own rules keep."""
    step = observed.removed_checkpoint
    if not step or observed.finished:
        return
    left = observed.saved_step
    yield o.Reason(
        code="checkpoint-damaged",
        severity="warning" if left else "critical",
        title=f"The checkpoint of step {step:,} was saved, and is gone",
        where=f"{observed.run}/checkpoints",
        evidence=(
            "the run itself keeps the newest checkpoints (checkpoint.keep_last): another process has removed it",
            f"the newest that is left is step {left:,}" if left else "no checkpoint is left",
        ),
        doing=observed.doing(
            "training continues; an end now would cost all steps since the newest that is left"
        ),
        next="does something remove old files there, such as a purge of scratch? Keep a copy elsewhere (checkpoint.store), or another run_dir",
    )


def late_copies(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if ``COPIES_BEHIND`` checkpoints have been saved since the newest one that is in the store, and none has failed."""
    if not observed.running or observed.spec is None or not observed.spec.checkpoint.store:
        return
    checkpoint, copied = observed.spec.checkpoint, observed.newest(CheckpointCopied)
    every = checkpoint.store_every_steps
    reached = copied[1].step if copied else 0
    saves = [
        (t, save)
        for t, save in o.of_kind(CheckpointSaved, observed.mine)
        if save.step > reached and (not every or save.step % every == 0)
    ]
    if len(saves) < o.COPIES_BEHIND or any(failed_checkpoints(observed)):
        return
    (since, _), (_, last) = saves[0], saves[-1]
    limit = (
        f" at most {checkpoint.store_mib_s:g} MiB/s (checkpoint.store_mib_s)"
        if checkpoint.store_mib_s
        else ""
    )
    yield o.Reason(
        code="checkpoint-old",
        title=f"Copies to the store are {len(saves)} checkpoints behind",
        where=checkpoint.store,
        since=since,
        evidence=(
            f"the newest copy is step {reached:,}, the newest checkpoint step {last.step:,}"
            if reached
            else f"no copy is there, step {last.step:,} is saved",
            f"a checkpoint has {last.size_bytes:,} bytes{limit}"
            + (f"; the newest copy took {format_duration(copied[1].seconds)}" if copied else ""),
        ),
        doing="training continues; if this disk is lost, all steps since the newest copy are",
        next=f"copy fewer, or faster: phalanx train {observed.run} --set checkpoint.store_every_steps=... or checkpoint.store_mib_s=0",
    )


def _interval_s(observed: o.Observed) -> float | None:
    """Return the intended seconds between two checkpoints; None if unknown.

    They are the run file's interval in steps times the newest step's seconds, else the median gap between saves.
    """
    assert observed.spec is not None
    every = observed.spec.checkpoint.every_steps
    if every:
        step_s = observed.steps[-1][1].step_s
        return every * step_s if step_s else None
    saves = o.of_kind(CheckpointSaved, observed.events)
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(saves)]
    return median(gaps) if len(gaps) > 1 else None


def full_disk(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a critical reason if the disk has no room for the next checkpoint, or a warning if it will soon have none.

    Nothing unless the run is running.
    """
    if observed.disk is None or not observed.running:
        return
    saved = observed.newest(CheckpointSaved)
    size = observed.checkpoint_bytes or (saved[1].size_bytes if saved else 0)
    free, total, free_files = observed.disk.free, observed.disk.total, observed.disk.free_files
    no_files = free_files is not None and free_files < o.DISK_NEXT * max(1, observed.checkpoint_files)
    none_left = free < o.DISK_NEXT * size or not free or no_files
    filling = free < o.DISK_SHARE * total and free < o.DISK_CHECKPOINTS * max(size, 1 << 30)
    if not none_left and not filling:
        return
    if no_files:
        yield o.Reason(
            code="disk-full",
            severity="critical",
            title="The disk can hold no more files: its inodes are used up",
            where=observed.run,
            evidence=(
                f"{free_files:,} more files can be made (inodes), though {free:,} bytes are free",
                f"a checkpoint takes {max(1, observed.checkpoint_files):,} files",
            ),
            doing=_FAILED_SAVE.format(newest=observed.newest_checkpoint),
            next=f"remove files, not bytes: df -i {observed.run} has the count, du --inodes -x shows where they are; or another file system, or quota",
        )
        return
    yield o.Reason(
        code="disk-full" if none_left else "disk-filling",
        severity="critical" if none_left else "warning",
        title="The disk has no room for the next checkpoint" if none_left else "The disk fills up",
        where=observed.run,
        evidence=(
            f"{free:,} bytes of {total:,} are free ({free / total if total else 0:.1%})",
            *(
                (f"a checkpoint takes {size:,} bytes, and is written before the oldest one is deleted",)
                if size
                else ()
            ),
        ),
        doing=_FAILED_SAVE.format(newest=observed.newest_checkpoint),
        next=f"make room (df -h {observed.run}; du -sh {observed.run}/*), or keep fewer: checkpoint.keep_last, checkpoint.keep_every",
    )
