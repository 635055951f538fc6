"""Rules on the environment of a run: its records, data and libraries, equal machines, and synchronized clocks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import pairwise

from phalanx.data.reading.sources import same_datasets
from phalanx.observe.events import (
    CheckpointCopied,
    Message,
    RunStarted,
)
from phalanx.observe.throughput import format_duration
from phalanx.run.rules import stages_of
from phalanx_watch.why import observed as o

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
