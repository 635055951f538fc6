"""The state of the live display: a fold over the event stream.

``reduce(state, event) -> state`` is the whole logic of the live display. It has no clock and draws
nothing, so the display of a run that died last week is the display it had then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from phalanx.observe import events as run_events
from phalanx.observe.throughput import RECENT_STEPS, format_bytes, format_duration, time_left_s

NOTES_KEPT = 6
CURVE_POINTS = 256
_PROMPT_SHOWN, _TEXT_SHOWN = 60, 200
"""Characters of a sample that a line shows."""


@dataclass(frozen=True)
class Note:
    """A log line of the display. ``level`` is info, warning or error."""

    t: float
    level: str
    text: str


@dataclass(frozen=True)
class Curve:
    """The loss over the whole run in at most ``CURVE_POINTS`` values: every ``stride``-th event."""

    values: tuple[float, ...] = ()
    stride: int = 1
    seen: int = 0

    def add(self, value: float) -> Curve:
        """Return the curve after one more value, which is kept if its turn has come (every ``stride``-th).

        When it is full, every other value is dropped and the stride doubled.
        """
        values = (*self.values, value) if self.seen % self.stride == 0 else self.values
        if len(values) <= CURVE_POINTS:
            return replace(self, values=values, seen=self.seen + 1)
        return Curve(values[::2], 2 * self.stride, self.seen + 1)


@dataclass(frozen=True)
class State:
    """The state of a run by its events so far."""

    t: float | None = None
    attempt: int = 0
    started: run_events.RunStarted | None = None
    ranks: int | None = None
    step: run_events.Step | None = None
    step_t: float | None = None
    curve: Curve = Curve()
    recent_step_s: tuple[float, ...] = ()
    recent_t: tuple[float, ...] = ()
    evaluated: run_events.Evaluated | None = None
    evaluating: run_events.Evaluating | None = None
    """The evaluation that is under way; ``None`` between evaluations."""
    saved: run_events.CheckpointSaved | None = None
    notes: tuple[Note, ...] = ()
    stopped: run_events.Stopped | None = None
    finished: run_events.Finished | None = None
    explained: bool = False
    """True once a fleet has logged why this attempt, one of its epochs, ends."""

    @property
    def done(self) -> bool:
        """The attempt is over: nothing more will come from it."""
        return self.stopped is not None or self.finished is not None

    @property
    def time_left_s(self) -> float | None:
        """From the recent step times and from what evaluations and checkpoints add to them; None before the first step and at the end."""
        if self.step is None or self.done:
            return None
        return time_left_s(self.step.steps - self.step.step, self.recent_step_s, self._step_share())

    def _step_share(self) -> float:
        """Return the part of recent wall time that was spent in steps, at most 1.

        It is 1 without enough data, or if it would be below a tenth: then one event stands for many steps.
        """
        if len(self.recent_t) < 2 or self.recent_t[-1] <= self.recent_t[0]:
            return 1.0
        share = sum(self.recent_step_s[1:]) / (self.recent_t[-1] - self.recent_t[0])
        # If less than a tenth of the steps is logged, one event represents many steps, and the share is not reliable.
        return min(1.0, share) if share > 0.1 else 1.0


def reduce(state: State, event: run_events.Event) -> State:
    """Return the state after ``event``. Every event updates time and notes; kinds that are not shown change
    nothing else.

    Another attempt resets speeds and endings but keeps curve and checkpoint. Events of ``FROM_OUTSIDE`` never
    begin an attempt: beside time and notes they change only ``explained``, which EpochLeft sets.
    """
    new = notes(state, event)
    if isinstance(event.body, run_events.FROM_OUTSIDE):
        # The coordinator logs them under an attempt of its own, which is not the ranks' attempt.
        explained = state.explained or isinstance(event.body, run_events.EpochLeft)
        return replace(state, t=event.t, notes=(*state.notes, *new)[-NOTES_KEPT:], explained=explained)
    if event.attempt != state.attempt:
        # The curve and the last checkpoint are the run's; speeds and endings were the old attempt's.
        state = replace(
            state,
            attempt=event.attempt,
            recent_step_s=(),
            recent_t=(),
            stopped=None,
            finished=None,
            step_t=None,
            evaluating=None,
            explained=False,
        )
    state = replace(state, t=event.t, notes=(*state.notes, *new)[-NOTES_KEPT:])
    match event.body:
        case run_events.RunStarted() as body:
            return replace(state, started=body, ranks=body.ranks)
        case run_events.RanksChanged() as body:
            return replace(state, ranks=body.ranks)
        case run_events.Step() as body:
            return _with_step(state, event.t, body)
        case run_events.Evaluated() as body:
            return replace(state, evaluated=body, evaluating=None)
        case run_events.TaskEvaluated() | run_events.Sampled():
            return replace(state, evaluating=None)
        case run_events.Evaluating() as body:
            return replace(state, evaluating=body)
        case run_events.CheckpointSaved() as body:
            return replace(state, saved=body)
        case run_events.Stopped() as body:
            return replace(state, stopped=body)
        case run_events.Finished() as body:
            return replace(state, finished=body)
    return state


def _with_step(state: State, t: float, body: run_events.Step) -> State:
    """Return the state after a logged step: the curve, the recent times, and no evaluation in progress."""
    return replace(
        state,
        step=body,
        evaluating=None,
        step_t=t,
        curve=state.curve.add(body.loss),
        recent_step_s=(*state.recent_step_s, body.step_s)[-RECENT_STEPS:],
        recent_t=(*state.recent_t, t)[-RECENT_STEPS:],
    )


def notes(state: State, event: run_events.Event) -> list[Note]:
    """Return the log lines to show when ``event`` comes after ``state``: its own, if it has one.

    Before it, a warning if the earlier attempt ended without an event that explains it.
    """
    lines = []
    ended = event.attempt != state.attempt and not isinstance(event.body, run_events.FROM_OUTSIDE)
    if ended and state.started is not None and not state.done and not state.explained:
        after = f" after step {state.step.step:,}" if state.step else ""
        lines.append(Note(event.t, "warning", f"attempt {state.attempt + 1} ended without a word{after}"))
    own = note_of(event)
    return lines if own is None else [*lines, Note(event.t, *own)]


def note_of(event: run_events.Event) -> tuple[str, str] | None:
    """Return level and text of the log line of an event; ``None`` for kinds that are shown elsewhere, and steps."""
    match event.body:
        case run_events.Restored(step=step, source=source, seconds=seconds, reason=reason):
            after = f" ({reason})" if reason else ""
            return "info", f"restored step {step:,} from {source} in {format_duration(seconds)}{after}"
        case run_events.RanksChanged(step=step, ranks=ranks, reason=reason):
            after = f": {reason}" if reason else ""
            return "info", f"{ranks:,} ranks from step {step + 1:,} on{after}"
        case run_events.MemoryMeasured(step=step, most=most) if most:
            kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in most.items() if size)
            return "info", f"memory in step {step:,}, of the rank with most: {kinds}"
        case run_events.CheckpointCopied(step=step, url=url, seconds=seconds):
            return "info", f"step {step:,} was copied to {url} in {format_duration(seconds)}"
        case run_events.CheckpointFailed(step=step, path=path, reason=reason):
            return "error", f"checkpoint of step {step:,} failed ({path}): {reason}"
        case run_events.NonFinite(step=step, problem=text, skipped=skipped):
            outcome = "skipped" if skipped else "the run ends before it"
            return "warning", f"step {step:,} is not finite, {outcome}: {text}"
        case run_events.LossSpike(
            step=step, loss=loss, typical_loss=usual, grad_norm=norm, typical_grad_norm=usual_norm
        ):
            outcomes = {
                "continue": "training continues",
                "skip": "skipped",
                "stop": "the run ends before it",
                "fork": "the run forks",
            }
            text = f"loss {loss:.4g} (usual {usual:.4g}), gradient norm {norm:.3g} (usual {usual_norm:.3g})"
            return "warning", f"loss spike in step {step:,}, {outcomes[event.body.action]}: {text}"
        case run_events.Forked(step=step, base=base, end=end, candidates=candidates):
            text = f"fork at step {step:,}: trains {', '.join(candidates)} from step {base:,} to step {end:,}"
            return "info", text
        case run_events.ChildTrained(
            step=step, candidate=candidate, loss=child_loss, again=again, spikes_again=spikes
        ):
            figure = "not finite" if child_loss is None else f"{child_loss:.4g}"
            more = f"{', spikes again' if spikes else ''}{', trained before' if again else ''}"
            return "info", f"fork at step {step:,}: child {candidate} has loss {figure}{more}"
        case run_events.ChildTaken(step=step, candidate=candidate, end=end, loss=loss):
            text = f"fork at step {step:,}: the run continues as child {candidate}, loss {loss:.4g}, from step {end:,}"
            return "info", text
        case run_events.Message(level=level, text=text):
            return level, text
        case run_events.EpochLeft(text=text):
            return "warning", text
        case run_events.EndedEarly() as body:
            return "info", body.text
        case run_events.Stopped(step=step, reason=reason):
            return "warning", f"stopped after step {step:,}: {reason}"
        case run_events.Torn(line=line):
            return "info", f"line {line:,} of the event file is torn: its writer was killed"
        case run_events.Unknown(kind=kind) if kind:
            return "info", f"an event of a kind this version does not know: {kind}"
    return None


def describe_evaluation(body: run_events.Evaluated, xz_bits_per_byte: float | None) -> str:
    """Describe an evaluation as ``loss 1.4301 · 1.792 bits/byte (xz -9: 2.310)``; parts that are unknown are left
    out.

    The losses of several sources follow the loss in brackets.
    """
    text = f"loss {body.loss:.4f}"
    if body.sources:
        text += f" ({', '.join(f'{name} {loss:.3f}' for name, loss in body.sources.items())})"
    if body.bits_per_byte is not None:
        text += f" · {body.bits_per_byte:.3f} bits/byte"
        if xz_bits_per_byte is not None:
            text += f" (xz -9: {xz_bits_per_byte:.3f})"
    return text


_TASK_FIGURES = frozenset(
    [
        "accuracy",
        "accuracy_error",
        "accuracy_per_character",
        "bits_per_byte",
        "exact_match",
        "exact_match_error",
    ]
)


def describe_figures(figures: Mapping[str, float]) -> str:
    """Describe figures of a task as ``accuracy 0.412 ± 0.016 · 1.204 bits/byte``.

    Accuracy, accuracy per character, bits per byte and exact match come first, as far as they are there; a
    missing error is shown as 0. Others, such as those of a user's observer, follow in their order, each as its
    name and four significant digits.
    """
    parts = []
    if "accuracy" in figures:
        parts.append(f"accuracy {figures['accuracy']:.3f} ± {figures.get('accuracy_error', 0.0):.3f}")
    if "accuracy_per_character" in figures:
        parts.append(f"{figures['accuracy_per_character']:.3f} per character")
    if "bits_per_byte" in figures:
        parts.append(f"{figures['bits_per_byte']:.3f} bits/byte")
    if "exact_match" in figures:
        parts.append(
            f"exact match {figures['exact_match']:.3f} ± {figures.get('exact_match_error', 0.0):.3f}"
        )
    parts += [f"{name} {value:.4g}" for name, value in figures.items() if name not in _TASK_FIGURES]
    return " · ".join(parts)


def describe_sample(body: run_events.Sampled) -> str:
    """``Once upon | a time there was``, shortened."""
    before = body.prompt if len(body.prompt) <= _PROMPT_SHOWN else f"...{body.prompt[-_PROMPT_SHOWN:]}"
    after = body.text if len(body.text) <= _TEXT_SHOWN else f"{body.text[:_TEXT_SHOWN]}..."
    return f"{before} | {after}"


def describe_evaluating(body: run_events.Evaluating) -> str:
    """``evaluating: 1,024 of 4,096 sequences``."""
    return f"evaluating: {body.done:,} of {body.sequences:,} sequences"


def describe_checkpoint(body: run_events.CheckpointSaved) -> str:
    """Describe a save as ``412 MiB in 3.1 s, blocked for 0.2 s``; parts that are 0 are left out."""
    parts = [format_bytes(body.size_bytes)] if body.size_bytes else []
    parts += [f"in {format_duration(body.seconds)}"] if body.seconds else []
    text = " ".join(parts)
    blocked = f"blocked for {format_duration(body.blocked_s)}" if body.blocked_s else ""
    return ", ".join(part for part in (text, blocked) if part)


# Summaries of layer statistics: the first non-finite layer, the layer with the largest value of a figure, one line for a log.

_BACKWARD = (".gradient_norm", ".update_norm", ".update_ratio")
"""Figures that are not finite in all earlier layers too, since gradients pass from the last layer to the first."""


def values_of(body: run_events.LayerStatistics, figure: str) -> dict[str, float]:
    """Return the values of a figure by layer, in the order of the model, without layers that lack it."""
    return {
        layer: value
        for layer, value in zip(body.layers, body.figures.get(figure, ()), strict=False)
        if value is not None
    }


def groups_of(body: run_events.LayerStatistics, figure: str) -> list[str]:
    """Return the groups that have a figure of this name, such as "attention" for "gradient_norm"."""
    ending = f".{figure}"
    return [name.removesuffix(ending) for name in body.figures if name.endswith(ending)]


def first_nonfinite(body: run_events.LayerStatistics) -> tuple[str, str] | None:
    """Return (layer, figure) in which the step was first not finite; ``None`` if there is none.

    Weights and the forward pass come first, in the order of the model; of one layer the weights. Then come
    gradients, from the last layer to the first. Norms and ratios of updates do not count.
    """
    cells = list(_nonfinite_cells(body))
    forward = [cell for cell in cells if not cell[1].endswith(_BACKWARD)]
    backward = [cell for cell in cells if cell[1].endswith(".gradient_norm")]
    order = body.layers.index
    if forward:
        # A weight that is not finite makes the same layer's activations so: name the weight.
        return min(forward, key=lambda cell: (order(cell[0]), not cell[1].endswith(".weight_norm")))
    return max(backward, key=lambda cell: order(cell[0]), default=None)


def _nonfinite_cells(body: run_events.LayerStatistics) -> Iterator[tuple[str, str]]:
    """Yield layer and figure of each value that is not finite."""
    for figure in body.figures:
        for layer, value in values_of(body, figure).items():
            if not math.isfinite(value):
                yield layer, figure


def described_layer(layer: str) -> str:
    """Return a layer's name as text: "layer 3", "the embedding"."""
    return (
        f"layer {layer}" if layer[:1].isdigit() else f"the {layer}" if layer != "norm" else "the final norm"
    )


def describe_statistics(body: run_events.LayerStatistics) -> str:
    """Return the largest gradient, residual stream and logit with their layers, as one line; empty without these
    figures.

    If a figure is not finite, return only the layer and figure where that began.
    """
    bad = first_nonfinite(body)
    if bad is not None:
        return f"{described_layer(bad[0])} is the first that is not finite ({bad[1]})"
    parts = []
    gradients = {
        (layer, group): value
        for group in groups_of(body, "gradient_norm")
        for layer, value in values_of(body, f"{group}.gradient_norm").items()
    }
    if gradients:
        layer, group = max(gradients, key=lambda cell: gradients[cell])
        place = described_layer(layer) + ("" if group == layer or layer == "norm" else f" {group}")
        parts.append(f"largest gradient {gradients[layer, group]:.3g} ({place})")
    for figure, name in (("residual.rms", "residual stream"), ("attention.largest_logit", "attention logit")):
        values = values_of(body, figure)
        if values:
            layer = max(values, key=lambda name: values[name])
            parts.append(f"{name} {values[layer]:.3g} ({described_layer(layer)})")
    return " · ".join(parts)
