"""The cost of each recovery of a run, read from its events.

Every epoch of a fleet's membership writes its events as an attempt of its own, whose ledger begins where the last one's
ended. What that ledger holds by its first step, beside the step itself, is what the recovery took, phase by phase.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.observe.events import Event, Restored, Step
from phalanx.observe.ledger.ledger import Bucket

PHASES = (
    Bucket.FAULT_UNDETECTED,
    Bucket.FAULT_DRAIN,
    Bucket.RECONFIGURE,
    Bucket.START_RENDEZVOUS,
    Bucket.START_PLAN_COMPILE,
    Bucket.START_RESTORE,
    Bucket.START_DATA_SEEK,
    Bucket.START_WARMUP,
)
"""Buckets that a recovery may fill, in order."""


@dataclass(frozen=True)
class Recovery:
    """One recovery: from the end of an epoch to the first step of the next one."""

    attempt: int
    resumed_step: int
    """The step whose state it went on from; 0 is the beginning."""
    lost_steps: int
    """Steps that had ended and had to be computed again."""
    seconds: dict[str, float]
    """By phase, to the beginning of the first step."""
    moved_bytes: int = 0
    """Bytes that ranks fetched from other nodes' memory to restore the state."""


def recoveries(events: Iterable[Event], first_attempt: int) -> list[Recovery]:
    """All recoveries after ``first_attempt``, in order; of epochs that ended before their first step, none."""
    found: list[Recovery] = []
    restored: dict[int, Restored] = {}
    done, seen = 0, {first_attempt}
    for event in events:
        body = event.body
        if event.attempt < first_attempt:
            continue
        if isinstance(body, Restored):
            restored[event.attempt] = body
        if not isinstance(body, Step):
            continue
        if event.attempt not in seen:
            seen.add(event.attempt)
            source = restored.get(event.attempt, Restored(0, ""))
            lost = max(0, done - source.step)
            seconds = {phase.value: body.ledger[phase] for phase in PHASES if phase in body.ledger}
            found.append(Recovery(event.attempt, source.step, lost, seconds, source.moved_bytes))
        done = body.step
    return found
