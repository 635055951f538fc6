"""``phalanx why``: the observation of a run, read from its directory in bounded time, and the reasons that the rules
return.

Of the event stream, the end and a few samples of the rest are read. Missing or damaged parts are left out, and a rule
that needs them returns no reason. A healthy run has none.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any, BinaryIO

import numpy as np

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.format.manifest import decode_index
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.data.errors import DataError
from phalanx.data.reading.sources import index_of_places, open_places
from phalanx.data.stored.index import SPLITS
from phalanx.fleet.control.fleet_file import FleetFile, FleetFileError, path_in, read_fleet_file
from phalanx.launch.engines.engine import JobStanding
from phalanx.observe.event_log import EventLogError
from phalanx.observe.events import FROM_OUTSIDE, CheckpointSaved, Evaluated, Event, RunStarted, Step, decode
from phalanx.observe.logs.line import what_happened, who
from phalanx.observe.logs.read_lines import first_logged_failure, read_lines
from phalanx.observe.metrics.endpoint import coordinator_address
from phalanx.observe.rank_stream import RankStream, RankStreamError
from phalanx.observe.record.notes import machine_differences, newest_machines, read_throttling
from phalanx.run.directory.files import open_regular, read_small
from phalanx.run.directory.paths import (
    CHECKPOINT_INDEX,
    RunDirectory,
    RunDirectoryError,
    read_resolved,
    read_small_json,
    step_folder,
)
from phalanx.run.identity import field_differences, read_lineage, run_changes
from phalanx.run.read import addresses, found_again
from phalanx.run.spec import RunSpec
from phalanx.store.open_store import is_url
from phalanx.store.store import StoreError
from phalanx.train.lifecycle.ending import read_failure
from phalanx.train.step.learning_rate import multiplier
from phalanx_watch import ranks as comparison
from phalanx_watch.runs.probe import KernelLocks
from phalanx_watch.why import (
    changes,
    checkpoints,
    fleet,
    layers,
    numbers,
    progress,
    skipped,
    speed,
    surroundings,
    unusual,
)
from phalanx_watch.why import observed as o
from phalanx_watch.why.processes import processes_of, with_processor_use

Rule = Callable[[o.Observed], Iterator[o.Reason]]
RULES: tuple[Rule, ...] = (
    *(
        progress.failed,
        progress.gone,
        progress.stopped,
        progress.ended_early,
        progress.never_began,
        progress.queued,
        progress.standstill,
    ),
    *(
        numbers.not_finite,
        numbers.evaluation_not_finite,
        skipped.skipped_steps,
        numbers.spike,
        numbers.diverged,
        numbers.raised_loss,
        changes.worse_than_parent,
        changes.rate_jumps,
        changes.read_again,
        numbers.not_learning,
        numbers.endless_warmup,
        numbers.held_out_rises,
        numbers.loss_too_low,
        unusual.unusual_fields,
        unusual.unusual_text,
        numbers.growing_norm,
        surroundings.unreadable_events,
        surroundings.unreadable_lines,
        surroundings.changed_run_file,
        surroundings.other_data,
        surroundings.held_out_leak,
        surroundings.twin_sources,
        surroundings.repeated_text,
        surroundings.source_read_often,
        changes.other_ruler,
        fleet.no_coordinator,
    ),
    *(
        checkpoints.failed_checkpoints,
        checkpoints.full_disk,
        checkpoints.old_checkpoint,
        checkpoints.unsaved_starts,
        checkpoints.slow_checkpoints,
        checkpoints.damaged_checkpoints,
        checkpoints.passed_over_checkpoints,
        checkpoints.removed_checkpoint,
        checkpoints.late_copies,
    ),
    *(
        fleet.not_finite_nodes,
        fleet.lost_nodes,
        fleet.nodes_back,
        fleet.fewer_ranks,
        fleet.no_spares,
        fleet.hardware,
        speed.throttled,
        speed.too_many_threads,
        speed.few_cores,
        speed.uneven_slots,
        fleet.straggler,
        fleet.slow_link,
        fleet.growing_memory,
        fleet.metrics_elsewhere,
    ),
    *(
        layers.growing_layer,
        layers.saturated_layer,
        layers.collapsed_router,
        layers.dead_units,
        layers.wrong_gradients,
    ),
    *(speed.slow_data, speed.slower_than_before, speed.low_goodput, layers.imbalance),
    *(surroundings.debugging_on, surroundings.other_libraries, surroundings.clock_skew),
)
"""Rules in the order in which reasons of equal severity are listed."""
_ORDER = ("critical", "warning", "info")
_REFUSALS = ("changed-run-file", "other-data", "data-gone")
"""Reasons for which a start of the run is refused."""


def judge(observed: o.Observed) -> list[o.Reason]:
    """Return all reasons, worst first; of a run that does not run, those for which a start is refused are first of their severity."""
    results = [reason for rule in RULES for reason in rule(observed)]
    return sorted(
        results,
        key=lambda reason: (
            _ORDER.index(reason.severity),
            observed.running or reason.code not in _REFUSALS,
            reason.since or math.inf,
        ),
    )


# Results of other readers of a run directory: slow ranks, machine differences, the first failure.
#
# Each uses the function of its own command (``phalanx ranks``, ``phalanx runs show``, ``phalanx logs``). A failing one is left out.

_WINDOWS = 20
_LEAST_WINDOWS = 5
"""Fewer windows reflect the start of a run rather than a rank."""
_MOST_NEIGHBORS = 5
_MOST_LOOKED_AT = 256
_CUT = 300


def slow_ranks(directory: RunDirectory, attempt: int) -> list[o.SlowRankSeen]:
    """Return up to ``_MOST_NEIGHBORS`` ranks of ``attempt`` that were slower than their peers in its newest windows, or late in bursts.

    Empty if there are too few windows, the newest numbers are of another attempt, or files cannot be read.
    """
    with (
        suppress(RankStreamError, RunDirectoryError, EventLogError, OSError, IndexError, ValueError),
        RankStream(directory.ranks) as stream,
    ):
        windows = comparison.newest_windows(stream, _WINDOWS, least_s=o.RECENT_LEAST_S)
        if len(windows) < _LEAST_WINDOWS or stream.head(windows[-1]).attempt != attempt:
            return []
        if stream.head(windows[-1]).t - stream.head(windows[0]).t < o.RECENT_LEAST_S:
            return []
        ranks = stream.head(windows[-1]).ranks
        values = comparison.values_of(stream, "compute_s", windows)
        layout = comparison.layout_of_attempt(directory, attempt, ranks)
        latenesses = comparison.slowest("compute_s", values, layout, _MOST_LOOKED_AT)
        worst = max(latenesses, key=lambda rank: rank.late_share, default=None)
        nodes = comparison.nodes_of_ranks(directory, ranks)
        return [
            o.SlowRankSeen(
                rank.rank,
                rank.slowdown,
                rank.value,
                rank.windows,
                rank.slower,
                stream.head(windows[0]).t,
                nodes.get(rank.rank, ""),
                rank.late_share,
            )
            for rank in latenesses
            if rank.slow or (rank is worst and _is_late_alone(rank, latenesses))
        ][:_MOST_NEIGHBORS]
    return []


def _is_late_alone(worst: comparison.RankLateness, ranks: Sequence[comparison.RankLateness]) -> bool:
    """Return True if a rank is late in bursts: in some windows, by much in total, and far more than any other rank. On a
    busy machine every rank is late at times.
    """
    others = max((rank.late_share for rank in ranks if rank is not worst), default=0.0)
    in_bursts = o.BURST_WINDOWS * worst.windows <= worst.slower <= o.BURSTS_MOST * worst.windows
    return in_bursts and worst.late_share >= o.SLOW_RANK and worst.late_share >= o.BURST_ALONE * others


def most_grown_memory(directory: RunDirectory, attempt: int) -> o.MemorySeen | None:
    """Return the memory of the rank of ``attempt`` whose memory has grown most; None if there are too few windows, or files cannot be read."""
    with (
        suppress(RankStreamError, RunDirectoryError, OSError, IndexError, ValueError),
        RankStream(directory.ranks) as stream,
    ):
        windows = comparison.newest_windows(stream, len(stream), attempt)
        if len(windows) < _WINDOWS:
            return None
        ends = [windows[(len(windows) - 1) * part // o.MEMORY_PARTS] for part in range(1, o.MEMORY_PARTS + 1)]
        sizes = comparison.values_of(stream, "memory_bytes", ends)  # (parts, ranks)
        grown = np.nan_to_num(sizes[-1] - sizes[0])
        rank = int(grown.argmax())
        return o.MemorySeen(
            rank,
            comparison.nodes_of_ranks(directory, len(grown)).get(rank, ""),
            tuple(stream.head(end).step for end in ends),
            tuple(stream.head(end).t for end in ends),
            tuple(sizes[:, rank].tolist()),
            int((grown >= grown[rank] / 2).sum()),
            len(grown),
        )
    return None


def unlike_machines(directory: RunDirectory) -> list[str]:
    """Return a sentence for each fact in which the nodes of the newest start differ."""
    with suppress(OSError):
        return [difference.sentence for difference in machine_differences(newest_machines(directory))]
    return []


def last_line(directory: RunDirectory) -> str:
    """Return the newest line of all processes' logs, shortened; empty if there is none."""
    with suppress(OSError, ValueError):
        for line in read_lines(directory, last=1):
            return f"{who(line)}: {shorten(what_happened(line.text), _CUT, placeholder=' ...')}"
    return ""


def failed_first(directory: RunDirectory) -> o.FirstFailureSeen | None:
    """Return the first failure in the logs of the newest start; None if nothing failed, or they cannot be read."""
    with suppress(OSError, ValueError):
        failure = first_logged_failure(directory)
        if failure is not None:
            line = failure.line
            text = shorten(what_happened(line.text), _CUT, placeholder=" ...")
            return o.FirstFailureSeen(who(line), text, line.t)
    return None


_TAIL_BYTES = 4 << 20
"""Bytes of the newest events that are read: some thousand logged steps."""
_HEAD_BYTES = 256 << 10
_SAMPLES, _SAMPLE_BYTES = 8, 32 << 10
_MOST_FAILURES = 64
_FAILURE = re.compile(r"attempt-(\d+)-(.+)\.failure\.json")


def observe(directory: RunDirectory, now: float, job: JobStanding | None = None) -> o.Observed:
    """Read all facts of the run in ``directory`` at ``now`` (Unix seconds). ``job`` is its state in the engine, if
    known.

    What cannot be read is left empty.
    """
    past: list[Event] = []
    events: list[Event] = []
    unreadable: list[o.UnreadableLine] = []
    events_error = ""
    try:
        past, events, unreadable = read_ends(directory.events)
    except OSError as error:
        events_error = error.strerror or str(error)
    spec: RunSpec | None = None
    with suppress(RunDirectoryError, RecursionError):
        spec = read_resolved(directory)
    record = read_small_json(directory.record)
    fingerprint = record.get("data_fingerprint")
    failures = _failures(directory)
    is_held = KernelLocks().holds(directory)
    is_finished = directory.result.exists()
    # A running run has its shards and its state itself.
    needs_files = is_held is False and not is_finished
    data_now, data_error = _data_now(spec, record, with_shards=needs_files)
    checkpoint_bytes, checkpoint_files = _checkpoint_size(directory)
    observed = o.Observed(
        run=str(directory.path),
        now=now,
        spec=spec,
        events=tuple(events),
        past=tuple(past),
        unreadable=tuple(unreadable),
        is_held=is_held,
        starts=starts if isinstance(starts := record.get("attempts"), int) else 0,
        last_line="" if events or is_held is not False else last_line(directory),
        finished=is_finished,
        fleet=_fleet(directory),
        failures=tuple(failures),
        first_failure=failed_first(directory) if failures or is_held is False else None,
        job=job,
        damaged_checkpoints=tuple(_damaged_checkpoints(directory)) if needs_files else (),
        removed_checkpoint=_removed_checkpoint(directory, events),
        checkpoint_bytes=checkpoint_bytes,
        checkpoint_files=checkpoint_files,
        checkpoints=tuple(_checkpoints(directory)),
        disk=_disk(directory),
        load=o.LoadSeen(os.getloadavg()[0], os.cpu_count() or 1) if is_held else None,
        metrics_address=coordinator_address(directory),
        machines=tuple(unlike_machines(directory)),
        throttled=tuple(read_throttling(directory, now)),
        changed_fields=tuple(map(str, run_changes(record, spec))) if spec is not None else (),
        origin=_origin(record, spec) if spec is not None else None,
        data_fingerprint=fingerprint if isinstance(fingerprint, str) else "",
        data_now=data_now,
        data_error=data_error,
        events_error=events_error,
    )
    # Dead links and processor use take a moment to read, and serve only rules on a standstill.
    is_silent = now - observed.last_t >= o.STALL_LEAST_S
    processes = tuple(processes_of(directory, with_links=is_silent)) if is_held else ()
    return replace(
        observed,
        processes=with_processor_use(processes) if is_silent and processes else processes,
        nodes=comparison.nodes_of_ranks(directory, observed.started.ranks) if observed.started else {},
        slow_ranks=tuple(slow_ranks(directory, observed.attempt)),
        memory=most_grown_memory(directory, observed.attempt),
    )


# --- events ---------------------------------------------------------------------------------------


def read_ends(path: Path) -> tuple[list[Event], list[Event], list[o.UnreadableLine]]:
    """Return (samples, newest events, unreadable lines among both): the beginning and evenly spaced parts of the stream, and its last
    ``_TAIL_BYTES``.

    All are empty if there is no such file. Raises ``OSError``.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            tail = max(0, size - _TAIL_BYTES)
            starts = [(0, min(_HEAD_BYTES, tail))] if tail else []
            starts += [(at, _SAMPLE_BYTES) for at in range(tail // _SAMPLES, tail, max(1, tail // _SAMPLES))]
            parts = [list(_between(file, start, min(start + length, tail))) for start, length in starts]
            newest = list(_between(file, tail, size))
    except FileNotFoundError:
        return [], [], []
    past = [line for part in parts for line in part if isinstance(line, Event)]
    events = [line for line in newest if isinstance(line, Event)]
    # Parts overlap in short streams.
    unreadable = {line.offset: line for part in (*parts, newest) for line in _unreadable(part)}
    return past, events, [unreadable[offset] for offset in sorted(unreadable)]


@dataclass(frozen=True)
class _UndecodedLine:
    """A line of the stream that is no event."""

    offset: int
    text: bytes

    @property
    def is_cut(self) -> bool:
        """True if it may be the beginning of an event; a file system fills blocks that it has lost with zeros."""
        return self.text.startswith(b"{") and b"\0" not in self.text


def _between(file: BinaryIO, start: int, end: int) -> Iterator[Event | _UndecodedLine]:
    """Yield the events between two offsets, and the lines that cannot be decoded; lines that are cut at either end are left out.

    A last line without its newline counts only if it is an event.
    """
    file.seek(start)
    *lines, rest = file.read(end - start).split(b"\n")
    offset = start
    for number, line in enumerate(lines):
        if line.strip() and not (start and not number):
            try:
                yield decode(line)
            except (ValueError, RecursionError):
                yield _UndecodedLine(offset, line)
        offset += len(line) + 1
    with suppress(ValueError, RecursionError):
        yield decode(rest)


def _unreadable(lines: Iterable[Event | _UndecodedLine]) -> Iterator[o.UnreadableLine]:
    """Yield the undecoded lines, with the steps around each, without those that a kill leaves: an unfinished one is the last of its start."""
    gap: list[
        tuple[_UndecodedLine, int | None]
    ] = []  # since the newest event of a rank, with the step before
    waiting: list[tuple[_UndecodedLine, int | None]] = []  # before it, and since the newest step
    step: int | None = None
    for line in lines:
        if isinstance(line, _UndecodedLine):
            gap.append((line, step))
        elif not isinstance(line.body, FROM_OUTSIDE):
            waiting += gap[:-1] if gap and gap[-1][0].is_cut and isinstance(line.body, RunStarted) else gap
            gap = []
            if isinstance(line.body, Step):
                step = line.body.step
                for cut, after in waiting:
                    yield o.UnreadableLine(cut.offset, len(cut.text), after, step)
                waiting = []
    for cut, after in [*waiting, *(gap[:-1] if gap and gap[-1][0].is_cut else gap)]:
        yield o.UnreadableLine(cut.offset, len(cut.text), after, None)


# --- processes ------------------------------------------------------------------------------------


def _failures(directory: RunDirectory) -> list[o.FailureSeen]:
    """Return the recorded failures of the newest start that has any, which may be an earlier one, by time.

    Empty if there are none, or the logs cannot be listed. At most ``_MOST_FAILURES``.
    """
    failures: list[tuple[int, o.FailureSeen]] = []
    with suppress(OSError):
        names = [
            (int(match[1]), match)
            for name in os.listdir(directory.logs)
            if (match := _FAILURE.fullmatch(name))
        ]
        newest = max((attempt for attempt, _ in names), default=0)
        for attempt, match in [item for item in names if item[0] == newest][:_MOST_FAILURES]:
            path = directory.logs / match[0]
            failure = read_failure(path.with_name(match[0].removesuffix(".failure.json") + ".log"))
            if failure is not None:
                failure_seen = o.FailureSeen(
                    match[2], failure.kind, failure.message, failure.remedy, path.stat().st_mtime
                )
                failures.append((attempt, failure_seen))
    return sorted((failure for _, failure in failures), key=lambda item: item.at)


def _fleet(directory: RunDirectory) -> FleetFile | None:
    """Return the fleet's file; None if there is none, or it cannot be read."""
    if not path_in(directory.path).exists():
        return None
    with suppress(FleetFileError):
        return read_fleet_file(directory.path)
    return None


# --- disk and data --------------------------------------------------------------------------------


def _checkpoints(directory: RunDirectory) -> list[tuple[int, float]]:
    """Return step and time of each committed checkpoint; none if they cannot be listed."""
    checkpoints = []
    with suppress(OSError):
        for step in directory.committed_steps():
            with suppress(OSError):
                checkpoints.append(
                    (step, (directory.checkpoints / f"step-{step:08d}" / "checkpoint.json").stat().st_mtime)
                )
    return checkpoints


_ORDERING = ("data.", "runtime.seed", "train.seq_len")
"""Beginnings of the paths of fields that order the samples."""


def _origin(record: dict[str, object], spec: RunSpec) -> o.OriginSeen | None:
    """Return the parent's checkpoint that ``spec`` begins from; None if there is none, or it cannot be read."""
    lineage = read_lineage(record)
    if not lineage:
        return None
    parent = RunDirectory(Path(lineage[-1].run_dir))
    with suppress(
        OSError, RunDirectoryError, RecursionError, CheckpointError, KeyError, TypeError, ValueError
    ):
        index = step_folder(parent.checkpoints, lineage[-1].step) / CHECKPOINT_INDEX
        # Fields of TrainProgress, whose module needs PyTorch: reasons are listed without it.
        extra: dict[str, Any] = decode_index(read_small(index), str(index)).extra
        parent_spec, step = read_resolved(parent), int(extra["step"])
        changes = [
            change
            for change in field_differences(parent_spec, spec)
            if change.owner == "run" and not change.path.startswith("checkpoint.")
        ]
        fingerprint = read_small_json(parent.record).get("data_fingerprint", "")
        rate = parent_spec.optimizer.lr * multiplier(parent_spec.schedule, step, parent_spec.train.steps)
        same_data = record.get("data_fingerprint") == fingerprint != ""
        return o.OriginSeen(
            str(parent.path),
            step,
            tuple(float(loss) for loss, _ in extra.get("recent", ())),
            tuple(map(str, sorted(changes, key=lambda change: not change.path.startswith("model.")))),
            lineage[-1].init_with,
            rate * float(extra.get("rate_scale", 1.0)),
            int(extra.get("next_sample", 0)),
            same_data,
            _held_out_loss(parent, parent_spec, spec, step),
            same_data and not any(change.path.startswith(_ORDERING) for change in changes),
        )
    return None


def _held_out_loss(parent: RunDirectory, parent_spec: RunSpec, spec: RunSpec, step: int) -> float | None:
    """Return the newest held-out loss of ``parent`` up to ``step``, of as many sequences as evaluations of ``spec`` score; None without one."""
    count = spec.evaluation.sequences
    evaluations = [
        event.body
        for part in read_ends(parent.events)[:2]
        for event in part
        if isinstance(event.body, Evaluated) and event.body.step <= step
    ]
    losses = [
        body.loss
        for body in evaluations
        if count
        == (
            parent_spec.evaluation.final_sequences
            if body.step == parent_spec.train.steps
            else parent_spec.evaluation.sequences
        )
    ]
    return losses[-1] if losses else None


def _damaged_checkpoints(directory: RunDirectory) -> Iterator[tuple[int, str]]:
    """Yield step and error of checkpoints whose files are not all there in their sizes, from the newest down to the first that is intact."""
    with suppress(OSError, CheckpointError):
        for step in sorted(directory.committed_steps(), reverse=True):
            try:
                DiskTier(directory.checkpoints).require_files(step)
            except CheckpointError as error:
                yield step, str(error)
            else:
                return


def _checkpoint_size(directory: RunDirectory) -> tuple[int, int]:
    """Return bytes and files of the newest checkpoint; zeros if there is none, or it cannot be read."""
    with suppress(OSError, CheckpointError):
        steps = directory.committed_steps()
        if steps:
            path = step_folder(directory.checkpoints, max(steps)) / CHECKPOINT_INDEX
            index = decode_index(read_small(path), str(path))
            files = index.world_size + len(index.catalogs) + 1  # images, catalogs, the index
            return sum(ref.data_bytes for ref in index.catalogs), files
    return 0, 0


def _removed_checkpoint(directory: RunDirectory, events: Sequence[Event]) -> int:
    """Return the newest step that was saved in this directory, if it and all newer ones are gone; else 0. Those that the run itself has set
    aside, as damaged or by an audit, are not gone."""
    saved = next((event.body for event in reversed(events) if isinstance(event.body, CheckpointSaved)), None)
    if saved is None or Path(saved.path).resolve() != directory.checkpoints.resolve():
        return 0
    with suppress(OSError):
        set_aside = directory.checkpoints.glob(
            f".damaged-{step_folder(directory.checkpoints, saved.step).name}-*"
        )
        is_there = max(directory.committed_steps(), default=0) >= saved.step or any(set_aside)
        return 0 if is_there else saved.step
    return 0


def _disk(directory: RunDirectory) -> o.DiskSeen | None:
    """Return free and total bytes, and free inodes, of the disk with the checkpoints; None if they cannot be read."""
    place = directory.checkpoints if directory.checkpoints.is_dir() else directory.path
    with suppress(OSError):
        usage, system = shutil.disk_usage(place), os.statvfs(place)
        return o.DiskSeen(usage.free, usage.total, system.f_favail if system.f_files else None)
    return None


def _data_now(spec: RunSpec | None, record: dict[str, object], *, with_shards: bool) -> tuple[str, str]:
    """Return (present fingerprint of the data, reason why they cannot be opened); one of them is empty.

    Both are empty without ``spec``, or for object stores, which may be slow. ``with_shards`` also compares the size of each
    shard with the index.
    """
    if spec is None:
        return "", ""
    try:
        data = found_again(spec.data, record, same_end=False)
        if any(is_url(address) for address in addresses(data).values()):
            return "", ""
        places = open_places(data)
        if with_shards:
            for place, split in itertools.product(places.values(), SPLITS):
                place.shards(split)
        return index_of_places(places).fingerprint, ""
    except (DataError, RunDirectoryError, StoreError, OSError) as error:
        return "", str(error)


def reasons(directory: RunDirectory, now: float, job: JobStanding | None = None) -> list[o.Reason]:
    """Return everything that is wrong with the run in ``directory`` at ``now`` (Unix seconds), worst first.

    ``job`` is the state of its job in the engine that it was submitted to, if known.
    """
    return judge(observe(directory, now, job))
