"""What a run's event stream says so far, kept small while the stream grows: a fold of its lines, one at a time.

A stream of a hundred thousand steps is read in a fraction of a second: of a line about a step only what sums need is decoded (``_Line``), the rest
of it only once somebody asks for the newest ones. Memory is bounded: the ledgers that goodput is computed from are thinned where they are old
(``_MOST_LEDGERS``), and then a rollback into the thinned past is divided evenly among the steps between two that are left.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec

from phalanx.observe.events import (
    FROM_OUTSIDE,
    CheckpointCopied,
    CheckpointSaved,
    Evaluated,
    Event,
    Finished,
    MemoryMeasured,
    Message,
    NonFinite,
    Restored,
    RunStarted,
    Step,
    Stopped,
    Torn,
    Unknown,
    decode,
)
from phalanx.observe.ledger.goodput import Goodput, goodput
from phalanx.observe.ledger.recoveries import PHASES
from phalanx.observe.throughput import typical

_WINDOW = 64
"""Newest logged steps that say what is usual."""
_MOST_LEDGERS = 2048
_TURNS = (RunStarted, Restored, NonFinite)
"""Kinds of events each of which changes what the steps around it count for."""
_STEP = b'"kind":"Step"'
_SEARCHED = 120
"""In so many first bytes a line of ours says its kind."""


class _Line(msgspec.Struct):
    """What is decoded of every line about a step."""

    t: float
    attempt: int
    kind: str
    step: int
    ledger: dict[str, float] = {}


_step_line = msgspec.json.Decoder(_Line)


@dataclass
class RunFacts:
    """The facts of a run, as far as its events were read."""

    started: RunStarted | None = None
    attempt: int = 0
    attempts: int = 0
    first_t: float = 0.0
    last_t: float = 0.0
    step: int = 0
    step_t: float = 0.0
    """When the newest step ended; 0 before the first."""
    furthest: int = 0
    steps_done: int = 0
    """All steps that were computed, the lost ones too."""
    lost_steps: int = 0
    over: str = ""
    """``finished`` or ``stopped`` once the newest attempt has ended so."""
    evaluation: Evaluated | None = None
    evaluation_seconds: float = 0.0
    saved: CheckpointSaved | None = None
    saved_t: float = 0.0
    copied: CheckpointCopied | None = None
    checkpoint_seconds: float = 0.0
    blocked_seconds: float = 0.0
    memory: MemoryMeasured | None = None
    skipped: int = 0
    moved_bytes: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Events by kind; messages also by level, as ``Message warning``."""
    ended_buckets: Counter[str] = field(default_factory=Counter)
    """Seconds by bucket of the attempts before the newest."""
    buckets: dict[str, float] = field(default_factory=dict)
    """Seconds of the newest attempt by bucket of the ledger."""
    recovery_seconds: Counter[str] = field(default_factory=Counter)
    """Seconds by phase of all recoveries."""
    recoveries: int = 0
    _recent: deque[bytes] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _steps: tuple[Step, ...] | None = ()
    _ledgers: list[Event] = field(default_factory=list)
    _most_ledgers: int = _MOST_LEDGERS
    _goodput: Goodput | None = None

    # --- asked -----------------------------------------------------------------------------------

    @property
    def recent(self) -> tuple[Step, ...]:
        """The newest logged steps, oldest first."""
        if self._steps is None:
            bodies = (decode(line).body for line in self._recent)
            self._steps = tuple(body for body in bodies if isinstance(body, Step))
        return self._steps

    @property
    def newest(self) -> Step | None:
        """The newest logged step."""
        return self.recent[-1] if self.recent else None

    @property
    def usual_step_s(self) -> float | None:
        """The median of the newest steps' seconds."""
        return typical([step.step_s for step in self.recent])

    @property
    def goodput(self) -> Goodput:
        """The goodput of the whole run, as ``phalanx goodput`` counts it."""
        if self._goodput is None:
            self._goodput = goodput(self._ledgers)
        return self._goodput

    @property
    def all_buckets(self) -> dict[str, float]:
        """Seconds by bucket of all attempts."""
        return dict(self.ended_buckets + Counter(self.buckets))

    # --- told ------------------------------------------------------------------------------------

    def take(self, line: bytes) -> None:
        """Takes the next line of the stream, without its newline; one that is no event is counted as torn."""
        if not line.strip():
            return
        self._goodput = None
        try:
            if _STEP in line[:_SEARCHED]:
                self._take_step(line)
            else:
                self._take_event(decode(line))
        except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
            self.counts[Torn.__name__] += 1

    def _take_step(self, line: bytes) -> None:
        try:
            found = _step_line.decode(line)
        except msgspec.ValidationError:  # a ledger with numbers that JSON lacks
            self._take_event(decode(line))
            return
        body = Step(found.step, 0, 0.0, 0.0, 0.0, 0, 0.0, 0.0, ledger=found.ledger)
        self._stepped(Event(found.t, found.attempt, body), body, line)

    def _take_event(self, event: Event) -> None:
        body = event.body
        if isinstance(body, Step):
            raise ValueError("a step whose ledger is no table of numbers")
        self.counts[body.kind if isinstance(body, Unknown) else type(body).__name__] += 1
        self.last_t = max(self.last_t, event.t)
        self.first_t = self.first_t or event.t
        if isinstance(body, Message):
            self.counts[f"Message {body.level}"] += 1
        if isinstance(body, FROM_OUTSIDE):
            self.copied = body if isinstance(body, CheckpointCopied) else self.copied
            return
        if not self._enter(event.attempt):
            return
        self._keep(event)
        match body:
            case RunStarted():
                self.started, self.over = body, ""
            case Restored():
                self._restored(body)
            case Evaluated():
                self.evaluation, self.evaluation_seconds = body, self.evaluation_seconds + body.seconds
            case CheckpointSaved():
                self.saved, self.saved_t = body, event.t
                self.checkpoint_seconds += body.seconds
                self.blocked_seconds += body.blocked_s
            case MemoryMeasured():
                self.memory = body
            case NonFinite(skipped=True):
                self.skipped += 1
            case Stopped() | Finished():
                self.over = "finished" if isinstance(body, Finished) else "stopped"
                self.buckets = dict(body.ledger) or self.buckets

    def _restored(self, body: Restored) -> None:
        self.moved_bytes += body.moved_bytes
        self.lost_steps += max(0, self.step - body.step)
        self.step = body.step

    def _enter(self, attempt: int) -> bool:
        """True if ``attempt`` is the newest, which it may become by this; what comes late of an older one changes nothing."""
        if not self.attempts or attempt > self.attempt:
            self.attempts += 1
            self.ended_buckets.update(self.buckets)
            self.buckets, self.attempt, self.over = {}, attempt, ""
        return attempt == self.attempt

    def _stepped(self, event: Event, body: Step, line: bytes) -> None:
        self.counts[Step.__name__] += 1
        self.first_t, self.last_t = self.first_t or event.t, max(self.last_t, event.t)
        if not self._enter(event.attempt):
            return
        if not self.buckets and self.attempts > 1:
            self.recoveries += 1
            self.recovery_seconds.update({p.value: body.ledger[p] for p in PHASES if p in body.ledger})
        self.steps_done += max(1, body.step - self.step)
        self.step, self.step_t, self.furthest = body.step, event.t, max(self.furthest, body.step)
        self.buckets = body.ledger or self.buckets
        self._recent.append(line)
        self._steps = None
        self._keep(event)

    def _keep(self, event: Event) -> None:
        """Keeps an event, since goodput follows from all of them, and thins the older half when there are many."""
        self._ledgers.append(event)
        if len(self._ledgers) > self._most_ledgers:
            old, new = self._ledgers[: -self._most_ledgers // 2], self._ledgers[-self._most_ledgers // 2 :]
            self._ledgers = [*_thinned(old), *new]
            self._most_ledgers = max(_MOST_LEDGERS, 4 * len(self._ledgers) // 3)


def _thinned(events: list[Event]) -> list[Event]:
    """Without every other step of an attempt, and of what else says how far a run has come without all but the last of its kind.

    The sums stay as they are: a ledger counts from the beginning of its attempt.
    """
    newest = {(event.attempt, type(event.body)): event for event in events}
    kept: list[Event] = []
    skip = False
    for event in events:
        if event is newest[event.attempt, type(event.body)] or isinstance(event.body, _TURNS):
            kept.append(event)
        elif isinstance(event.body, Step):
            if not skip:
                kept.append(event)
            skip = not skip
    return kept
