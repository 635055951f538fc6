"""The cause of a loss spike, judged by the figures of its replay.

1. *Format*: repeated in fp32, the step is no spike.
2. *Rate*: the batch of the step before has a high loss too, under the same weights: near that of the step, or above an untrained model's.
   So the updates raised the loss, not this batch.
3. *Bad batch*: that batch is as usual, and the slots of the step are not: a few of them, or all.
4. *Layer*: the losses are as usual, and the gradient norm of one layer rose far more than that of the others.

A layer cannot stand out if the norms of all rose alike; then it is the rate. Everything here is a function on values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from phalanx.observe.throughput import usual_deviation
from phalanx.run.spec import TrainSpec
from phalanx.train.compare.observation import Replay, StepMeasures
from phalanx.train.step.spikes import LEAST_LOSS_DEVIATION, Spike, SpikeRule, deviations_above

Cause = Literal["bad batch", "rate", "format", "layer", "no spike"]

_SLOT_DEVIATIONS = 5.0
"""Deviations above the usual loss of a slot from which a slot stands out."""
_LOSS_DEVIATIONS = 3.0
"""Deviations from which the loss of the batch has risen at all, if the gradient norm made the step a spike."""
_SHARE_OF_RATE = 0.5
"""Share of the rise that the batch before must have too, for the updates to be the cause."""
_DIVERGED = 1.1
"""Multiple of an untrained model's loss, above which the run had diverged before the step. What is usual is no measure then."""
_LAYER_RISE = 3.0
"""Rise of a layer's norm, as a multiple of the median rise of all layers, from which the layer stands out."""
_STEPS_OF_SLOTS = 32
"""So many of the replayed steps before define the usual loss of a slot."""
_LEAST_SLOTS = 8
"""With fewer replayed slots, the usual loss of a slot follows from the losses of the run's batches."""


@dataclass(frozen=True)
class SlotLoss:
    """The loss of a slot in the step."""

    slot: int
    loss: float
    deviations: float | None
    """Deviations above the usual loss of a slot; ``None`` if that is unknown, infinite if the loss is not finite."""
    stands_out: bool


@dataclass(frozen=True)
class LayerNorm:
    """The gradient norm of a layer in the step."""

    layer: str
    norm: float
    before: float | None
    """The norm in the step before; ``None`` if that step was not replayed."""
    rise: float | None
    """The ratio of the two."""


@dataclass(frozen=True)
class WideStep:
    """The step, repeated in fp32."""

    loss: float
    grad_norm: float
    is_spike: bool


@dataclass(frozen=True)
class SpikeFindings:
    """The figures of a step beside what is usual, and the cause that follows from them."""

    loss: float
    grad_norm: float
    lr: float
    is_applied: bool
    """True if the step changed the weights."""
    spike: Spike | None
    """``None`` if the step is no spike by the run's rule, is not finite, or has too few steps before it."""
    usual_loss: float | None
    """Median of the losses in the window before."""
    usual_slot: tuple[float, float] | None
    """Usual loss of a slot, and its deviation."""
    slot_steps: int
    """Replayed steps before, whose slots give that deviation; 0 if it follows from the losses of the run's batches."""
    batch_before: float | None
    """Loss of the batch of the step before, under the weights with which the step was computed."""
    slots: tuple[SlotLoss, ...]
    """The slots, the largest loss first."""
    layers: tuple[LayerNorm, ...]
    """The layers, the one whose norm rose most first."""
    in_fp32: WideStep | None
    """``None`` if the run computes in fp32."""
    cause: Cause = "no spike"
    sentence: str = "loss and gradient norm are as usual, by the run's rule (train.spike_deviations)"
    """The reasons of the verdict, for people."""


def judge_spike_replay(
    step: int, replay: Replay, train: TrainSpec, vocab_size: int, in_fp32: Replay | None = None
) -> SpikeFindings:
    """Return the findings on ``step``, the last of a measured ``replay``: slots and layers sorted with the worst
    first, the usual figures, and the cause. ``in_fp32`` is the same replay in fp32, if there was one.

    ``vocab_size`` gives the loss of an untrained model, whose tokens have equal probabilities.
    """
    scores = replay.scores
    assert scores is not None, "the replay was measured"
    numbers, measures = replay.numbers[step], replay.measures[step]
    loss, grad_norm = numbers["loss"], numbers["grad_norm"]
    losses = [recorded for recorded, _ in scores.history]
    usual_slot, slot_steps = _usual_slot(step, replay.measures, losses, scores.batch_before, train.slots)
    spike = SpikeRule.of(train).find(scores.history, loss, grad_norm)
    wide = None
    if in_fp32 is not None and in_fp32.scores is not None:
        of_wide = in_fp32.numbers[step]
        wide = WideStep(
            of_wide["loss"],
            of_wide["grad_norm"],
            _is_spike(train, in_fp32.scores.history, of_wide["loss"], of_wide["grad_norm"]),
        )
    slots = sorted(
        (_slot(slot, value, usual_slot) for slot, value in enumerate(measures.slot_losses)),
        key=lambda slot: -_or_infinite(slot.loss),
    )
    before = replay.measures.get(step - 1)
    layers = sorted(
        (_layer(name, norm, before) for name, norm in measures.layer_norms.items()),
        key=lambda layer: -_or_infinite(layer.norm if layer.rise is None else layer.rise),
    )
    findings = SpikeFindings(
        *(loss, grad_norm, measures.lr, measures.is_applied, spike, median(losses) if losses else None),
        *(usual_slot, slot_steps, scores.batch_before, tuple(slots), tuple(layers), wide),
    )
    if not _is_spike(train, scores.history, loss, grad_norm):
        return findings
    cause, sentence = _cause(findings, losses, _untrained_loss(step, losses, vocab_size))
    return replace(findings, cause=cause, sentence=sentence)


def _untrained_loss(step: int, losses: Sequence[float], vocab_size: int) -> float:
    """Return the loss of a uniform prediction, or of the run's first step if ``losses`` has it and it is larger."""
    first = losses[0] if losses and len(losses) >= step - 1 and math.isfinite(losses[0]) else 0.0
    return max(math.log(vocab_size), first)


def _is_spike(train: TrainSpec, history: Sequence[Sequence[float]], loss: float, grad_norm: float) -> bool:
    """Return True if a step is a spike, is not finite, or cannot be judged for want of steps before it."""
    if not (math.isfinite(loss) and math.isfinite(grad_norm)) or 2 * len(history) < train.spike_window:
        return True
    return SpikeRule.of(train).find(history, loss, grad_norm) is not None


def _usual_slot(
    step: int,
    measures: Mapping[int, StepMeasures],
    losses: Sequence[float],
    batch_before: float | None,
    slots: int,
) -> tuple[tuple[float, float] | None, int]:
    """Return the usual loss of a slot with its deviation, and the number of replayed steps that the deviation is from
    (0: from batch losses). ``None`` if too little is known before the step.

    Usual is the loss of the batch of the step before under the same weights; without it, the newest median of slots
    or of batches. The deviation is that of slots from the median of their step, so that a falling loss counts as
    none.
    """
    earlier = [
        [loss for loss in measures[number].slot_losses if math.isfinite(loss)]
        for number in sorted(measures)[-_STEPS_OF_SLOTS - 1 :]
        if number < step
    ]
    of_step = {number: median(of_slots) for number, of_slots in enumerate(earlier) if of_slots}
    from_median = [loss - of_step[number] for number, of_slots in enumerate(earlier) for loss in of_slots]
    if batch_before is not None and math.isfinite(batch_before):
        usual = batch_before
    elif of_step or losses:
        usual = of_step[max(of_step)] if of_step else median(losses)
    else:
        return None, 0
    steps = len(of_step) if len(from_median) >= _LEAST_SLOTS else 0
    if steps:
        deviation = usual_deviation(from_median, 0.0)
    elif len(losses) > 1:
        # The loss of a batch is the mean of its slots: its variance is theirs, divided by their number.
        deviation = usual_deviation(losses, median(losses)) * math.sqrt(slots)
    else:
        return None, 0
    return (usual, max(deviation, LEAST_LOSS_DEVIATION * abs(usual))), steps


def _slot(slot: int, loss: float, usual: tuple[float, float] | None) -> SlotLoss:
    """Return the loss of a slot in deviations above ``usual`` (mean, deviation), and whether that is more than
    ``_SLOT_DEVIATIONS``. Without ``usual`` the deviations are ``None``; for a loss that is not finite, infinite.
    """
    if not math.isfinite(loss):
        return SlotLoss(slot, loss, math.inf, stands_out=True)
    if usual is None:
        return SlotLoss(slot, loss, None, stands_out=False)
    deviations = (loss - usual[0]) / usual[1] if usual[1] else 0.0
    return SlotLoss(slot, loss, deviations, stands_out=deviations > _SLOT_DEVIATIONS)


def _layer(name: str, norm: float, before: StepMeasures | None) -> LayerNorm:
    norm_before = None if before is None else before.layer_norms.get(name)
    return LayerNorm(name, norm, norm_before, norm / norm_before if norm_before else None)


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _cause(findings: SpikeFindings, losses: Sequence[float], untrained: float) -> tuple[Cause, str]:
    """Return the likeliest cause of a spike after the ``losses`` of the steps before, and a sentence with its evidence.
    The first of these that holds:

    "format" if fp32 does not spike; "rate" if the run had diverged before, or other batches have risen too;
    "bad batch" if some slots stand out, or all beside a usual batch before; "rate" if the loss has risen in all slots
    and no batch before is known; "layer" if the norm of one rose far more than the median. Otherwise "rate".
    """
    loss, spike, batch_before, wide = findings.loss, findings.spike, findings.batch_before, findings.in_fp32
    if wide is not None and not wide.is_spike:
        return "format", (
            f"in fp32 the step has loss {wide.loss:.4g} and gradient norm {wide.grad_norm:.4g}, which are as usual: only the narrow format spikes"
        )
    if batch_before is not None and batch_before > _DIVERGED * untrained:
        return "rate", (
            f"the run had diverged before: under the same weights the batch of the step before has loss {batch_before:.4g}, and an "
            f"untrained model has {untrained:.4g}"
        )
    out = [slot for slot in findings.slots if slot.stands_out]
    usual = math.nan if findings.usual_loss is None else findings.usual_loss
    is_finite = math.isfinite(loss)
    has_risen = (
        not is_finite
        or (spike is not None and spike.figure == "loss")
        or len(losses) < 2
        or deviations_above(losses, loss, LEAST_LOSS_DEVIATION)[1] > _LOSS_DEVIATIONS
    )
    if has_risen and batch_before is not None and _shares_the_rise(batch_before, usual, loss):
        return "rate", (
            f"the losses of all batches have risen equally: under the same weights the batch of the step before has loss {batch_before:.4g} "
            f"(usual {usual:.4g}), so the updates raised the loss, not this batch"
        )
    before = (
        ""
        if batch_before is None
        else f"; under the same weights the batch of the step before has loss {batch_before:.4g}, as usual"
    )
    if out and len(out) < len(findings.slots):
        numbers = ", ".join(str(slot.slot) for slot in out[:8])
        return (
            "bad batch",
            f"slot{'s' * (len(out) > 1)} {numbers} of {len(findings.slots)} stand{'s' * (len(out) == 1)} out{before}",
        )
    if has_risen and batch_before is not None:
        return "bad batch", f"all slots of this batch have a high loss{before}"
    if has_risen and is_finite:
        return (
            "rate",
            "the losses of all slots have risen equally, and there is no batch before to compare them with",
        )
    rises = [layer.rise for layer in findings.layers if layer.rise is not None and math.isfinite(layer.rise)]
    top = findings.layers[0] if findings.layers else None
    top_rise = None if top is None or top.rise is None else _or_infinite(top.rise)
    if top is not None and top_rise is not None and rises and top_rise > _LAYER_RISE * median(rises):
        return "layer", (
            f"the losses are as usual, and the gradient norm of {top.layer} rose {top_rise:.3g} times; the median layer rose "
            f"{median(rises):.3g} times"
        )
    return (
        "rate",
        f"the gradient norm {findings.grad_norm:.4g} rose equally in all layers, and no slot is an outlier",
    )


def _shares_the_rise(batch_before: float, usual: float, loss: float) -> bool:
    if not math.isfinite(batch_before):
        return True
    return math.isfinite(loss) and batch_before - usual >= _SHARE_OF_RATE * (loss - usual)
