"""Outside trackers (TensorBoard, W&B, MLflow) that get a run's events but can never hold it up.

Trackers hang at login, throttle, and upload for hours at exit. A sink therefore lives on a thread of its
own behind a bounded queue: ``offer`` only appends to the queue, and when that is full the event is dropped
and counted. A sink that raises is tried again with the next event and given up after a few failures in
a row; one that hangs is left behind at ``close`` after a bounded wait. Nothing is lost by it: the event
file has everything, and ``fill`` can send it again.

Even opening a sink happens on its thread. Only a missing package is reported at once, before training.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from phalanx.observe.events import Evaluated, Event, Step

QUEUE_EVENTS = 4096
CLOSE_TIMEOUT_S = 5.0
FAILURES_IN_A_ROW = 5


class Sink(Protocol):
    """Where events go. All methods are called on one thread, which is not the training thread."""

    def write(self, event: Event) -> None:
        """Take one event; may block, may raise."""

    def close(self) -> None:
        """Flush; no event follows."""


class SinkError(Exception):
    """A sink was asked for that cannot be had; the message says what to install or to write."""


@dataclass(frozen=True)
class SinkHealth:
    """How a sink is doing. Every event offered is written, waiting, dropped or failed."""

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
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        self.name = name
        self._open_sink = open_sink
        self._room, self._close_timeout_s = queue_events, close_timeout_s
        self._queue: deque[Event] = deque()
        self._changed = threading.Condition()
        self._written = self._dropped = self._failed = 0
        self._busy = 0
        self._last_error = ""
        self._closing = self._given_up = False
        # A daemon: the interpreter does not wait for it at exit.
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def offer(self, event: Event) -> bool:
        """Hand over an event; False if it was dropped: the queue is full, or the sink gone."""
        with self._changed:
            if self._given_up or self._closing or len(self._queue) >= self._room:
                self._dropped += 1
                return False
            self._queue.append(event)
            self._changed.notify()
            return True

    def health(self) -> SinkHealth:
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

    def close(self) -> SinkHealth:
        """Let the sink finish what is queued, for at most ``close_timeout_s``; then leave it behind."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            self._give_up(f"did not finish within {self._close_timeout_s:g} s of closing")
        return self.health()

    def _run(self) -> None:
        try:
            sink = self._open_sink()
        except Exception as error:
            self._give_up(f"could not be opened: {_describe(error)}")
            return
        failures = 0
        while (event := self._next()) is not None:
            failures = 0 if self._written_to(sink, event) else failures + 1
            if failures == FAILURES_IN_A_ROW:
                self._give_up(f"failed {failures} times in a row, at last: {self._last_error}")
        try:
            sink.close()
        except Exception as error:
            self._give_up(f"could not be closed: {_describe(error)}")

    def _next(self) -> Event | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing or self._given_up)
            if self._given_up or not self._queue:
                return None
            self._busy = 1
            return self._queue.popleft()

    def _written_to(self, sink: Sink, event: Event) -> bool:
        problem = ""
        try:
            sink.write(event)
        except Exception as error:
            problem = _describe(error)
        with self._changed:
            self._busy = 0
            self._written += not problem
            self._failed += bool(problem)
            self._last_error = problem or self._last_error
        return not problem

    def _give_up(self, reason: str) -> None:
        with self._changed:
            self._given_up = True
            self._last_error = reason
            self._dropped += len(self._queue)
            self._queue.clear()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


# --- the sinks of a run -------------------------------------------------------------------------


@dataclass(frozen=True)
class Vendor:
    """A tracker we have an adapter for: the module it needs, and the extra that brings it."""

    module: str
    extra: str
    open_sink: Callable[[Path, str], Sink]


def _open_tensorboard(run_directory: Path, run: str) -> Sink:  # noqa: ARG001 (the folder names the run)
    from phalanx.observe.sinks.tensorboard import TensorBoardSink

    return TensorBoardSink(run_directory / "tensorboard")


def _open_wandb(run_directory: Path, run: str) -> Sink:
    from phalanx.observe.sinks.wandb import WandbSink

    return WandbSink(run_directory, run)


def _open_mlflow(run_directory: Path, run: str) -> Sink:
    from phalanx.observe.sinks.mlflow import MlflowSink

    return MlflowSink(run_directory, run)


VENDORS: Mapping[str, Vendor] = {
    "tensorboard": Vendor("tensorboardX", "tensorboard", _open_tensorboard),
    "wandb": Vendor("wandb", "wandb", _open_wandb),
    "mlflow": Vendor("mlflow", "mlflow", _open_mlflow),
}


def open_sinks(
    names: Sequence[str],
    run_directory: Path,
    run: str,
    vendors: Mapping[str, Vendor] = VENDORS,
    close_timeout_s: float = CLOSE_TIMEOUT_S,
) -> list[Background]:
    """The sinks called ``names``, each on its thread.

    Raises SinkError, before any is opened, if a name is unknown or a package is not installed.
    """
    for name in names:
        _check(name, vendors)
    return [
        Background(
            name,
            lambda vendor=vendors[name]: vendor.open_sink(run_directory, run),  # type: ignore[misc]
            close_timeout_s=close_timeout_s,
        )
        for name in names
    ]


def _check(name: str, vendors: Mapping[str, Vendor]) -> None:
    if name not in vendors:
        raise SinkError(f"there is no sink {name!r}; there are: {', '.join(sorted(vendors))}")
    vendor = vendors[name]
    if find_spec(vendor.module) is None:
        raise SinkError(
            f"the sink {name!r} needs the package {vendor.module}, which is not installed: "
            f"pip install 'phalanx-train[{vendor.extra}]'"
        )


def close_sinks(sinks: Iterable[Background]) -> list[SinkHealth]:
    """Close all at once: the wait is that of the slowest, not the sum."""
    waiting = list(sinks)
    results: dict[int, SinkHealth] = {}
    closers = [
        threading.Thread(target=lambda i=i, sink=sink: results.__setitem__(i, sink.close()))
        for i, sink in enumerate(waiting)
    ]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
    return [results[i] for i in range(len(waiting))]


def fill(sink: Sink, events: Iterable[Event]) -> None:
    """Send a recorded run to a sink, on this thread: for what was dropped, or for a tracker added later."""
    for event in events:
        sink.write(event)
    sink.close()


# --- what trackers can draw ---------------------------------------------------------------------


def scalars(event: Event) -> dict[str, float]:
    """The numbers in an event under the tags that every sink uses; empty for events without any."""
    match event.body:
        case Step() as body:
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
        case Evaluated() as body:
            named = {"eval/loss": body.loss, "eval/bits_per_byte": body.bits_per_byte}
        case _:
            return {}
    return {name: float(value) for name, value in named.items() if value is not None}


def step_of(event: Event) -> int | None:
    """The step an event belongs to: the x-axis of every tracker."""
    return event.body.step if isinstance(event.body, Step | Evaluated) else None
