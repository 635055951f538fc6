"""The metrics of a run, computed from its event stream: facts folded from the stream, and the table of metrics with how each follows from them.

The endpoint, the documentation and the tests read this one table.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec

from phalanx.observe import events as run_events
from phalanx.observe.goodput import Goodput, goodput
from phalanx.observe.ledger import PHASES, Bucket, in_seconds
from phalanx.observe.metrics.samples import Derived, Kind, Metric, MetricValues
from phalanx.observe.throughput import typical
from phalanx.run.sections.monitoring import MOST_TASKS

# The state of a run as a fold over the lines of its event stream, in bounded memory.
#
# A stream of a hundred thousand steps is read in a fraction of a second, because only the fields that sums need are decoded of
# a step's line (``_Line``). The newest lines are decoded in full at the first request for them. The older ledgers for goodput
# are thinned (``_MOST_LEDGERS``). A rollback into the thinned part is divided evenly among the steps between the two nearest
# kept ones.


_WINDOW = 64
"""Number of newest logged steps that define what is usual."""
_MOST_LEDGERS = 2048
_TURNS = (run_events.RunStarted, run_events.Restored, run_events.NonFinite)
"""Kinds of events each of which changes what the steps around it count for."""
_STEP = b'"kind":"Step"'
_SEARCHED = 120
"""A line of ours names its kind in so many first bytes."""


class _Line(msgspec.Struct):
    """The fields that are decoded of every line about a step."""

    t: float
    attempt: int
    kind: str
    step: int
    ledger: dict[str, float] = {}


_step_line = msgspec.json.Decoder(_Line)


@dataclass
class RunFacts:
    """The facts of a run, as far as its events were read."""

    started: run_events.RunStarted | None = None
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
    evaluation: run_events.Evaluated | None = None
    tasks: dict[str, run_events.TaskEvaluated] = field(default_factory=dict)
    """The newest evaluation of each task."""
    evaluation_seconds: float = 0.0
    saved: run_events.CheckpointSaved | None = None
    saved_t: float = 0.0
    copied: run_events.CheckpointCopied | None = None
    checkpoint_seconds: float = 0.0
    blocked_seconds: float = 0.0
    memory: run_events.MemoryMeasured | None = None
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
    _steps: tuple[run_events.Step, ...] | None = ()
    _ledgers: list[run_events.Event] = field(default_factory=list)
    _most_ledgers: int = _MOST_LEDGERS
    _goodput: Goodput | None = None

    # --- summaries ------------------------------------------------------------------------------------

    @property
    def recent(self) -> tuple[run_events.Step, ...]:
        """The newest logged steps, oldest first."""
        if self._steps is None:
            bodies = (run_events.decode(line).body for line in self._recent)
            self._steps = tuple(body for body in bodies if isinstance(body, run_events.Step))
        return self._steps

    @property
    def newest(self) -> run_events.Step | None:
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

    # --- updates --------------------------------------------------------------------------------------

    def take(self, line: bytes) -> None:
        """Take the next line of the stream, without its newline; one that is no event is counted as torn."""
        if not line.strip():
            return
        self._goodput = None
        try:
            if _STEP in line[:_SEARCHED]:
                self._take_step(line)
            else:
                self._take_event(run_events.decode(line))
        except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
            self.counts[run_events.Torn.__name__] += 1

    def _take_step(self, line: bytes) -> None:
        """Take a step's line, of which only position, time and ledger are decoded.

        With a ledger that JSON cannot express, it is decoded as a whole. Raises ``ValueError`` for a line that
        is no event, or whose ledger is no table of numbers.
        """
        try:
            step = _step_line.decode(line)
        except msgspec.ValidationError:  # a ledger with numbers that JSON lacks
            self._take_event(run_events.decode(line))
            return
        body = run_events.Step(step.step, 0, 0.0, 0.0, 0.0, 0, 0.0, 0.0, ledger=step.ledger)
        self._stepped(run_events.Event(step.t, step.attempt, body), body, line)

    def _take_event(self, event: run_events.Event) -> None:
        """Count an event that is no step, and update the facts by it if it is of the newest attempt.

        Events from outside are only counted, but for copies of checkpoints. Raises ``ValueError`` for a step.
        """
        body = event.body
        if isinstance(body, run_events.Step):
            raise ValueError("a step whose ledger is no table of numbers")
        self.counts[body.kind if isinstance(body, run_events.Unknown) else type(body).__name__] += 1
        self.last_t = max(self.last_t, event.t)
        self.first_t = self.first_t or event.t
        if isinstance(body, run_events.Message):
            self.counts[f"Message {body.level}"] += 1
        if isinstance(body, run_events.FROM_OUTSIDE):
            self.copied = body if isinstance(body, run_events.CheckpointCopied) else self.copied
            return
        if not self._enter(event.attempt):
            return
        self._keep(event)
        match body:
            case run_events.RunStarted():
                self.started, self.over = body, ""
            case run_events.Restored():
                self._restored(body)
            case run_events.Evaluated():
                self.evaluation, self.evaluation_seconds = body, self.evaluation_seconds + body.seconds
            case run_events.TaskEvaluated():
                if body.task in self.tasks or len(self.tasks) < MOST_TASKS:
                    self.tasks[body.task] = body
                self.evaluation_seconds += body.seconds
            case run_events.CheckpointSaved():
                self.saved, self.saved_t = body, event.t
                self.checkpoint_seconds += body.seconds
                self.blocked_seconds += body.blocked_s
            case run_events.MemoryMeasured():
                self.memory = body
            case run_events.NonFinite(skipped=True):
                self.skipped += 1
            case run_events.Stopped() | run_events.Finished():
                self.over = "finished" if isinstance(body, run_events.Finished) else "stopped"
                self.buckets = dict(body.ledger) or self.buckets

    def _restored(self, body: run_events.Restored) -> None:
        self.moved_bytes += body.moved_bytes
        self.lost_steps += max(0, self.step - body.step)
        self.step = body.step

    def _enter(self, attempt: int) -> bool:
        """Return True if ``attempt`` is the newest so far. A newer one begins with an empty ledger; the old one's
        is added up.
        """
        if not self.attempts or attempt > self.attempt:
            self.attempts += 1
            self.ended_buckets.update(self.buckets)
            self.buckets, self.attempt, self.over = {}, attempt, ""
        return attempt == self.attempt

    def _stepped(self, event: run_events.Event, body: run_events.Step, line: bytes) -> None:
        """Take a step of the newest attempt: position, ledger and recent lines; older ones are only counted.

        The first step of a later attempt is a recovery.
        """
        self.counts[run_events.Step.__name__] += 1
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

    def _keep(self, event: run_events.Event) -> None:
        """Keep an event, since goodput follows from all of them. Beyond 2,048, thin the older half."""
        self._ledgers.append(event)
        if len(self._ledgers) > self._most_ledgers:
            old, new = self._ledgers[: -self._most_ledgers // 2], self._ledgers[-self._most_ledgers // 2 :]
            self._ledgers = [*_thinned(old), *new]
            self._most_ledgers = max(_MOST_LEDGERS, 4 * len(self._ledgers) // 3)


def _thinned(events: list[run_events.Event]) -> list[run_events.Event]:
    """Drop every other step, and all but the newest event of each other kind in an attempt; starts, restores,
    non-finite steps and an attempt's last step stay.

    The sums stay as they are: a ledger counts from the beginning of its attempt.
    """
    newest = {(event.attempt, type(event.body)): event for event in events}
    kept: list[run_events.Event] = []
    skip = False
    for event in events:
        if event is newest[event.attempt, type(event.body)] or isinstance(event.body, _TURNS):
            kept.append(event)
        elif isinstance(event.body, run_events.Step):
            if not skip:
                kept.append(event)
            skip = not skip
    return kept


_EVENTS = "events.jsonl"
Computed = Callable[[RunFacts], MetricValues]


def _derived(
    name: str,
    kind: Kind,
    text: str,
    compute: Computed,
    *labels: str,
) -> Derived[RunFacts]:
    """Return a metric ``phalanx_NAME`` of a run's events, computed by ``compute``."""
    return Derived(Metric(f"phalanx_{name}", kind, text, _EVENTS, labels), compute)


def _of(field: str, name: str) -> Computed:
    """Return a function that computes ``facts.FIELD.NAME``; ``None`` while the field is unknown."""
    read = attrgetter(name)

    def compute(facts: RunFacts) -> MetricValues:
        owner = getattr(facts, field)
        value: float | None = None if owner is None else read(owner)
        return value

    return compute


def _count(kind: str) -> Computed:
    return lambda facts: facts.counts[kind]


def _by(label: str, values: Mapping[str, float]) -> MetricValues:
    return [({label: name}, value) for name, value in values.items()]


def _goodput(facts: RunFacts) -> MetricValues:
    return facts.goodput.goodput_if_kept if facts.buckets or facts.ended_buckets else None


def _outcomes(facts: RunFacts) -> MetricValues:
    """Return the seconds of steps by outcome; ``None`` without a ledger."""
    if not facts.buckets and not facts.ended_buckets:
        return None
    outcomes = in_seconds(facts.goodput.outcomes_ns)
    return _by("outcome", {name.removeprefix("discarded."): value for name, value in outcomes.items()})


def _buckets(facts: RunFacts) -> MetricValues:
    seconds = dict.fromkeys((bucket.value for bucket in Bucket), 0.0)
    return _by("bucket", {name: value for name, value in facts.all_buckets.items() if name in seconds})


def _memory(facts: RunFacts) -> MetricValues:
    return None if facts.memory is None else _by("kind", {k: float(v) for k, v in facts.memory.most.items()})


def _tasks(facts: RunFacts) -> MetricValues:
    """Return the figures of each task's last evaluation, labeled by task and figure."""
    return [
        ({"task": body.task, "figure": name}, value)
        for body in facts.tasks.values()
        for name, value in body.figures.items()
    ]


def _recovery_seconds(facts: RunFacts) -> MetricValues:
    return _by("phase", {phase.value: facts.recovery_seconds[phase.value] for phase in PHASES})


def _messages(facts: RunFacts) -> MetricValues:
    return [({"level": level}, facts.counts[f"Message {level}"]) for level in ("info", "warning", "error")]


def _state(facts: RunFacts) -> MetricValues:
    now = facts.over or ("training" if facts.step_t else "starting" if facts.attempts else "")
    states = ("starting", "training", "stopped", "finished")
    return [({"state": state}, float(state == now)) for state in states]


def _software(facts: RunFacts) -> MetricValues:
    """Return an info sample with device, first 12 digits of the commit, and PyTorch version; ``None`` before the
    start.

    Parts that are unknown are empty.
    """
    if facts.started is None:
        return None
    environment = facts.started.environment
    code, packages = environment.get("code"), environment.get("packages")
    commit = str(code.get("git_commit") or "")[:12] if isinstance(code, dict) else ""
    torch = str(packages.get("torch") or "") if isinstance(packages, dict) else ""
    return [({"device": facts.started.device, "commit": commit, "torch": torch}, 1.0)]


RUN_METRICS: tuple[Derived[RunFacts], ...] = (
    _derived("run_info", "info", "Device, commit and PyTorch of the newest attempt.", _software, "device", "commit", "torch"),
    _derived("run_state", "gauge", "1 for the state that the run is in, by its last event.", _state, "state"),
    _derived("run_steps", "gauge", "Step at which the run is complete.", _of("started", "steps")),
    _derived("run_ranks", "gauge", "Ranks of the newest attempt.", _of("started", "ranks")),
    _derived("run_parameters", "gauge", "Parameters of the model.", _of("started", "parameters")),
    _derived("attempts_total", "counter", "Lives of the run: starts, and epochs of a fleet.", lambda f: f.attempts),
    _derived("step", "gauge", "Newest step of the line that the weights descend from.", lambda f: f.step if f.attempts else None),
    _derived("last_event_timestamp_seconds", "gauge", "Unix time of the newest event.", lambda f: f.last_t or None),
    _derived("last_step_timestamp_seconds", "gauge", "Unix time at which the newest step ended.", lambda f: f.step_t or None),
    _derived("steps_total", "counter", "Steps computed, those that were lost again included.", lambda f: f.steps_done),
    _derived("lost_steps_total", "counter", "Steps that were lost and computed again.", lambda f: f.lost_steps),
    _derived("loss", "gauge", "Training loss of the newest logged step, in nats a token.", _of("newest", "loss")),
    _derived("bits_per_byte", "gauge", "The same in bits a byte of text.", _of("newest", "bits_per_byte")),
    _derived("grad_norm", "gauge", "Gradient norm of the newest logged step, before clipping.", _of("newest", "grad_norm")),
    _derived("learning_rate", "gauge", "Learning rate of the newest logged step.", _of("newest", "lr")),
    _derived("tokens", "gauge", "Tokens that the weights were trained on.", _of("newest", "tokens")),
    _derived("tokens_per_second", "gauge", "Tokens a second in the newest logged step.", _of("newest", "tokens_per_s")),
    _derived("step_seconds", "gauge", "Seconds of the newest logged step, without evaluations and checkpoints.", _of("newest", "step_s")),
    _derived("usual_step_seconds", "gauge", "Median of the newest logged steps' seconds.", lambda f: f.usual_step_s),
    _derived("mfu_ratio", "gauge", "Model FLOPs utilization of the newest logged step.", _of("newest", "mfu")),
    _derived("expert_balance_ratio", "gauge", "Largest load of an expert over the mean of its layer, in the worst layer.", _of("newest", "balance")),
    _derived("peak_memory_bytes", "gauge", "Peak memory of the first rank's device in the newest logged step.", _of("newest", "peak_memory_bytes")),
    _derived("memory_bytes", "gauge", "Memory by kind on the rank with most, when it was last measured.", _memory, "kind"),
    _derived("goodput_ratio", "gauge", "Share of the time so far that went into steps which still count.", _goodput),
    _derived("ledger_seconds_total", "counter", "Time by bucket of the goodput ledger, over all attempts.", _buckets, "bucket"),
    _derived("outcome_seconds", "gauge", "Time in steps by what has become of it.", _outcomes, "outcome"),
    _derived("recoveries_total", "counter", "Attempts after the first that completed a step.", lambda f: f.recoveries),
    _derived("recovery_seconds_total", "counter", "Time that these took before their first step, by phase.", _recovery_seconds, "phase"),
    _derived("recovery_moved_bytes_total", "counter", "Bytes of state fetched from other nodes' memory.", lambda f: f.moved_bytes),
    _derived("epochs_left_total", "counter", "Epochs that a fleet has ended, for faults or as planned.", _count("EpochLeft")),
    _derived("messages_total", "counter", "Lines for people in the event stream, by level.", _messages, "level"),
    _derived("checkpoints_total", "counter", "Checkpoints saved.", _count("CheckpointSaved")),
    _derived("checkpoint_failures_total", "counter", "Checkpoints that could not be written.", _count("CheckpointFailed")),
    _derived("checkpoint_step", "gauge", "Step of the newest checkpoint.", _of("saved", "step")),
    _derived("checkpoint_timestamp_seconds", "gauge", "Unix time at which the newest checkpoint was durable.", lambda f: f.saved_t or None),
    _derived("checkpoint_size_bytes", "gauge", "Size of the newest checkpoint, all ranks together.", _of("saved", "size_bytes")),
    _derived("checkpoint_seconds_total", "counter", "Time from the beginning of each save until it was durable.", lambda f: f.checkpoint_seconds),
    _derived("checkpoint_blocked_seconds_total", "counter", "The part of it for which training stood still.", lambda f: f.blocked_seconds),
    _derived("checkpoint_copied_step", "gauge", "Step of the newest checkpoint in the object store.", _of("copied", "step")),
    _derived("evaluations_total", "counter", "Evaluations on held-out text.", _count("Evaluated")),
    _derived("evaluation_seconds_total", "counter", "Time in evaluations.", lambda f: f.evaluation_seconds),
    _derived("evaluation_step", "gauge", "Step of the newest evaluation.", _of("evaluation", "step")),
    _derived("evaluation_loss", "gauge", "Loss on held-out text in the newest evaluation.", _of("evaluation", "loss")),
    _derived("evaluation_bits_per_byte", "gauge", "The same in bits a byte.", _of("evaluation", "bits_per_byte")),
    _derived("task_figure", "gauge", "Figures of each task in its newest evaluation.", _tasks, "task", "figure"),
    _derived("nonfinite_steps_total", "counter", "Steps with a loss or gradient that was not finite.", _count("NonFinite")),
    _derived("skipped_steps_total", "counter", "Those of them that changed no weight.", lambda f: f.skipped),
    _derived("loss_spikes_total", "counter", "Steps whose loss was far above what is usual.", _count("LossSpike")),
    _derived("torn_events_total", "counter", "Lines of the event stream that are no events.", _count("Torn")),
)  # fmt: skip
