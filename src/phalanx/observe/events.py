"""The event stream of a run: everything that is shown about a run is drawn from one file.

A run directory holds ``events.jsonl``, one JSON object a line, appended by every attempt at the run
(an attempt is one life of the job: a restart after a crash is the next). The live display, the loss
curve, the goodput report and the sinks are all functions of this stream, so a view can be drawn while
the run continues, after it died, or on another machine, and all views agree.

A line is ``{"t": unix seconds, "attempt": n, "kind": "Step", ...}``. Three rules keep it readable:

* A line that a killed writer left torn is reported as ``Torn``, and reading continues (``event_log``).
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
    DAMAGED_CHECKPOINT = "damaged-checkpoint"
    """A start has passed over a damaged checkpoint."""
    THREADS = "threads"
    """Ranks have more threads than their machine has cores for."""
    MODEL = "model"
    """A block of a user's model has a gradient that is not its own."""
    PROFILE_REFUSED = "profile-refused"
    """A request for a profile is not followed."""


@dataclass(frozen=True)
class RunStarted:
    """An attempt begins."""

    run: str
    """Name of the run."""
    steps: int
    """The step at which the run is complete."""
    ranks: int = 1
    """Ranks that train in this attempt."""
    layout: dict[str, int] = field(default_factory=dict)
    """Degrees of the axes over which the ranks are divided, those above 1."""
    device: str = ""
    """Name of the first rank's device."""
    parameters: int | None = None
    """Parameters of the model."""
    peak_flops_per_s: float | None = None
    """Peak FLOP/s of all ranks together: 100 % MFU."""
    peak_source: str = ""
    """Source of the peak: a data sheet, or a matrix product measured at start."""
    xz_bits_per_byte: float | None = None
    """Bits per byte that ``xz -9`` needs for the held-out text: the baseline."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Record of the code, its versions, the machine and the data at the start."""


@dataclass(frozen=True)
class Restored:
    """State was loaded. The next step is ``step + 1``; later steps that were computed before are computed again."""

    step: int
    """The step of the state."""
    source: str
    """Place of the state: a checkpoint, or the memory of nodes."""
    seconds: float = 0.0
    """Seconds of the load."""
    reason: str = ""
    """The cause of the restart, for people; empty if it is not known."""
    moved_bytes: int = 0
    """Bytes that all ranks together fetched from other nodes' memory."""


@dataclass(frozen=True)
class Step:
    """A logged step is complete. Between two logged steps no event is written, and this one covers all of them."""

    step: int
    """Number of the step; the first is 1."""
    steps: int
    """The step at which the run is complete."""
    loss: float
    """Training loss, in nats per token."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    lr: float
    """Learning rate."""
    tokens: int
    """Tokens trained on since the run began, over all attempts."""
    tokens_per_s: float
    """Tokens per second in this step."""
    step_s: float
    """Seconds of this one step, evaluations and checkpoints left out."""
    mfu: float | None = None
    """Model FLOPs utilization, 0 to 1."""
    bits_per_byte: float | None = None
    """The loss in bits per byte of text."""
    goodput: float | None = None
    """Goodput of this attempt so far, 0 to 1."""
    ledger: dict[str, float] = field(default_factory=dict)
    """Bucket -> seconds since the attempt began; see ``ledger.Ledger.seconds``."""
    peak_memory_bytes: int | None = None
    """Peak memory of the first rank's device, in bytes."""
    balance: float | None = None
    """Load imbalance of a mixture of experts: the largest load of an expert over the mean of its layer, in the worst layer.
    Tokens are never dropped."""
    logged_s: float = 0.0
    """Seconds in the steps that this event covers, on the first rank."""
    data_wait_s: float = 0.0
    """Seconds of these in which it waited for samples."""
    data_store: dict[str, int] = field(default_factory=dict)
    """Reads of the first rank from datasets in object stores since the attempt began: ``asked_bytes`` of samples, ``fetched_bytes`` that were not
    in the cache, in so many ``requests``."""


@dataclass(frozen=True)
class MemoryMeasured:
    """The memory use of all ranks was measured by kind (``phalanx.train.step.meters``)."""

    step: int
    """The step in which it was measured."""
    most: dict[str, int] = field(default_factory=dict)
    """Kind -> bytes on the rank with most."""
    least: dict[str, int] = field(default_factory=dict)
    """Kind -> bytes on the rank with least."""


@dataclass(frozen=True)
class MachineUsed:
    """Use of the run's machines since the last such event, by all of their processes.

    The machines' figures are summarized by median and extremes, so that the event of 12,500 machines is as large as that of nine. The machine
    to look at is at an extreme, and is named. Machines other than the first rank's are measured at the end of each
    window of ``observe.ranks_every_steps``.
    """

    step: int
    """The step after which it was measured."""
    node: str
    """Host name of the first rank's machine."""
    figures: dict[str, float] = field(default_factory=dict)
    """By name, as far as they are known, the median over machines: ``cpu`` and ``gpu`` (share in use, 0 to 1), ``memory_bytes``,
    ``received_bytes_per_s``, ``sent_bytes_per_s``, ``link_bytes_per_s`` (of its first rank's TCP connections to other machines, the
    greatest rate while bytes were under way) and ``gpu_watts``. The GPU is that of the machine's first rank."""
    nodes: int = 1
    """Number of measured machines. With one, all fields below are empty."""
    least: dict[str, float] = field(default_factory=dict)
    """By the same names, the least over machines."""
    most: dict[str, float] = field(default_factory=dict)
    """The greatest over machines."""
    least_node: dict[str, str] = field(default_factory=dict)
    """Host name of the machine with the least."""
    most_node: dict[str, str] = field(default_factory=dict)
    """Host name of the machine with the greatest."""
    by_node: dict[str, dict[str, float]] = field(default_factory=dict)
    """Figures of each machine by host name, if there are at most eight."""


@dataclass(frozen=True)
class Evaluated:
    """The held-out text was scored with the weights after ``step``."""

    step: int
    """The step of the weights."""
    loss: float
    """Loss on the held-out text, in nats per token."""
    bits_per_byte: float | None = None
    """The loss in bits per byte of text."""
    seconds: float = 0.0
    """Seconds of the evaluation."""
    sources: dict[str, float] = field(default_factory=dict)
    """The loss on the held-out text of each source, by name, if the run has several."""


@dataclass(frozen=True)
class TaskEvaluated:
    """A task was scored with the weights after ``step``."""

    step: int
    """The step whose weights were scored."""
    task: str
    """Name of the task in ``evaluation.tasks``."""
    scored_as: str
    """The kind of task: "choice", "completion", "text" or "generation"; another word, such as "observer", for figures of a user's observer."""
    items: int
    """Number of scored items."""
    figures: dict[str, float] = field(default_factory=dict)
    """By name: ``accuracy`` and ``accuracy_error`` (0 to 1), ``accuracy_per_character``, ``bits_per_byte``, ``exact_match`` and ``exact_match_error``,
    as far as the kind has them; or names of a user's own."""
    cut: int = 0
    """Sequences whose context was too long for the model and lost its beginning."""
    sha256: str = ""
    """SHA-256 of the task's file, in hex."""
    seconds: float = 0.0
    """Seconds of this task's evaluation."""

    def __post_init__(self) -> None:
        """Raise ``TypeError`` for a figure that is no int or float: no reader would take the line for this event."""
        for name, value in self.figures.items():
            if not isinstance(value, int | float):
                raise TypeError(
                    f"the figure {name!r} of {self.task!r} is {value!r}, and must be an int or a float"
                )


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of each layer in one step: every ``statistics.every_steps`` steps, and in each step that was not finite."""

    step: int
    """The step, from 1. Weights and activations are those before its update."""
    layers: list[str]
    """Names of the layers, in the order of the model: "embedding", "0" and so on, "mtp.0", "norm", "head"."""
    figures: dict[str, list[float | None]] = field(default_factory=dict)
    """By GROUP.FIGURE, such as ``attention.gradient_norm``: a value for each of ``layers``, infinite if anything in it was not finite, and null
    where the layer has no such figure. docs/watch/statistics.md lists them."""
    slot: int = 0
    """The slot in whose forward pass activations were measured: the first, or one that was not finite."""
    applied: bool = True
    """False if the step's update was not applied; then there is none to measure."""
    seconds: float = 0.0
    """Seconds that the statistics took on the rank that wrote them."""


@dataclass(frozen=True)
class Sampled:
    """A prompt was continued with the weights after ``step``."""

    step: int
    """The step whose weights wrote the text."""
    sample: str
    """Name of the sample in ``evaluation.samples``."""
    prompt: str
    """The text that was continued."""
    text: str
    """The text after the prompt, without special tokens."""
    tokens: list[int] = field(default_factory=list)
    """The token ids of the text, the end of the document among them."""
    temperature: float = 0.0
    """Sampling temperature; 0 means the most probable tokens."""


@dataclass(frozen=True)
class Evaluating:
    """An evaluation is in progress. Short evaluations write no such event."""

    step: int
    """The step of the weights."""
    done: int
    """Sequences that are scored."""
    sequences: int
    """Sequences in all."""


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is durable: a restart can begin from ``step``."""

    step: int
    """The step of the checkpoint."""
    path: str
    """Its folder or URL."""
    size_bytes: int = 0
    """Bytes of all ranks' images."""
    seconds: float = 0.0
    """Seconds from the begin of the save until it was durable."""
    blocked_s: float = 0.0
    """The part of ``seconds`` for which training stood still."""


@dataclass(frozen=True)
class CheckpointFailed:
    """A checkpoint could not be written. Training continues, and the last good checkpoint is kept."""

    step: int
    """The step of the checkpoint."""
    path: str
    """The folder or URL that was written to."""
    reason: str
    """The error, for people."""
    is_held: bool = False
    """True if the save was not at fault: the node has no coordinator, and saves once it has one."""


@dataclass(frozen=True)
class CheckpointCopied:
    """A checkpoint on disk is in the object store too."""

    step: int
    """The step of the checkpoint."""
    url: str
    """The object store."""
    seconds: float = 0.0
    """Seconds since the copy began."""


class NonFinite(msgspec.Struct, frozen=True):
    """A loss or gradient was NaN or infinite."""

    step: int
    """The step; its update was not applied."""
    problem: str = msgspec.field(name="what")
    """The figures that were not finite, for people."""
    skipped: bool
    """True if training continues without the step; False if the run ends before it."""
    first_sample: int = 0
    """The first sample of the step's batch, in the run's order."""
    samples: int = 0
    """Samples of the batch; 0 if their number was not recorded."""
    ranks: list[int] = []
    """The ranks whose own losses were not finite."""
    slots: list[int] = []
    """The first slots whose losses were not finite."""
    parameters: list[str] = []
    """The first parameters whose gradients were not finite."""


class LossSpike(msgspec.Struct, frozen=True):
    """The loss or gradient norm was far above that of the steps before (``phalanx.train.step.spikes``)."""

    step: int
    """The step of the spike."""
    loss: float
    """Its training loss, in nats per token."""
    grad_norm: float
    """Its gradient norm, before clipping."""
    typical_loss: float
    """Median of the losses in the window before."""
    deviations: float
    """Deviations of the loss or the norm, whichever has more, above its median."""
    action: Literal["continue", "stop", "skip", "fork"]
    """The action that ``train.on_spike`` names. After "skip" and "stop" the step changed no weight; after "fork" a child decides."""
    first_sample: int
    """The first sample of the step's batch, in the run's order."""
    samples: int
    """Samples of the batch."""
    typical_grad_norm: float = 0.0
    """Median of the gradient norms in the window before."""
    figure: str = msgspec.field(default="loss", name="what")
    """The figure that rose: "loss" or "gradient norm"."""
    slot: int | None = None
    """The slot with the largest loss, if losses by slot are known."""
    slot_loss: float | None = None
    """The loss of that slot, in nats per token."""


@dataclass(frozen=True)
class Forked:
    """A loss spike began a fork: children of the run are trained from an earlier state."""

    step: int
    """The step of the spike."""
    base: int
    """The step whose state each child begins with."""
    end: int
    """The last step of each child."""
    candidates: list[str]
    """The cures, in the order in which their children are trained. By ``spike.prefer = "first"`` none follows the first that cures."""


@dataclass(frozen=True)
class ChildTrained:
    """A child of a fork has reached its last step."""

    step: int
    """The step of the spike."""
    candidate: str
    """The cure of this child."""
    loss: float | None
    """Mean loss over the second half of its steps since the spike, in nats per token; ``None`` if it was not finite."""
    spikes: int = 0
    """Spikes in its steps."""
    again: bool = False
    """True if an earlier start had trained it, and its checkpoint was read."""
    spikes_again: bool = False
    """True if a step after that of the spike is a spike too, or was not finite."""


@dataclass(frozen=True)
class ChildTaken:
    """A fork has ended: the run continues as one of its children."""

    step: int
    """The step of the spike."""
    candidate: str
    """The cure of the child."""
    end: int
    """The step that the run has reached by it."""
    loss: float
    """Mean loss over the second half of its steps since the spike, in nats per token."""
    rate_scale: float
    """Factor of the learning rate from here on, of all forks together."""
    clip_scale: float
    """Factor of ``optimizer.clip_norm`` from here on, of all forks together."""
    wide: bool = False
    """True if products are computed in ``precision.compute`` from here on, instead of ``precision.matmul``."""


@dataclass(frozen=True)
class RanksChanged:
    """The fleet grew or shrank. The bits of the weights do not depend on it."""

    step: int
    """The last step before the change."""
    ranks: int
    """Ranks after the change."""
    reason: str = ""
    """The cause, for people."""


@dataclass(frozen=True)
class Message:
    """A log line for people. Ranks, agents and the coordinator write it when they have something to report."""

    level: Literal["info", "warning", "error"]
    """Severity."""
    text: str
    """The line."""
    incident: IncidentKind = IncidentKind.NOTE
    """The kind of the incident, for programs."""
    node: str = ""
    """The node of a fleet that it concerns; empty if it concerns no single one."""


@dataclass(frozen=True)
class EpochLeft:
    """A fleet ends an epoch, which is one of the run's attempts. Another one follows, or the fleet waits for nodes."""

    epoch: int
    """Number of the epoch."""
    reason: str
    """The cause, for people."""
    incident: IncidentKind = IncidentKind.NOTE
    """The kind of the incident that ended it, for programs."""

    @property
    def text(self) -> str:
        """The event as a line for people."""
        return f"leave epoch {self.epoch}: {self.reason}"


@dataclass(frozen=True)
class EndedEarly:
    """The run ends before its last step by ``evaluation.stop_after``. Its final save, evaluation and result follow."""

    step: int
    """The step after which it ends."""
    figure: str
    """The compared figure, as ``evaluation.keep_best`` names it."""
    evaluations: int
    """Evaluations in a row without a better value."""
    best_step: int
    """Step with the best value; 0 if no value was finite."""
    best_value: float | None = None
    """The best value."""

    @property
    def text(self) -> str:
        """The event as a line for people."""
        best = (
            "a finite one"
            if self.best_value is None
            else f"that of step {self.best_step:,}, {self.best_value:.6g}"
        )
        count = f"{self.evaluations} evaluation{'s' if self.evaluations > 1 else ''} in a row"
        return f"ends after step {self.step:,}: {count} had no better {self.figure} than {best}"


@dataclass(frozen=True)
class Stopped:
    """The attempt ended before the last step, on request or by an error that it could report."""

    step: int
    """The last completed step."""
    reason: str
    """The cause, for people."""
    ledger: dict[str, float] = field(default_factory=dict)
    """Bucket -> seconds since the attempt began, as in ``Step``."""


@dataclass(frozen=True)
class Finished:
    """The run is complete."""

    result: dict[str, Any]
    """Figures to compare: run_dir, step, loss, weights_sha256 and others, as ``phalanx train --json`` prints them."""
    ledger: dict[str, float] = field(default_factory=dict)
    """Bucket -> seconds since the attempt began, as in ``Step``."""


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
    | MachineUsed
    | Evaluated
    | TaskEvaluated
    | LayerStatistics
    | Sampled
    | Evaluating
    | CheckpointSaved
    | CheckpointFailed
    | CheckpointCopied
    | NonFinite
    | LossSpike
    | Forked
    | ChildTrained
    | ChildTaken
    | RanksChanged
    | Message
    | EpochLeft
    | EndedEarly
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
    """An entry of the event stream."""

    t: float
    """Unix time in seconds."""
    attempt: int
    """The attempt that wrote it, from 0."""
    body: Body
    """The event, one of the classes of ``phalanx.observe.events``."""


# --- one line <-> one event ---------------------------------------------------------------------


def encode(event: Event) -> bytes:
    """Return the event as one line of strict JSON in UTF-8, newline included; floats that are not finite become
    words.

    Raises TypeError if a free-form field (``result``, ``environment``) holds something that JSON cannot express.
    """
    body = event.body
    record = {"t": event.t, "attempt": event.attempt, "kind": kind_of(body), **fields_of(body)}
    return (json.dumps(_spelled(record), allow_nan=False, separators=(",", ":")) + "\n").encode()


def kind_of(body: Body) -> str:
    """Return the word in ``kind`` of an event's line."""
    return body.kind if isinstance(body, Unknown) else type(body).__name__


def fields_of(body: Body) -> Mapping[str, object]:
    """Return the keys of an event's line beside the envelope, with their values."""
    if isinstance(body, Unknown):
        return body.fields
    if isinstance(body, msgspec.Struct):
        return {item.encode_name: getattr(body, item.name) for item in msgspec.structs.fields(body)}
    return vars(body)


@dataclass(frozen=True)
class _Envelope:
    """The fields that every line has."""

    t: float
    attempt: int
    kind: str


def decode(line: bytes) -> Event:
    """Return the event in ``line``. Raises ValueError if it is no event: torn, not ours, or of an impossible time.

    A kind that is not in ``KINDS``, or whose fields do not have the types of its class, becomes ``Unknown``. Fields
    that the class lacks are dropped.
    """
    record = plain_json(line, exact=True)
    envelope = msgspec.convert(record, _Envelope)
    if not 0 <= envelope.t < _LATEST_S:  # NaN is not
        raise ValueError(f"t = {envelope.t} is no time")
    content = {name: value for name, value in record.items() if name not in ENVELOPE}
    try:
        # Converted leniently: a float may be written as an integer or as "NaN". Inside a table of free form (such as
        # ``result``) no type declares a number, so there the three words always mean numbers. Fields that the class lacks are
        # left out.
        values = {
            name: _revived(value) if isinstance(value, dict) else value for name, value in content.items()
        }
        return Event(
            envelope.t, envelope.attempt, msgspec.convert(values, KINDS[envelope.kind], strict=False)
        )
    except (KeyError, msgspec.ValidationError):
        return Event(envelope.t, envelope.attempt, Unknown(envelope.kind, _revived(content)))


def _spelled(value: object) -> object:
    """Return ``value`` with non-finite floats as words, at any depth; tuples become lists, keys strings."""
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
