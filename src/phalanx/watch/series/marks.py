"""Marks on a curve: what happened to the run at a step, in a line each, drawn from its events."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.observe.events import (
    CheckpointCopied,
    CheckpointFailed,
    CheckpointSaved,
    EpochLeft,
    Evaluated,
    Event,
    IncidentKind,
    Message,
    NonFinite,
    RanksChanged,
    Restored,
    Step,
    Stopped,
    Unknown,
)
from phalanx.observe.throughput import format_bytes, format_duration

LONGEST_TEXT = 500
_SPIKE = "LossSpike"
_SLOW = (IncidentKind.STRAGGLER, IncidentKind.SLOW_WITHOUT_SPARE)


@dataclass(frozen=True)
class Mark:
    """Something that happened: at which step, when, of what kind."""

    step: int
    t: float
    kind: str
    """ "checkpoint", "recovery", "left" (a fleet ended an epoch), "straggler", "nonfinite", "spike", "evaluation" or "message"."""
    text: str


def mark_of(event: Event, step: int) -> Mark | None:
    """The mark of an event, or ``None``; ``step`` is the last one that was logged before it."""
    found = _mark(event, step)
    if found is None:
        return None
    at, kind, text = found
    return Mark(at, event.t, kind, text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ...")


def _mark(event: Event, step: int) -> tuple[int, str, str] | None:
    body = event.body
    if type(body).__name__ == _SPIKE or (isinstance(body, Unknown) and body.kind == _SPIKE):
        fields = body.fields if isinstance(body, Unknown) else vars(body)
        at = fields.get("step")
        return (at if isinstance(at, int) else step), "spike", _spike(fields)
    match body:
        case CheckpointSaved(step=at, size_bytes=size):
            return at, "checkpoint", f"checkpoint of step {at:,} is durable ({format_bytes(size)})"
        case CheckpointCopied(step=at, url=url):
            return at, "checkpoint", f"the checkpoint of step {at:,} was copied to {url}"
        case CheckpointFailed(step=at, reason=reason):
            return at, "message", f"the checkpoint of step {at:,} failed: {reason}"
        case Restored(step=at, source=source, seconds=seconds, reason=reason):
            after = f" ({reason})" if reason else ""
            took = format_duration(seconds)
            return at, "recovery", f"goes on from step {at:,}, restored from {source} in {took}{after}"
        case NonFinite(step=at, what=what, skipped=skipped):
            outcome = "skipped" if skipped else "the run ends before it"
            return at, "nonfinite", f"step {at:,} is not finite, {outcome}: {what}"
        case Evaluated(step=at, loss=loss):
            return at, "evaluation", f"held-out loss {loss:.4f} after step {at:,}"
        case RanksChanged(step=at, ranks=ranks, reason=reason):
            return (
                at,
                "message",
                f"{ranks:,} ranks from step {at + 1:,} on" + (f": {reason}" if reason else ""),
            )
        case EpochLeft(text=text, incident=incident):
            return step, "straggler" if incident in _SLOW else "left", text
        case Message(level=level, text=text, incident=incident):
            return step, "straggler" if incident in _SLOW else "message", f"{level}: {text}"
        case Stopped(step=at, reason=reason):
            return at, "message", f"stopped after step {at:,}: {reason}"
        case Step():
            return None
    return None


def _spike(fields: dict[str, object]) -> str:
    loss, usual, action = fields.get("loss"), fields.get("typical_loss"), fields.get("action")
    return f"the loss jumped to {loss} from about {usual}" + (f": {action}" if action else "")
