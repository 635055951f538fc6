"""Rules on the environment of a run: space for checkpoints, its data and libraries, equal machines, and
synchronized clocks.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from phalanx.data.reading.sources import same_datasets
from phalanx.observe.events import (
    CheckpointCopied,
    CheckpointFailed,
    CheckpointSaved,
    IncidentKind,
    Message,
    Restored,
    RunStarted,
    Step,
)
from phalanx.observe.throughput import format_duration
from phalanx.run.rules import stages_of
from phalanx.store.open_store import joined
from phalanx_watch.why import observed as o

# Checkpoints: failing saves, old checkpoints, and a nearly full disk.


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


# Conditions of the bits that are not in the run file.


_NAMED = 8


def unreadable_events(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the events of the run cannot be read, so that most other reasons cannot be seen."""
    if observed.events_error:
        yield o.Reason(
            code="events-unreadable",
            severity="critical",
            title="The run's events cannot be read: whether it is well is not known",
            where=f"{observed.run}/events.jsonl",
            evidence=(observed.events_error,),
            doing="a start of the run is refused",
            next=f"look at the file and its disk (ls -l {observed.run}; dmesg), and put the file back",
        )


def unreadable_lines(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if lines of the event stream are no events: what they recorded is lost. Also of a finished run."""
    if not observed.unreadable:
        return
    first, last = observed.unreadable[0], observed.unreadable[-1]
    count = len(observed.unreadable)
    yield o.Reason(
        code="events-unreadable",
        title=f"{count:,} line{'s' if count > 1 else ''} of the run's events cannot be read, {_steps_around(first.after, last.before)}",
        where=f"{observed.run}/events.jsonl, byte {first.offset:,}",
        evidence=tuple(
            f"{line.nbytes:,} bytes from byte {line.offset:,} are no event, {_steps_around(line.after, line.before)}"
            for line in observed.unreadable[:_NAMED]
        ),
        doing=observed.doing("training continues; curves and reports lack what these lines recorded"),
        next="a full disk or a power cut leaves such lines, and so does a failing disk: look at its errors (dmesg, smartctl), and at the "
        f"checkpoints on it: phalanx checkpoint list {observed.run}",
    )


def _steps_around(after: int | None, before: int | None) -> str:
    """Describe a place in the stream by the steps around it, as far as there are any."""
    if after is None or before is None:
        return f"after step {after:,}" if after is not None else f"before step {before or 1:,}"
    return f"between steps {after:,} and {before:,}"


def changed_run_file(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a critical reason if the run file in the run directory is no longer that of the run, with up to ``_NAMED`` fields."""
    if not observed.changed_fields:
        return
    yield o.Reason(
        code="changed-run-file",
        severity="critical",
        title="The run file was changed after the run was started",
        where=f"{observed.run}/run.toml",
        evidence=observed.changed_fields[:_NAMED],
        doing="a start of the run is refused, and so is what reads its weights: they would be those of another model or recipe",
        next="put back what it was; to train with other values from a step on, then: "
        f"phalanx train {shlex.quote(observed.run)} --from STEP --set FIELD=VALUE",
    )


def other_data(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the data cannot be opened (warning), or differ from those at the start of the run (critical).

    Nothing for a finished run.
    """
    if observed.finished or not observed.data_fingerprint:
        return
    if observed.data_error:
        yield o.Reason(
            code="data-gone",
            severity="warning" if observed.running or observed.over else "critical",
            title="The run's data cannot be opened",
            where=_data_path(observed),
            evidence=(observed.data_error,),
            doing="ranks that have them open may continue; a start would be refused",
            next="put the dataset back, or a copy of it (phalanx data copy), and name it: data.path",
        )
        return
    if not observed.data_changed:
        return
    yield o.Reason(
        code="other-data",
        severity="critical",
        title="The data are another version than those that the run was started with",
        where=_data_path(observed),
        evidence=(
            f"fingerprint at the start {observed.data_fingerprint[:16]}, now {observed.data_now[:16]}",
            "the order of samples and the tokens differ: the weights would be those of neither",
        ),
        doing="a start of the run is refused; ranks that run read the files that they have opened",
        next=f"put the version of {observed.data_fingerprint[:12]} back (phalanx data show {_data_path(observed)} shows which is there), "
        "or train on the new one as a run of its own",
    )


def held_out_leak(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if many held-out documents are also in the training split: the held-out loss measures memory. Also of a finished run."""
    shared = {
        name: (source.get("held_out_in_training"), source.get("held_out_documents"))
        for name, source in _datasets(observed).items()
    }
    leaks = {
        name: (copies, documents)
        for name, (copies, documents) in shared.items()
        if isinstance(copies, int) and isinstance(documents, int) and copies >= o.HELD_OUT_SHARE * documents
    }
    if not leaks:
        return
    yield o.Reason(
        code="held-out-leak",
        title="The held-out loss measures memory: its text is trained on",
        where=", ".join(f"source {name}" for name in leaks if name) or _data_path(observed),
        evidence=tuple(
            f"{copies:,} of {documents:,} held-out documents{f' of {name}' if name else ''} are in the training split too, word for word"
            for name, (copies, documents) in list(leaks.items())[:_NAMED]
        ),
        doing=observed.doing(
            "training continues; its weights are as good as its data, its held-out loss is lower than on new text"
        ),
        next="score the weights on text of your own (phalanx eval), and prepare the data again with another --out and --hold-out-by text, or [dedup]",
    )


def twin_sources(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if sources of the mixture are one dataset: its text is repeated, and their held-out losses are one. Also of a finished run."""
    fingerprints = {name: str(source.get("fingerprint", "")) for name, source in _datasets(observed).items()}
    twins = same_datasets(fingerprints)
    if not twins:
        return
    yield o.Reason(
        code="twin-sources",
        title=f"Sources {' and '.join(twins[0])} are one dataset",
        where=", ".join(f"source {name}" for name in twins[0][:_NAMED]),
        evidence=tuple(
            f"{', '.join(names)}: fingerprint {fingerprints[names[0]][:16]}" for names in twins[:_NAMED]
        ),
        doing=observed.doing("training continues, and reads this text as often as all of them together"),
        next="see whether data.path of one of them is a mistake (phalanx data show PATH); if not, one source with the sum of the weights is the "
        "same, in a run of its own",
    )


def _datasets(observed: o.Observed) -> dict[str, dict[str, object]]:
    """Return the record of each dataset at the newest start, by the name of its source; empty without a record."""
    datasets = observed.started.environment.get("data") if observed.started else None
    return {
        str(name): source
        for name, source in (datasets.items() if isinstance(datasets, dict) else ())
        if isinstance(source, dict)
    }


def repeated_text(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield an "info" reason if ``xz -9`` leaves less of the held-out text than of any prose or source code: most of it is repeated.

    Also of a finished run.
    """
    xz = observed.started.xz_bits_per_byte if observed.started else None
    if xz is None or xz >= o.REPEATED_XZ:
        return
    yield o.Reason(
        code="repeated-text",
        severity="info",
        title=f"Most of the text is repeated: xz -9 leaves {xz:.2g} bits per byte of it",
        where=_data_path(observed),
        evidence=(
            "of prose it leaves about 2 bits per byte, of source code about 1; the held-out loss is as low, and compares with no other text",
        ),
        doing=observed.doing("training continues"),
        next=f"phalanx data show {observed.run} --step 1 (notices, headers, near copies?); [dedup] of a recipe removes documents that are nearly the same",
    )


def epochs_read(observed: o.Observed) -> dict[str, float]:
    """Return how often each source was read by the newest step; the run's only dataset is ""; those of unknown size are left out."""
    spec, last = observed.spec, observed.last_step
    if spec is None or last is None:
        return {}
    stages, tokens = stages_of(spec.data), float(spec.train.batch_size * spec.train.seq_len)
    ends = [min(end, last[1].step) for end in (*stages[1:], last[1].step)]
    read: dict[str, float] = {}
    for number, (start, end) in enumerate(zip(stages, ends, strict=True)):
        weights = {
            source.name: source.weights[number]
            for source in spec.data.sources
            if number < len(source.weights)
        }
        total = sum(weights.values())
        shares = {name: weight / total for name, weight in weights.items()} if total else {"": 1.0}
        for name, share in shares.items():
            read[name] = read.get(name, 0.0) + max(0, end - start) * tokens * share
    parts = {source.name: source.use[1] - source.use[0] for source in spec.data.sources}
    sizes = {name: dataset.get("train_tokens") for name, dataset in _datasets(observed).items()}
    return {
        name: count / (size * parts.get(name, 1.0))
        for name, count in read.items()
        if isinstance(size := sizes.get(name), int) and size and parts.get(name, 1.0)
    }


def source_read_often(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield an "info" reason if a source of a mixture was read ``EPOCHS`` times: its weight is a share of the samples, not of its size.

    Also of a finished run.
    """
    epochs = epochs_read(observed)
    often = {name: times for name, times in epochs.items() if name and times >= o.EPOCHS}
    if not often:
        return
    yield o.Reason(
        code="repeated-text",
        severity="info",
        title=f"Sources are read many times: {', '.join(f'{name} {times:.0f}' for name, times in often.items())}",
        where=", ".join(f"source {name}" for name in often),
        evidence=(
            f"by the newest step: {', '.join(f'{name} {times:.3g} times' for name, times in epochs.items())}",
            "a weight is a share of the samples, whatever the size of the source: beyond some ten times its text is memorized",
        ),
        doing=observed.doing("training continues"),
        next="lower its weight, or bound it (data.sources.NAME.epochs), in a run of its own; the held-out loss of the source shows whether it still learns",
    )


def debugging_on(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the newest start had an environment variable that slows each operation for debugging."""
    variables = observed.started.environment.get("variables") if observed.started else None
    slow = {
        name: str(value)
        for name, value in (variables.items() if isinstance(variables, dict) else ())
        if str(value).upper() in _DEBUGGING.get(name, ())
        or (name in _DEBUGGING_IF_SET and str(value) not in ("", "0"))
    }
    if not slow:
        return
    yield o.Reason(
        code="debugging-on",
        title=f"Debugging is switched on: {', '.join(slow)}",
        where="environment variables of the ranks",
        since=observed.began_at,
        evidence=tuple(f"{name}={value}" for name, value in slow.items()),
        doing=observed.doing(
            "training continues, with the checks that these variables add to each operation"
        ),
        next=f"if it is not meant: unset {' '.join(slow)}, and start the run again: phalanx train {observed.run}",
    )


_DEBUGGING = {
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "NCCL_DEBUG": ("TRACE",),
    "PYTHONMALLOC": ("DEBUG", "PYMALLOC_DEBUG", "MALLOC_DEBUG"),
}
"""Values that cost time, in capitals: collectives are compared between ranks, or each call is logged."""
_DEBUGGING_IF_SET = (
    "CUDA_LAUNCH_BLOCKING",
    "TORCH_SHOW_CPP_STACKTRACES",
    "PYTHONTRACEMALLOC",
    "PYTHONDEVMODE",
)


def _data_path(observed: o.Observed) -> str:
    """Return the path of the run's data, or those of up to three sources."""
    if observed.spec is None:
        return "its dataset"
    return observed.spec.data.path or ", ".join(source.path for source in observed.spec.data.sources[:3])


def other_libraries(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the nodes differ in libraries, drivers or hardware, and one if the run was begun with other libraries.

    Nothing for a finished run.
    """
    if observed.finished:
        return
    if observed.machines:
        yield o.Reason(
            code="mixed-machines",
            title="The nodes of the run differ",
            where=observed.machines[0].split(":")[0],
            since=observed.began_at,
            evidence=observed.machines[:_NAMED],
            doing="probes of the arithmetic refuse ranks whose kernels round differently (runtime.mixed_machines)",
            next="install the same on all nodes (uv sync --frozen, or one image), then start the odd node's agent again: phalanx agent",
        )
    first, now = observed.first_started, observed.started
    if first is None or now is None or first is now:
        return
    before = _recorded(first, "packages") | _recorded(first, "modules")
    after = _recorded(now, "packages") | _recorded(now, "modules")
    changed = [
        f"{name}: {before[name]} before, {after[name]} now"
        for name in before
        if after.get(name, before[name]) != before[name]
    ]
    if changed:
        yield o.Reason(
            code="changed-libraries",
            title="The run continues with other libraries or code than it began with",
            where=", ".join(line.split(":")[0] for line in changed[:_NAMED]),
            since=observed.began_at,
            evidence=tuple(changed[:_NAMED]),
            doing="nothing: from here on the bits are those of this history of libraries",
            next=f"if the bits shall be those of the first: install these versions and go back: phalanx train {observed.run} --from STEP",
        )


def _set_forward(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield an "info" reason for the largest jump of the wall clock between two logged steps of an attempt, which count their seconds by
    another clock."""
    jump_s, after, since = 0.0, 0, 0.0
    for (t, step), (later_t, later) in pairwise(observed.steps):
        between = sum(
            later.ledger[name] - step.ledger.get(name, 0.0)
            for name in later.ledger
            if not name.startswith("step.")
        )
        if (gap_s := later_t - t - later.logged_s - between) > jump_s:
            jump_s, after, since = gap_s, step.step, t
    if jump_s < o.CLOCK_JUMP_S:
        return
    yield o.Reason(
        code="clock-skew",
        severity="info",
        title=f"The clock jumped by {format_duration(jump_s)} after step {after:,}",
        where=f"the machine of the first rank, after step {after:,}",
        since=since,
        evidence=(
            f"two logged steps are stamped {format_duration(jump_s)} farther apart than the run counted between them: the clock was set, or the "
            "machine slept",
        ),
        doing="nothing: no time of training was lost; only times that are shown, such as the time left, are wrong",
        next="let the machine keep time: chronyc tracking (or timedatectl)",
    )


def _recorded(started: RunStarted, entry: str) -> dict[str, str]:
    """Return the versions of packages, or the digests of modules, that a start recorded, by name; empty without a record."""
    versions = started.environment.get(entry)
    return (
        {str(name): str(version) for name, version in versions.items()} if isinstance(versions, dict) else {}
    )


def clock_skew(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if events are over ``SKEW_S`` in this machine's future, one is stamped so much before the event above it, or the clock
    was set forward between two steps.

    Copies of checkpoints to a store may be stamped earlier. Nothing for a finished run.
    """
    if observed.finished:
        return
    ahead = max((event.t for event in observed.events), default=0.0) - observed.now
    back = 0.0
    since = None
    for earlier, later in pairwise(observed.events):
        # A copy to a store is logged late, by its own process; everything else is logged at once.
        if earlier.t - later.t > back and not isinstance(later.body, CheckpointCopied):
            back, since = earlier.t - later.t, later.t
    worst = max(ahead, back)
    yield from _set_forward(observed)
    if worst <= o.SKEW_S:
        return
    by_fleet = observed.fleet is not None and observed.newest(Message) is not None
    yield o.Reason(
        code="clock-skew",
        title=f"Clocks differ by {format_duration(worst)}",
        where="the machines that write the events"
        if back >= ahead
        else "this machine's clock against that of the run",
        since=since,
        evidence=(
            f"the newest event is {format_duration(ahead)} in the future of this machine"
            if ahead >= back
            else f"of two events in the order of the file the later is stamped {format_duration(back)} earlier: a clock was set back, or that of "
            "the machine that began to write is behind",
        ),
        doing="nothing depends on it but times that are shown"
        + ("; leases are counted by each machine's own clock" if by_fleet else ""),
        next="let all machines keep time: chronyc tracking (or timedatectl) on each",
    )
