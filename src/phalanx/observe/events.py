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
from dataclasses import dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class RunStarted:
    """An attempt began. ``steps`` is the step at which the run is complete."""

    run: str
    steps: int
    ranks: int = 1
    device: str = ""
    parameters: int | None = None
    peak_flops_per_s: float | None = None
    """What 100 % MFU means: the peak of all ranks together."""
    peak_source: str = ""
    """Where the peak comes from: a data sheet, or a matrix product measured at start."""
    xz_bits_per_byte: float | None = None
    """What ``xz -9`` makes of the held-out text: the baseline for bits per byte."""
    environment: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Restored:
    """State was loaded; the next step to run is ``step + 1``. Later steps done before are done again."""

    step: int
    source: str
    seconds: float = 0.0
    reason: str = ""
    moved_bytes: int = 0
    """What all ranks together fetched from other nodes' memory."""


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
    """Of a mixture of experts: the largest load of an expert over the mean of its layer, in the layer where it is worst.
    Tokens are never dropped."""


@dataclass(frozen=True)
class MemoryMeasured:
    """What step ``step`` held in memory, by kind (``phalanx.observe.memory``), in bytes: the rank with most, and with least."""

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


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is durable: a restart can begin from ``step``."""

    step: int
    path: str
    size_bytes: int = 0
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
class NonFinite:
    """A loss or gradient was NaN or infinite; ``skipped`` says that the step changed no weight."""

    step: int
    what: str
    skipped: bool


@dataclass(frozen=True)
class RanksChanged:
    """The fleet grew or shrank; the bits do not care."""

    step: int
    ranks: int
    reason: str = ""


@dataclass(frozen=True)
class Message:
    """A line for people."""

    level: Literal["info", "warning", "error"]
    text: str


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
    | CheckpointSaved
    | CheckpointFailed
    | NonFinite
    | RanksChanged
    | Message
    | Stopped
    | Finished
)
Body = Known | Unknown | Torn

KINDS: Mapping[str, Any] = {kind.__name__: kind for kind in get_args(Known)}
ENVELOPE = ("t", "attempt", "kind")
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class Event:
    """What happened, when (unix seconds), in which attempt (from 0)."""

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
    return (json.dumps(_plain(record), allow_nan=False, separators=(",", ":")) + "\n").encode()


def decode(line: bytes) -> Event:
    """The event that ``line`` holds. Raises ValueError if it is no event: torn, or not ours."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"an event is a JSON object, not {type(record).__name__}")
    try:
        t, attempt, kind = (record.pop(name) for name in ENVELOPE)
    except KeyError as missing:
        raise ValueError(f"an event needs {missing}") from None
    if not (_fits(t, float) and _fits(attempt, int) and isinstance(kind, str)):
        raise ValueError(f"an event needs numbers t and attempt, not {t=} {attempt=} {kind=}")
    return Event(float(t), attempt, _body(kind, record))


def _body(kind: str, content: dict[str, Any]) -> Body:
    if kind not in KINDS:
        return Unknown(kind, _revive(content))
    known = {}
    for name, hint in _shape(KINDS[kind]).items():
        if name not in content:
            continue
        value = _typed(content[name], hint)
        if not _fits(value, hint):
            return Unknown(kind, _revive(content))
        known[name] = value
    try:
        body: Known = KINDS[kind](**known)
    except TypeError:  # a field without a default is missing
        return Unknown(kind, _revive(content))
    return body


@cache
def _shape(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _typed(value: Any, hint: Any) -> Any:
    """``value`` from JSON, as the field's type would have it: 1 is a float where a float is meant."""
    if hint is float or (isinstance(hint, UnionType) and float in get_args(hint)):
        if isinstance(value, str):
            return NON_FINITE.get(value, value)
        return float(value) if _fits(value, int) else value
    return _revive(value) if get_origin(hint) is dict else value


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is dict:
        return isinstance(value, dict)
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if hint is float else hint)


def _plain(value: Any) -> Any:
    """``value`` with non-finite floats spelled out, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else _spell(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _spell(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _revive(value: Any) -> Any:
    """The inverse of ``_plain`` on free-form values; there the word "NaN" always means the number."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _revive(item) for key, item in value.items()}
    return [_revive(item) for item in value] if isinstance(value, list) else value
