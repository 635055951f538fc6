"""Numbers of one run, followed as its event file grows: logged steps in a table, and events in bounded lists.

A refresh reads the appended bytes, within a time budget: a file of gigabytes is read over several requests, each of
which returns the numbers so far. Nothing here writes, locks or waits, so a run is never disturbed.

A step's event has the ledger up to it. So the last of consecutive steps has the time of all of them, unless a
checkpoint, a restart or a skipped step divides them. The steps next to such a place are kept, and read again from the
file at their offsets: ``phalanx.observe.goodput`` then returns the same result as from all events.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.observe import events as run_events
from phalanx.observe.display.state import note_of
from phalanx.observe.event_log import MOST_STEP, Row, index_beside, row_of
from phalanx.observe.lines import FileTail, read_lines_at
from phalanx.observe.throughput import format_bytes, format_duration
from phalanx.run.directory.paths import RunDirectory
from phalanx_watch.series.indexed import CHUNK_RECORDS, Chunk, StepIndex, columns_of
from phalanx_watch.series.table import NAMES, Integers, StepTable, step_row

# Marks on a curve: one line for each event of the run at a step.


LONGEST_TEXT = 500
_SPIKE = "LossSpike"
_SLOW = (run_events.IncidentKind.STRAGGLER, run_events.IncidentKind.SLOW_WITHOUT_SPARE)


@dataclass(frozen=True)
class CurveMark:
    """An event to mark on a curve: its step, time and kind."""

    step: int
    t: float
    kind: str
    """ "checkpoint", "recovery", "left" (a fleet ended an epoch), "straggler", "nonfinite", "spike", "evaluation" or "message"."""
    text: str


def mark_of(event: run_events.Event, step: int) -> CurveMark | None:
    """Return the mark of an event with its text cut at ``LONGEST_TEXT``; None for events without a mark.

    ``step`` is the last logged step before it.
    """
    mark = _mark(event, step)
    if mark is None:
        return None
    at, kind, text = mark
    return CurveMark(at, event.t, kind, text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ...")


def _mark(event: run_events.Event, step: int) -> tuple[int, str, str] | None:
    """Return step, kind and text of the mark of an event; None for events without one."""
    body = event.body
    if type(body).__name__ == _SPIKE or (isinstance(body, run_events.Unknown) and body.kind == _SPIKE):
        fields = run_events.fields_of(body)
        at = fields.get("step")
        return (at if isinstance(at, int) else step), "spike", _spike(fields)
    match body:
        case run_events.CheckpointSaved(step=at, size_bytes=size):
            return at, "checkpoint", f"checkpoint of step {at:,} is durable ({format_bytes(size)})"
        case run_events.CheckpointCopied(step=at, url=url):
            return at, "checkpoint", f"the checkpoint of step {at:,} was copied to {url}"
        case run_events.CheckpointFailed(step=at, reason=reason):
            return at, "message", f"the checkpoint of step {at:,} failed: {reason}"
        case run_events.Restored(step=at, source=source, seconds=seconds, reason=reason):
            after = f" ({reason})" if reason else ""
            took = format_duration(seconds)
            return at, "recovery", f"continues from step {at:,}, restored from {source} in {took}{after}"
        case run_events.Forked(step=at, base=base, candidates=candidates):
            return (
                base,
                "message",
                f"the fork at step {at:,} goes back to here, and trains {', '.join(candidates)}",
            )
        case run_events.ChildTaken(step=at, end=end, candidate=candidate):
            return end, "message", f"continues as the child {candidate} of the fork at step {at:,}"
        case run_events.Evaluated(step=at, loss=loss):
            return at, "evaluation", f"held-out loss {loss:.4f} after step {at:,}"
        case (
            run_events.NonFinite(step=at)
            | run_events.RanksChanged(step=at)
            | run_events.EndedEarly(step=at)
            | run_events.Stopped(step=at)
        ) if note := note_of(event):
            return at, "nonfinite" if isinstance(body, run_events.NonFinite) else "message", note[1]
        case run_events.EpochLeft(text=text, incident=incident):
            return step, "straggler" if incident in _SLOW else "left", text
        case run_events.Message(level=level, text=text, incident=incident):
            return step, "straggler" if incident in _SLOW else "message", f"{level}: {text}"
    return None


def _spike(fields: Mapping[str, object]) -> str:
    """Return the text of a spike's mark: the figure, its value and the usual one, and what the run did."""
    action = fields.get("action")
    name, value, usual = (
        ("gradient norm", "grad_norm", "typical_grad_norm")
        if fields.get("what") == "gradient norm"
        else ("loss", "loss", "typical_loss")
    )
    text = f"the {name} jumped to {_short(fields.get(value))} from about {_short(fields.get(usual))}"
    return text + (f": {action}" if action else "")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# The series.


MOST_MARKS = 20_000
MOST_STARTS = 10_000
MOST_EVALUATIONS = 5_000
MOST_SAMPLES = 2_000
MOST_OTHERS = 200_000
"""Most lines other than steps whose offsets are kept."""
MOST_MEMORY_KINDS = 16
_MOST_SPARSE = {"memory": MOST_MEMORY_KINDS, "machine": 256, "task": 256}
"""Largest number of curves whose names begin so."""
USUAL_BUDGET_S = 1.5
_NEWEST = 256
_ENDINGS = (run_events.Stopped, run_events.Finished)
_UNREADABLE = (ValueError, RecursionError, OverflowError)


class RunSeries:
    """Series of one run's events. Threads must hold ``lock`` while they read it."""

    def __init__(self, path: Path, *, chunk_records: int = CHUNK_RECORDS) -> None:
        """Begin with nothing read: the first ``refresh`` reads. ``chunk_records`` is the number of index records per read."""
        self.directory = RunDirectory(path)
        self.lock = threading.RLock()
        self._tail = FileTail(self.directory.events)
        self._index = StepIndex(index_beside(self.directory.events), chunk_records=chunk_records)
        self._more = False
        self.restarts = 0
        """Number of times that the file was replaced."""
        self._begin()

    def _begin(self) -> None:
        """Forget the content that was read: empty tables, and lists of limited length.

        The position in the file, its index and ``restarts`` stay. A caller that wants to read again moves those itself.
        """
        self.table = StepTable()
        self.marks: deque[CurveMark] = deque(maxlen=MOST_MARKS)
        self.starts: deque[run_events.Event] = deque(maxlen=MOST_STARTS)
        """Events of kind ``RunStarted``."""
        self.others: deque[tuple[int, int]] = deque(maxlen=MOST_OTHERS)
        """For each event other than a step: the number of rows before it, and the offset of its line."""
        self.evaluations: deque[tuple[run_events.Event, run_events.Evaluated]] = deque(
            maxlen=MOST_EVALUATIONS
        )
        self.measured: dict[int, int] = {}
        """Offset of the line with the statistics of layers in each measured step; of a step that was repeated, the newest."""
        self.samples: deque[tuple[run_events.Event, run_events.Sampled]] = deque(maxlen=MOST_SAMPLES)
        self.machines: run_events.MachineUsed | None = None
        """Newest use of the machines."""
        self.torn_lines = 0
        self.parsed_bytes = 0
        """Bytes that were parsed as text."""
        self.last_t: float | None = None
        """Time of the newest event."""
        self.ending: run_events.Event | None = None
        """Newest event of the ranks, if it ended an attempt."""
        self.problem = ""

    def _restart(self) -> None:
        """Begin again after the file was replaced, without its index."""
        self._begin()
        self._index.over = True  # for the replaced file
        self.restarts += 1

    @property
    def version(self) -> tuple[int, int]:
        """Version of the content: it changes with every read."""
        return self.restarts, self._tail.read_bytes

    @property
    def unread(self) -> tuple[int, int] | None:
        """Bytes read and bytes in total, while the end of the file is not reached; else None."""
        return (self._tail.read_bytes, self._tail.size_bytes) if self._more else None

    @property
    def dropped_lines(self) -> int:
        """Number of lines that are too long for an event."""
        return self._tail.dropped_lines

    @property
    def nbytes(self) -> int:
        """Approximate memory."""
        return self.table.nbytes + 400 * len(self.marks) + 100 * len(self.others) + 4000 * len(self.starts)

    def refresh(self, budget_s: float = USUAL_BUDGET_S) -> None:
        """Read appended bytes for about ``budget_s`` seconds; ``unread`` shows what is left. Raises nothing: see ``problem``."""
        with self.lock:
            until_s = time.monotonic() + budget_s
            try:
                self.problem, self._more = "", True
                if self._take_index(until_s):
                    return
                while self._more:
                    batch = self._tail.next_batch()
                    if batch.restarted:
                        self._restart()
                    self._take(batch.lines)
                    self.parsed_bytes += sum(len(line) for _, line in batch.lines)
                    self._more = batch.more
                    if time.monotonic() > until_s:
                        break
            except OSError as error:
                self._more = False
                self.problem = f"cannot read {self._tail.path}: {error.strerror}"

    def _take_index(self, until_s: float) -> bool:
        """Take the records of the index, and the lines between. Return True if time ran out at ``until_s``.

        False if the index is at its end, or is not of this part of the stream: the stream itself is read from there.
        """
        while not self._index.over and self._tail.read_bytes == self._index.read_bytes:
            chunk = self._index.next_chunk(self._tail.path)
            if chunk.stretches:  # else there may be no stream yet
                self.table.reserve(self.table.rows + self._index.rows_ahead)
                self._take_chunk(chunk)
                self._tail.skip_to(self._index.read_bytes)
            if time.monotonic() > until_s:
                return True
        return False

    def _take_chunk(self, chunk: Chunk) -> None:
        """Take parts in order; append all their steps at once if no line between them can be a step."""
        at_once = not any(stretch.may_hold_a_step for stretch in chunk.stretches)
        before = self.table.rows
        if at_once:
            self.table.append_columns(columns_of(chunk.records), len(chunk.records))
        for stretch in chunk.stretches:
            if at_once:
                for offset, line in stretch.lines:
                    self._take_other(line, offset, before)
            else:
                self._take(stretch.lines)
                self.table.append_columns(columns_of(stretch.records), len(stretch.records))
            self.parsed_bytes += sum(len(line) for _, line in stretch.lines)
            before += len(stretch.records)
            self.ending = None
        self.last_t = float(self.table.column("t")[-1])

    def _take(self, lines: tuple[tuple[int, bytes], ...]) -> None:
        """Take lines in order: steps into the table, all others one by one."""
        rows: list[Row] = []
        for offset, line in lines:
            row = step_row(line, offset)
            if row is None:
                self._flush(rows)
                self._take_other(line, offset, self.table.rows)
            else:
                rows.append(row)
        self._flush(rows)

    def _flush(self, rows: list[Row]) -> None:
        """Append rows to the table and clear the list; if they are refused together, one by one, and count bad ones as torn lines."""
        if not rows:
            return
        try:
            self.table.append(rows)
        except (ValueError, OverflowError):  # a word that is no number: one row of all
            for row in rows:
                try:
                    self.table.append([row])
                except (ValueError, OverflowError):
                    self.torn_lines += 1
        rows.clear()
        self.last_t = float(self.table.column("t")[-1]) if self.table.rows else self.last_t
        self.ending = None

    def _take_other(self, line: bytes, offset: int, before: int) -> None:
        """Take a line that the fast path does not parse, written after ``before`` rows; the table may have later ones
        already.

        A step goes into the table; other events set figures, marks and starts. An unreadable line counts as torn.
        """
        try:
            event = run_events.decode(line)
        except _UNREADABLE:
            self.torn_lines += 1
            return
        body = event.body
        self.last_t = event.t
        if isinstance(body, run_events.Step):
            row = row_of(body, event.t, event.attempt, offset, bool(body.ledger))
            if row is None:
                self.torn_lines += 1
            else:
                self._flush([row])
            return
        self.others.append((before, offset))
        if not isinstance(body, run_events.FROM_OUTSIDE):
            self.ending = event if isinstance(body, _ENDINGS) else None
        if isinstance(body, run_events.RunStarted):
            self.starts.append(event)
        elif isinstance(body, run_events.Evaluated):
            self.evaluations.append((event, body))
            self._note(body.step, "eval_loss", body.loss, before)
            self._note(body.step, "eval_bits_per_byte", body.bits_per_byte, before)
        elif isinstance(body, run_events.TaskEvaluated):
            for figure, value in body.figures.items():
                self._note(body.step, f"task.{body.task}.{figure}", value, before)
        elif isinstance(body, run_events.LayerStatistics) and len(self.measured) < MOST_OTHERS:
            self.measured[body.step] = offset
        elif isinstance(body, run_events.Sampled):
            self.samples.append((event, body))
        elif isinstance(body, run_events.MachineUsed):
            self.machines = body
            for name, value in machine_curves(body):
                self._note(body.step, name, value, before)
        elif isinstance(body, run_events.MemoryMeasured):
            for kind, size in list(body.most.items())[:MOST_MEMORY_KINDS]:
                self._note(body.step, f"memory.{kind}", size, before)
        mark = mark_of(event, self._step_before(before))
        if mark is not None and 0 <= mark.step <= MOST_STEP:
            self.marks.append(mark)

    def _note(self, step: int, name: str, value: float | None, before: int) -> None:
        """Set a number beside a step; ignored if it is None, NaN or above 1e300, or if its group has too many curves."""
        if value is None or abs(value) > 1e300 or math.isnan(value):
            return
        prefix, _, _ = name.partition(".")
        most = _MOST_SPARSE.get(prefix)
        if most is not None and name not in self.table.sparse:
            count = sum(other.startswith(f"{prefix}.") for other in self.table.sparse)
            if count >= most:
                return
        self.table.set_at(step, name, float(value), before)

    @property
    def last_step(self) -> int:
        """Last logged step; 0 before the first."""
        return self._step_before(self.table.rows)

    def _step_before(self, rows: int) -> int:
        """Return the step of the last of the first ``rows`` rows; 0 if there are none."""
        return int(self.table.column("step")[rows - 1]) if rows else 0

    def curve_names(self) -> list[str]:
        """Return the names of the curves that have a value."""
        with self.lock:
            names = [name for name in NAMES if _has_value(self.table.column(name))]
            return [*names, *sorted(self.table.sparse)]


def machine_curves(used: run_events.MachineUsed) -> Iterator[tuple[str, float]]:
    """Yield the curves of the use of machines: ``machine.FIGURE``, its ``.least`` and ``.most``, and ``machine.FIGURE@NODE`` of few machines."""
    for suffix, figures in (("", used.figures), (".least", used.least), (".most", used.most)):
        for name, value in figures.items():
            yield f"machine.{name}{suffix}", value
    for node, figures in used.by_node.items():
        for name, value in figures.items():
            yield f"machine.{name}@{node}", value


def _has_value(column: NDArray[np.generic]) -> bool:
    """Return True if a number of the column is finite. It is usually one of the newest, so these are checked first."""
    return any(bool(np.isfinite(part.astype(np.float64)).any()) for part in (column[-_NEWEST:], column))


# The few events on which goodput depends.


_MOST_WITHOUT_LEDGER = 20_000


def thinned_events(run: RunSeries) -> list[run_events.Event]:
    """Return the events of a run, in the order written, without steps that do not affect its accounts. Unreadable
    lines are skipped.

    Raises ``OSError``.
    """
    with run.lock:
        others = list(run.others)
        offsets = run.table.column("offset").astype(np.int64)
        events_by_offset = _read(run, [offset for _, offset in others])
        rows = _rows(run, [row for row, _ in others], list(events_by_offset.values()))
    steps = _read(run, offsets[rows].tolist())
    return [event for _, event in sorted((events_by_offset | steps).items())]


def _read(run: RunSeries, offsets: list[int]) -> dict[int, run_events.Event]:
    """Return the events at the offsets; missing ones are left out."""
    events_by_offset = {}
    for offset, line in zip(offsets, read_lines_at(run.directory.events, offsets), strict=True):
        try:
            events_by_offset[offset] = run_events.decode(line)
        except _UNREADABLE:
            continue
    return events_by_offset


def _rows(run: RunSeries, places: list[int], events: list[run_events.Event]) -> Integers:
    """Return the kept rows, ascending: at the ends of each attempt, next to each event other than a step, and next to
    each step that may divide the accounts.

    Also the newest steps without a ledger.
    """
    count = run.table.rows
    if not count:
        return np.zeros(0, np.int64)
    steps = run.table.column("step").astype(np.int64)
    attempts, times = run.table.column("attempt").astype(np.int64), run.table.column("t").astype(np.float64)
    kept = np.zeros(count, np.bool_)
    kept[np.flatnonzero(~run.table.column("has_ledger").astype(np.bool_))[-_MOST_WITHOUT_LEDGER:]] = True
    at = np.array(places, np.int64)
    kept[np.clip(np.concatenate((at - 1, at)), 0, count - 1)] = True
    broken = np.flatnonzero((steps[1:] <= steps[:-1]) | (attempts[1:] != attempts[:-1])) + 1
    firsts = np.concatenate(([0], broken))
    lasts = np.concatenate((broken, [count])) - 1
    cuts = [
        event.body.step
        for event in events
        if isinstance(event.body, run_events.CheckpointSaved | run_events.Restored)
    ]
    divisions = np.unique(np.concatenate((np.array(cuts, np.int64), steps[firsts] - 1)))
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        kept[[first, last, first + int(np.argmax(times[first : last + 1]))]] = True
        near = first + np.searchsorted(steps[first : last + 1], divisions)
        kept[np.clip(np.concatenate((near - 1, near, near + 1)), first, last)] = True
    return np.flatnonzero(kept)
