"""The interface of an outside tracker, and the numbers that every tracker draws under the same tags.

A vendor's adapter (``tensorboard``, ``wandb``, ``mlflow``, ``trackio``) imports this module only; ``sink_registry`` finds the vendors
among the plug-ins, and imports each when it is opened.

The last section feeds a tracker from a thread of its own.
"""

import json
import re
import threading
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from phalanx.observe import events as run_events
from phalanx.observe.event_log import EventLogError, read_events
from phalanx.observe.goodput import goodput
from phalanx.observe.ledger import NS_PER_S
from phalanx.observe.logs.masking import run_file_mask
from phalanx.run.read import RUN_FILE

Setting = bool | int | float | str
"""A value of a run file's field, as trackers take it."""


class Sink(Protocol):
    """A tracker that takes a run's events. All methods are called on one thread, which is not the training thread."""

    def write(self, event: run_events.Event) -> None:
        """Take one event; may block, may raise."""

    def holds(self, event: run_events.Event) -> bool:
        """Return True if the tracker had the numbers of this step or evaluation when it was opened."""

    def close(self) -> None:
        """Flush; no event follows."""


def scalars(event: run_events.Event) -> dict[str, float]:
    """Return the numbers in an event under the tags that every sink uses ("train/loss"); empty for events without
    any.

    Unknown numbers are left out.
    """
    match event.body:
        case run_events.Step() as body:
            named = {
                "train/loss": body.loss,
                "train/grad_norm": body.grad_norm,
                "train/lr": body.lr,
                "train/tokens": body.tokens,
                "train/bits_per_byte": body.bits_per_byte,
                "speed/tokens_per_s": body.tokens_per_s,
                "speed/step_s": body.step_s,
                "speed/mfu": body.mfu,
                "speed/goodput": body.goodput,
                "speed/peak_memory_bytes": body.peak_memory_bytes,
            }
        case run_events.Evaluated() as body:
            named = {"eval/loss": body.loss, "eval/bits_per_byte": body.bits_per_byte}
            named |= {f"eval/loss/{name}": loss for name, loss in body.sources.items()}
        case run_events.TaskEvaluated() as body:
            named = {f"task/{body.task}/{name}": value for name, value in body.figures.items()}
        case run_events.LayerStatistics() as body:
            named = {
                f"layer/{layer}/{figure.replace('.', '/')}": value
                for figure, values in body.figures.items()
                for layer, value in zip(body.layers, values, strict=False)
            }
        case _:
            return {}
    return {name: float(value) for name, value in named.items() if value is not None}


def texts(event: run_events.Event) -> dict[str, str]:
    """The text in an event under the tag that every sink uses; empty for events without any."""
    body = event.body
    return {f"sample/{body.sample}": body.prompt + body.text} if isinstance(body, run_events.Sampled) else {}


def hyperparameters(run_directory: Path) -> dict[str, Setting]:
    """Return the fields of the resolved run file by dotted path, as trackers take them. In their values, secrets are
    masked. Empty if the file cannot be read.

    Lists are written as text: no tracker can plot against one.
    """
    try:
        table = tomllib.loads((run_directory / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    mask = run_file_mask(table)
    return dict(_settings({name: mask.value(value) for name, value in table.items()}, ""))


def _settings(table: Mapping[str, object], prefix: str) -> Iterator[tuple[str, Setting]]:
    """Yield (dotted path, value) of each field of a table, recursively; other values than numbers and text become
    text.
    """
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, bool | int | float | str) else str(value)


def record(started: run_events.RunStarted, attempt: int) -> dict[str, object]:
    """The record of an attempt, as plain values: code, packages, machine, command, data, layout."""
    plain: dict[str, object] = json.loads(json.dumps({"attempt": attempt, **asdict(started)}, default=str))
    return plain


GOODPUT_COLUMNS = ("part", "seconds", "share")


def goodput_rows(event: run_events.Event, run_directory: Path) -> list[tuple[str, float, float]]:
    """Return (part, seconds, share of the held time) over all attempts of the run, if ``event`` ends one; else
    empty.

    First the buckets, whose shares sum to 1; then the outcomes of the steps. Read from the run's own events, since
    a tracker may have been opened in a later attempt. Empty if these cannot be read.
    """
    if not isinstance(event.body, run_events.Finished | run_events.Stopped):
        return []
    try:
        account = goodput(read_events(run_directory / "events.jsonl"))
    except EventLogError:
        return []
    outcomes = {
        "committed steps": account.committed_ns,
        "pending steps": account.pending_ns,
        "rolled back steps": account.rollback_ns,
        "skipped steps": account.nonfinite_ns,
        "waiting for samples": account.waiting_ns,
    }
    total_ns = account.total_ns or 1
    return [
        (name, spent_ns / NS_PER_S, spent_ns / total_ns)
        for name, spent_ns in {**account.buckets_ns, **outcomes}.items()
    ]


def point_of(event: run_events.Event) -> tuple[str, int] | None:
    """Return the kind and the step of an event with numbers or text, which a tracker draws once; ``None`` for other events."""
    step = step_of(event)
    if step is None:
        return None
    kind = type(event.body).__name__
    match event.body:
        case run_events.TaskEvaluated(task=name) | run_events.Sampled(sample=name):
            return f"{kind} {name}", step
    return kind, step


_POINT_OF_TAG = {
    "train/loss": run_events.Step.__name__,
    "eval/loss": run_events.Evaluated.__name__,
    "layer/0/residual/rms": run_events.LayerStatistics.__name__,
}
_NAMED_TAG = re.compile(r"(task|sample)/([^/]+)/(bits_per_byte|text_summary)")
"""Tag of a task, or of a sample in TensorBoard, which adds the end."""


def kind_of_tag(tag: str) -> str | None:
    """Return the kind of point, as ``point_of`` has it, whose points all have this tag; ``None`` for other tags."""
    named = _NAMED_TAG.fullmatch(tag)
    if named is None:
        return _POINT_OF_TAG.get(tag)
    return f"{(run_events.TaskEvaluated if named[1] == 'task' else run_events.Sampled).__name__} {named[2]}"


def step_of(event: run_events.Event) -> int | None:
    """Return the step of an event with numbers or text, the x-axis of every tracker; ``None`` for other events."""
    points = (
        run_events.Step
        | run_events.Evaluated
        | run_events.TaskEvaluated
        | run_events.LayerStatistics
        | run_events.Sampled
    )
    return event.body.step if isinstance(event.body, points) else None


# Feed a tracker (TensorBoard, W&B, MLflow) from a thread of its own, so that it can never delay training.
#
# Trackers hang at login, throttle, and upload for hours at exit. So each sink, including its opening, runs on its own thread
# behind a bounded queue. ``offer`` only appends to the queue; if it is full, the event is dropped and counted. A sink that
# raises is tried again with the next event, and given up after a few failures in a row. ``close`` waits for a hanging sink for
# a bounded time: a minute at a run's end, seconds before a fleet's recovery. No event is lost, because ``phalanx sinks fill``
# sends all of the event file again.


QUEUE_EVENTS = 4096
CLOSE_TIMEOUT_S = 5.0
"""At the end of an attempt that is to be followed by another at once."""
END_TIMEOUT_S = 60.0
"""At the end of a run: W&B and MLflow take many seconds to start, which a short run does not last. Less than a fleet waits for a
step (``fleet.stall_s``), so that nobody takes it for a hang."""
SILENT_S = 2.0
"""A longer wait is reported."""
FAILURES_IN_A_ROW = 5


def none_missing(_holds: Callable[[run_events.Event], bool]) -> Iterable[run_events.Event]:
    """Return no event: the sink is sent what is offered, and nothing of earlier starts."""
    return ()


@dataclass(frozen=True)
class SinkHealth:
    """The counters of a sink. Every event offered is written, waiting, dropped or failed."""

    name: str
    written: int
    waiting: int
    dropped: int
    failed: int
    last_error: str
    given_up: bool


class Background:
    """A sink behind a bounded queue, with one writer thread.

    ``open_sink`` runs on that thread. ``offer`` and ``health`` never block on the sink.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Sink],
        queue_events: int = QUEUE_EVENTS,
        missing: Callable[[Callable[[run_events.Event], bool]], Iterable[run_events.Event]] = none_missing,
    ) -> None:
        """Start the writing thread, which opens the sink and first sends it the ``missing`` events of earlier
        starts.

        ``missing`` yields them, given the sink's ``holds``. ``queue_events`` bounds the queue.
        """
        self.name = name
        self._open_sink, self._missing = open_sink, missing
        self._resent: set[tuple[str, int]] = set()
        self._room = queue_events
        self._queue: deque[run_events.Event] = deque()
        self._changed = threading.Condition()
        self._written = self._dropped = self._failed = 0
        self._busy = 0
        self._last_error = ""
        self._closing = self._given_up = False
        # A daemon: the interpreter does not wait for it at exit.
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def offer(self, event: run_events.Event) -> bool:
        """Queue an event. Return False, and count it as dropped, if the queue is full, or the sink is closing or
        was given up.
        """
        with self._changed:
            if self._given_up or self._closing or len(self._queue) >= self._room:
                self._dropped += 1
                return False
            self._queue.append(event)
            self._changed.notify()
            return True

    def health(self) -> SinkHealth:
        """Return the sink's counters as of now."""
        with self._changed:
            return SinkHealth(
                self.name,
                self._written,
                len(self._queue) + self._busy,
                self._dropped,
                self._failed,
                self._last_error,
                self._given_up,
            )

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> SinkHealth:
        """Let the sink finish what is queued, for at most ``timeout_s``, then give it up; return its counters."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._give_up(f"did not finish within {timeout_s:g} s of closing")
        return self.health()

    def _run(self) -> None:
        """Open the sink and write to it until closed, then close it. Any error of the sink is counted or gives it
        up, not raised.

        It is given up if it cannot be opened or closed, or fails five times in a row.
        """
        try:
            sink = self._open_sink()
        except Exception as error:
            self._give_up(f"could not be opened: {_describe(error)}")
            return
        failures = 0
        for event in self._all_events(sink):
            failures = 0 if self._write(sink, event) else failures + 1
            if failures == FAILURES_IN_A_ROW:
                self._give_up(f"failed {failures} times in a row, at last: {self._last_error}")
        try:
            sink.close()
        except Exception as error:
            self._give_up(f"could not be closed: {_describe(error)}")

    def _all_events(self, sink: Sink) -> Iterator[run_events.Event]:
        """Yield the events that the sink lacks of earlier starts, then those that are offered."""
        for event in self._missing(sink.holds):
            point = point_of(event)
            if self._given_up:
                return
            if point is not None and point not in self._resent:
                self._resent.add(point)
                yield event
        while (event := self._next()) is not None:  # type: ignore[assignment]
            yield event

    def _next(self) -> run_events.Event | None:
        """Wait for the next event and return it; ``None`` once closed and empty, or given up."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing or self._given_up)
            if self._given_up or not self._queue:
                return None
            self._busy = 1
            return self._queue.popleft()

    def _write(self, sink: Sink, event: run_events.Event) -> bool:
        """Write an event unless the sink has it already. Return False if the sink raised.

        Only offered events are counted, as written or failed.
        """
        problem, is_offered = "", self._busy == 1
        # A step that is computed again has the numbers that the tracker holds.
        is_held = is_offered and (point_of(event) in self._resent or sink.holds(event))
        try:
            if not is_held:
                sink.write(event)
        except Exception as error:
            problem = _describe(error)
        with self._changed:
            self._busy = 0
            self._written += is_offered and not problem
            self._failed += is_offered and bool(problem)
            self._last_error = problem or self._last_error
        return not problem

    def _give_up(self, reason: str) -> None:
        """Drop the queue, counted as dropped, and refuse later events; ``reason`` becomes the last error."""
        with self._changed:
            self._given_up = True
            self._last_error = reason
            self._dropped += len(self._queue)
            self._queue.clear()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def close_sinks(
    sinks: Iterable[Background],
    timeout_s: float = CLOSE_TIMEOUT_S,
    notify: Callable[[str], None] = lambda _text: None,
    silent_s: float = SILENT_S,
) -> list[SinkHealth]:
    """Close all at once, each within ``timeout_s``: the wait is that of the slowest, not the sum. Return their
    counters, in order.

    If it takes longer than ``silent_s``, ``notify`` receives a sentence with the sinks and the longest time.
    """
    waiting = list(sinks)
    with ThreadPoolExecutor(max(1, len(waiting))) as pool:
        closing = [pool.submit(sink.close, timeout_s) for sink in waiting]
        _, unfinished = wait(closing, silent_s)
        late = [sink.name for sink, future in zip(waiting, closing, strict=True) if future in unfinished]
        if late:
            notify(
                f"waiting for {' and '.join(late)} to take what the run has sent, for at most {timeout_s:g} s"
            )
        return [future.result() for future in closing]
