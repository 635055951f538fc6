"""The interface of an outside tracker, and the numbers that every tracker draws under the same tags.

A vendor's adapter (``tensorboard``, ``wandb``, ``mlflow``, ``trackio``) imports this module only; ``registry`` knows the vendors and
imports each when it is opened.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from phalanx.observe.event_log import EventLogError, read_events
from phalanx.observe.events import Evaluated, Event, Finished, RunStarted, Step, Stopped
from phalanx.observe.ledger.goodput import goodput
from phalanx.observe.ledger.ledger import NS_PER_S
from phalanx.observe.logs.masking import run_file_mask
from phalanx.run.read import RUN_FILE

Setting = bool | int | float | str
"""A value of a run file's field, as trackers take it."""


class Sink(Protocol):
    """A tracker that takes a run's events. All methods are called on one thread, which is not the training thread."""

    def write(self, event: Event) -> None:
        """Take one event; may block, may raise."""

    def holds(self, event: Event) -> bool:
        """Return True if the tracker had the numbers of this step or evaluation when it was opened."""

    def close(self) -> None:
        """Flush; no event follows."""


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
            named |= {f"eval/loss/{name}": loss for name, loss in body.sources.items()}
        case _:
            return {}
    return {name: float(value) for name, value in named.items() if value is not None}


def hyperparameters(run_directory: Path) -> dict[str, Setting]:
    """The fields of the resolved run file by dotted path, as trackers take them, without secrets; empty where there is none yet.

    Lists are written as text: no tracker can plot against one.
    """
    try:
        table = tomllib.loads((run_directory / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    mask = run_file_mask(table)
    return dict(_settings({name: mask.value(value) for name, value in table.items()}, ""))


def _settings(table: Mapping[str, object], prefix: str) -> Iterator[tuple[str, Setting]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, bool | int | float | str) else str(value)


def record(started: RunStarted, attempt: int) -> dict[str, object]:
    """What an attempt recorded of itself, as plain values: code, packages, machine, command, data, layout."""
    plain: dict[str, object] = json.loads(json.dumps({"attempt": attempt, **asdict(started)}, default=str))
    return plain


GOODPUT_COLUMNS = ("part", "seconds", "share")


def goodput_rows(event: Event, run_directory: Path) -> list[tuple[str, float, float]]:
    """Where the run's time went over all of its attempts, when ``event`` ends one: part, seconds, share of the time it held machines.

    First the buckets, whose shares sum to 1; then what became of the steps. Read from the run's own events, since a tracker may have been
    opened in a later attempt. Empty for other events, and where there are none to read.
    """
    if not isinstance(event.body, Finished | Stopped):
        return []
    try:
        found = goodput(read_events(run_directory / "events.jsonl"))
    except EventLogError:
        return []
    outcomes = {
        "committed steps": found.committed_ns,
        "pending steps": found.pending_ns,
        "rolled back steps": found.rollback_ns,
        "skipped steps": found.nonfinite_ns,
        "waiting for samples": found.waiting_ns,
    }
    held_ns = found.held_ns or 1
    return [
        (name, spent_ns / NS_PER_S, spent_ns / held_ns)
        for name, spent_ns in {**found.buckets_ns, **outcomes}.items()
    ]


def point_of(event: Event) -> tuple[str, int] | None:
    """The kind and the step of an event with numbers, which a tracker draws once; ``None`` for other events."""
    step = step_of(event)
    return None if step is None else (type(event.body).__name__, step)


def step_of(event: Event) -> int | None:
    """The step an event belongs to: the x-axis of every tracker."""
    return event.body.step if isinstance(event.body, Step | Evaluated) else None
