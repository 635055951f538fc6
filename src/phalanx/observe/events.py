"""The event stream of a run: everything that is shown about a run is drawn from one file.

A run directory holds ``events.jsonl``, one JSON object a line, appended by every attempt at the run
(an attempt is one life of the job: a restart after a crash is the next). The live display, the loss
curve, the goodput report and the sinks are all functions of this stream, so a view can be drawn while
the run goes on, after it died, or on another machine, and all views agree.

A line is ``{"t": unix seconds, "attempt": n, "kind": "Step", ...}``. Three rules keep it readable:

* A line that a killed writer left torn is reported as ``Torn``, and reading goes on (``event_log``).
* JSON has no NaN: non-finite numbers are the strings "NaN", "Infinity" and "-Infinity".
* A kind or a shape that this version does not know is kept as ``Unknown``, never an error.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, get_args

import msgspec

from phalanx.run.directory.files import plain_json


class IncidentKind(StrEnum):
    """Kind of an incident, for programs. Rules, metrics and commands match on it, and never on the text beside it."""

    NOTE = "note"
    """No program acts on it."""
    LOST = "lost"
    """A node is lost, or has lost its workers."""
    STRAGGLER = "straggler"
    """A node computes more slowly than its peers, and was quarantined."""
    SLOW_WITHOUT_SPARE = "slow-without-spare"
    """A node computes more slowly than its peers, and is kept because no spare is free."""
    HARDWARE = "hardware"
    """A node's health check found errors."""
    CORRUPTION = "corruption"
    """An audit found that a node computed wrongly."""
    NOT_FINITE = "not-finite"
    """A step was not finite on a node."""
    DATA_WAIT = "data-wait"
    """Samples have not arrived for long."""
    PROFILE_REFUSED = "profile-refused"
    """A request for a profile is not followed."""


@dataclass(frozen=True)
class RunStarted:
    """An attempt began. ``steps`` is the step at which the run is complete."""

    run: str
    steps: int
    ranks: int = 1
    layout: dict[str, int] = field(default_factory=dict)
    """Degrees of the axes over which the ranks are divided, those above 1."""
    device: str = ""
    parameters: int | None = None
    peak_flops_per_s: float | None = None
    """Peak FLOP/s of all ranks together: 100 % MFU."""
    peak_source: str = ""
    """Source of the peak: a data sheet, or a matrix product measured at start."""
    xz_bits_per_byte: float | None = None
    """Bits per byte that ``xz -9`` needs for the held-out text: the baseline."""
    environment: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Restored:
    """State was loaded; the next step to run is ``step + 1``. Later steps done before are done again."""

    step: int
    source: str
    seconds: float = 0.0
    reason: str = ""
    moved_bytes: int = 0
    """Bytes that all ranks together fetched from other nodes' memory."""


@dataclass(frozen=True)
class Step:
    """Step ``step`` of ``steps`` is done (steps count from 1).

    A run may log every k-th step only: an event then stands for all steps since the last one.
    """

    step: int
    steps: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    """Tokens trained on since the run began, over all attempts."""
    tokens_per_s: float
    step_s: float
    """Seconds of this one step, evaluations and checkpoints left out."""
    mfu: float | None = None
    """Model FLOPs utilization, 0 to 1."""
    bits_per_byte: float | None = None
    goodput: float | None = None
    """0 to 1, of this attempt so far."""
    ledger: dict[str, float] = field(default_factory=dict)
    """Bucket -> seconds since the attempt began; see ``ledger.Ledger.seconds``."""
    peak_memory_bytes: int | None = None
    balance: float | None = None
    """Load imbalance of a mixture of experts: the largest load of an expert over the mean of its layer, in the worst layer.
    Tokens are never dropped."""
    logged_s: float = 0.0
    """Seconds in the steps that this event stands for, on the first rank."""
    data_wait_s: float = 0.0
    """Seconds of these in which it waited for samples."""
    data_store: dict[str, int] = field(default_factory=dict)
    """Reads of the first rank from datasets in object stores since the attempt began: ``asked_bytes`` of samples, ``fetched_bytes`` that were not
    in the cache, in so many ``requests``."""


@dataclass(frozen=True)
class MemoryMeasured:
    """Memory use in step ``step`` by kind (``phalanx.train.step.meters``), in bytes, on the rank with most and the one with least."""

    step: int
    most: dict[str, int] = field(default_factory=dict)
    least: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluated:
    """The held-out text was scored with the weights after ``step``. ``loss`` is in nats a token."""

    step: int
    loss: float
    bits_per_byte: float | None = None
    seconds: float = 0.0
    sources: dict[str, float] = field(default_factory=dict)
    """The loss on the held-out text of each source, by name, if the run has several."""


@dataclass(frozen=True)
class TaskEvaluated:
    """A task was scored with the weights after ``step``."""

    step: int
    task: str
    scored_as: str
    """The kind of task: "choice", "completion" or "text"."""
    items: int
    figures: dict[str, float] = field(default_factory=dict)
    """By name: ``accuracy`` and ``accuracy_error`` (0 to 1), ``accuracy_per_character``, ``bits_per_byte``, as far as the kind has them."""
    cut: int = 0
    """Sequences whose context was too long for the model and lost its beginning."""
    sha256: str = ""
    """SHA-256 of the task's file, in hex."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Evaluating:
    """An evaluation with the weights after ``step`` goes on: ``done`` of ``sequences`` are scored. Short ones log no such event."""

    step: int
    done: int
    sequences: int


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is durable: a restart can begin from ``step``."""

    step: int
    path: str
    size_bytes: int = 0
    """Bytes of all ranks' images."""
    seconds: float = 0.0
    blocked_s: float = 0.0
    """The part of ``seconds`` for which training stood still."""


@dataclass(frozen=True)
class CheckpointFailed:
    """A checkpoint could not be written; training goes on, the last good one still stands."""

    step: int
    path: str
    reason: str


@dataclass(frozen=True)
class CheckpointCopied:
    """A checkpoint on disk is in the object store ``url`` too, ``seconds`` after its copy was begun."""

    step: int
    url: str
    seconds: float = 0.0


@dataclass(frozen=True)
class NonFinite:
    """A loss or gradient was NaN or infinite; ``skipped`` means that the step changed no weight."""

    step: int
    what: str
    skipped: bool
    first_sample: int = 0
    """The first sample of the step's batch, in the run's order."""
    samples: int = 0
    """How many it has; 0 if that was not recorded."""
    ranks: list[int] = field(default_factory=list)
    """The ranks whose own losses were not finite."""
    slots: list[int] = field(default_factory=list)
    """The first slots whose losses were not finite."""
    parameters: list[str] = field(default_factory=list)
    """The first parameters whose gradients were not finite."""


@dataclass(frozen=True)
class LossSpike:
    """The loss or gradient norm of ``step`` was far above that of the steps before (``phalanx.train.step.rules``)."""

    step: int
    loss: float
    grad_norm: float
    typical_loss: float
    """The median of the window before."""
    deviations: float
    """By how many deviations the loss or the norm, whichever has more, is above its median."""
    action: Literal["continue", "stop", "skip"]
    """The action that ``train.on_spike`` names. After "skip" and "stop" the step changed no weight."""
    first_sample: int
    """The first sample of the step's batch, in the run's order."""
    samples: int
    """How many it has."""
    typical_grad_norm: float = 0.0
    what: str = "loss"
    """The figure that rose: "loss" or "gradient norm"."""
    slot: int | None = None
    """The slot with the largest loss, if losses by slot are known."""
    slot_loss: float | None = None


@dataclass(frozen=True)
class RanksChanged:
    """The fleet grew or shrank; the bits do not care."""

    step: int
    ranks: int
    reason: str = ""


@dataclass(frozen=True)
class Message:
    """A log line for people."""

    level: Literal["info", "warning", "error"]
    text: str
    incident: IncidentKind = IncidentKind.NOTE
    node: str = ""
    """The node of a fleet that it concerns; empty if it concerns no single one."""


@dataclass(frozen=True)
class EpochLeft:
    """A fleet ends epoch ``epoch``, one of the run's attempts; another one follows, or the fleet waits for nodes."""

    epoch: int
    reason: str
    incident: IncidentKind = IncidentKind.NOTE

    @property
    def text(self) -> str:
        """The event as a line for people."""
        return f"leave epoch {self.epoch}: {self.reason}"


@dataclass(frozen=True)
class Stopped:
    """The attempt ended before the last step, on request or by an error it could still report."""

    step: int
    reason: str
    ledger: dict[str, float] = field(default_factory=dict)
    """As in ``Step``."""


@dataclass(frozen=True)
class Finished:
    """The run is complete. ``result`` has what one compares: run_dir, step, loss, weights_sha256 ..."""

    result: dict[str, Any]
    ledger: dict[str, float] = field(default_factory=dict)
    """As in ``Step``."""


@dataclass(frozen=True)
class Unknown:
    """Something a newer (or broken) version wrote, kept as it stands."""

    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Torn:
    """Line ``line`` (from 1) is no JSON object: its writer was killed in the middle of it."""

    line: int
    text: str


Known = (
    RunStarted
    | Restored
    | Step
    | MemoryMeasured
    | Evaluated
    | TaskEvaluated
    | Evaluating
    | CheckpointSaved
    | CheckpointFailed
    | CheckpointCopied
    | NonFinite
    | LossSpike
    | RanksChanged
    | Message
    | EpochLeft
    | Stopped
    | Finished
)
Body = Known | Unknown | Torn
FROM_OUTSIDE = (Message, EpochLeft, CheckpointCopied, CheckpointFailed)
"""Kinds that a process beside the ranks, such as a fleet's coordinator or an agent that copies checkpoints, writes under its own attempt and
after they have gone."""

KINDS: Mapping[str, type[Known]] = {kind.__name__: kind for kind in get_args(Known)}
_LATEST_S = 1e10
"""The year 2286, in unix seconds: a later time is a damaged line, which would break clocks and sums."""
ENVELOPE = ("t", "attempt", "kind")
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class Event:
    """An entry of the event stream: its body, its time (unix seconds) and its attempt (from 0)."""

    t: float
    attempt: int
    body: Body


# --- one line <-> one event ---------------------------------------------------------------------


def encode(event: Event) -> bytes:
    """The event as one line of strict JSON in UTF-8, newline included.

    Raises TypeError if a free-form field (``result``, ``environment``) holds something JSON has no
    word for.
    """
    body = event.body
    kind, content = (
        (body.kind, body.fields) if isinstance(body, Unknown) else (type(body).__name__, vars(body))
    )
    record = {"t": event.t, "attempt": event.attempt, "kind": kind, **content}
    return (json.dumps(_spelled(record), allow_nan=False, separators=(",", ":")) + "\n").encode()


@dataclass(frozen=True)
class _Envelope:
    """The fields that every line has."""

    t: float
    attempt: int
    kind: str


def decode(line: bytes) -> Event:
    """The event that ``line`` holds. Raises ValueError if it is no event: torn, not ours, or of no time that a clock shows.

    A kind that is not in ``KINDS``, or whose fields do not have the types of its class, becomes ``Unknown``.
    """
    record = plain_json(line, exact=True)
    envelope = msgspec.convert(record, _Envelope)
    if not 0 <= envelope.t < _LATEST_S:  # NaN is not
        raise ValueError(f"t = {envelope.t} is no time")
    content = {name: value for name, value in record.items() if name not in ENVELOPE}
    try:
        return Event(envelope.t, envelope.attempt, _known(envelope.kind, content))
    except (KeyError, msgspec.ValidationError):
        return Event(envelope.t, envelope.attempt, Unknown(envelope.kind, _revived(content)))


def _known(kind: str, content: Mapping[str, object]) -> Known:
    """The body of class ``KINDS[kind]``; fields that the class lacks are left out.

    Converted leniently: a float may be written as a whole number or as "NaN". Inside a table of free form (such as
    ``result``) no type declares a number, so there the three words always mean numbers.
    """
    values = {name: _revived(value) if isinstance(value, dict) else value for name, value in content.items()}
    return msgspec.convert(values, KINDS[kind], strict=False)


def _spelled(value: object) -> object:
    """``value`` with non-finite floats as words, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _spelled(item) for key, item in value.items()}
    return [_spelled(item) for item in value] if isinstance(value, (list, tuple)) else value


def _revived(value: object) -> Any:
    """Return ``value`` with the words for non-finite floats as floats again, at any depth; undoes ``_spelled``."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _revived(item) for key, item in value.items()}
    return [_revived(item) for item in value] if isinstance(value, list) else value
