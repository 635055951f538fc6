"""Planned changes of a run that can change its loss: a stage of its data, or other fields than its parent's; and what a child loses at its
beginning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import median

from phalanx.observe.events import Evaluated, RunStarted, Step, TaskEvaluated
from phalanx.run.rules import stages_of
from phalanx.run.spec import RunSpec
from phalanx_watch.why import observed as o

_MOST_LISTED = 8
"""Sources and fields in a line; the run files have all."""


@dataclass(frozen=True)
class Change:
    """A step after which a run trains on other data, or with other fields than its parent."""

    step: int
    """The last step before the change."""
    of_data: bool
    """True if the data change: another level of the loss is expected."""
    losses_before: tuple[float, ...]
    """Losses of logged steps before it, the newest last."""
    evidence: tuple[str, ...]
    next: str
    """Recommended next step if the loss has not come back."""


def change_before(observed: o.Observed, step: int) -> Change | None:
    """Return the newest change before ``step``; None in the first stage of the data of a run that continues no parent."""
    if observed.spec is None:
        return None
    stage, _ = observed.stage_of(step)
    origin = observed.origin if observed.origin and observed.origin.init_with == "training" else None
    # More steps alone are a continuation as planned.
    fields = (
        [field for field in origin.changed_fields if not field.startswith("train.steps:")] if origin else []
    )
    if origin is not None and fields and origin.step >= stage:
        of_data = origin.step == stage or any(field.startswith("data.") for field in fields)
        return Change(
            origin.step,
            of_data,
            origin.losses,
            (
                f"the run continues step {origin.step:,} of {origin.run} with {'; '.join(fields[:_MOST_LISTED])}",
            ),
            f"if that is not meant, continue with the earlier values: phalanx train {origin.run} --from {origin.step}",
        )
    if not stage:
        return None
    steps = [step for _, step in o.of_kind(Step, observed.all_events)]
    return Change(
        stage,
        True,
        tuple(step.loss for step in steps if step.step <= stage),
        tuple(_stage_evidence(observed, observed.spec, stage)),
        f"phalanx data show {observed.run} --step {stage + 1} (are these the texts that you mean?)",
    )


_OF_SEQUENCES = ("data.", "train.seq_len:", "train.document_mask:")
"""Fields that change the loss of the same weights. The fingerprint of the data has none of them."""


def worse_than_parent(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if a run that took over weights begins with a higher loss than its parent ended with, on the same data, if its first
    updates raise the loss, or if its first held-out loss is higher than the parent's last.

    Info once the loss is back. Also of a finished run. Nothing if its sequences are others: a token with less context has a higher loss.
    """
    origin = observed.origin
    if origin is None or origin.init_with == "training" or not origin.same_data:
        return
    if any(field.startswith(_OF_SEQUENCES) for field in origin.changed_fields):
        return
    before = [loss for loss in origin.losses if math.isfinite(loss)][-o.RECENT_STEPS :]
    steps = _first_steps(observed, 0)
    if len(before) < o.RECENT_STEPS or len(steps) < o.RECENT_STEPS:
        return
    usual, most = median(before), max(before)
    losses = [step.loss for step in steps]
    at_once = min(losses[:2]) > most
    stretches = [losses[first : first + o.BUMP_STEPS] for first in range(len(losses) - o.BUMP_STEPS + 1)]
    height = max(map(median, stretches))
    evaluations = [body for _, body in o.of_kind(Evaluated, observed.all_events)]
    held_out = None if origin.held_out is None or not evaluations else evaluations[0]
    is_worse = held_out is not None and held_out.loss > (1 + o.HELD_OUT_WORSE) * (origin.held_out or 0.0)
    if at_once:
        title = f"The loss begins at {losses[0]:.4g}, before any update, and the parent's was {usual:.4g}"
    elif height > most:
        title = f"The first updates raise the loss: from {losses[0]:.4g} to {height:.4g}"
    elif is_worse and held_out is not None:
        title = f"The held-out loss is {held_out.loss:.4g} at step {held_out.step:,}, and the parent's was {origin.held_out:.4g}"
    else:
        return
    is_back = (
        evaluations[-1].loss <= (origin.held_out or 0.0)
        if is_worse
        else median([step.loss for _, step in observed.steps][-o.RECENT_STEPS :]) <= most
    )
    is_other_model = at_once or any(field.startswith("model.") for field in origin.changed_fields)
    yield o.Reason(
        code="worse-than-parent",
        severity="info" if is_back else "warning",
        title=title,
        where="step 1" if at_once else f"steps 2 to {steps[-1].step:,}",
        since=observed.began_at,
        evidence=(
            f"the parent's loss was {usual:.4g}, at most {most:.4g}, in its last {len(before)} steps up to {origin.step:,} of {origin.run}, on the same data",
            *(
                [
                    f"held out: {held_out.loss:.4g} at step {held_out.step:,}, {origin.held_out:.4g} at the end of the parent"
                ]
                if held_out is not None
                else []
            ),
            *(
                [
                    "the weights compute another function than there: fields without a shape, such as model.rope_theta, are not compared at a start"
                ]
                if is_other_model
                else []
            ),
            *([] if at_once else _first_updates(origin, max(step.lr for step in steps))),
            f"fields that differ: {'; '.join(origin.changed_fields[:_MOST_LISTED])}"
            if origin.changed_fields
            else "no field of the run differs from the parent's",
            *(["the loss is back where it was"] if is_back else []),
        ),
        doing=observed.doing("training continues"),
        next="in a run of its own, with the parent's fields of [model]: phalanx train RUN_FILE --set FIELD=VALUE"
        if is_other_model
        else 'in a run of its own, take over the optimizer\'s state too (checkpoint.init_with = "optimizer" or "training"), or lengthen '
        "schedule.warmup_steps",
    )


def _first_updates(origin: o.OriginSeen, rate: float) -> Iterator[str]:
    """Yield what makes the first updates large: a higher ``rate`` than the parent's last, and an empty optimizer."""
    yield f"the learning rate is up to {rate:.3g} in these steps, and was {origin.rate:.3g} at the parent's step"
    if origin.init_with == "weights":
        yield (
            'the optimizer began empty (checkpoint.init_with = "weights"): by their scale, Adam\'s first updates move each weight by the full rate'
        )


def rate_jumps(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield an "info" reason if a run that continues its parent's training begins with a far higher learning rate than the parent ended with,
    by its longer schedule and no other field.

    Also of a finished run.
    """
    origin = observed.origin
    if origin is None or origin.init_with != "training" or not origin.rate:
        return
    if any(field.startswith("optimizer.lr:") for field in origin.changed_fields):
        return
    steps = _first_steps(observed, origin.step)
    if not steps or steps[0].lr < o.RATE_JUMP * origin.rate:
        return
    first = steps[0]
    losses = [loss for loss in origin.losses if math.isfinite(loss)][-o.RECENT_STEPS :]
    yield o.Reason(
        code="rate-jumps",
        severity="info",
        title=f"The learning rate begins again at {first.lr / origin.rate:.1f} times the parent's",
        where=f"step {first.step:,}",
        since=observed.began_at,
        evidence=(
            f"it was {origin.rate:.3g} at step {origin.step:,} of {origin.run}, and is {first.lr:.3g} at step {first.step:,}",
            "the schedule is planned for the whole of the longer run: the loss rises by the higher rate, until it decays again",
            *(
                [
                    f"the loss was {median(losses):.4g} before, and {median(step.loss for step in steps):.4g} in the {len(steps)} logged steps after"
                ]
                if losses
                else []
            ),
            *origin.changed_fields[:_MOST_LISTED],
        ),
        doing=observed.doing("training continues"),
        next=f"to continue without a rise, keep the parent's last rate: phalanx train {origin.run} --from {origin.step} --set schedule.kind=constant "
        f"--set schedule.warmup_steps=0 --set optimizer.lr={origin.rate:.3g}; or continue from before its decay (--from an earlier step)",
    )


def read_again(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield an "info" reason if a run that took over weights reads the same samples as its parent, from the first on.

    Also of a finished run.
    """
    origin = observed.origin
    if origin is None or origin.init_with == "training" or not origin.same_order or not origin.samples:
        return
    yield o.Reason(
        code="read-again",
        severity="info",
        title=f"The run reads the samples of its parent again, from the first to number {origin.samples:,}",
        where="the order of the samples",
        since=observed.began_at,
        evidence=(
            f"the data, runtime.seed and train.seq_len are those of {origin.run}, which had read {origin.samples:,} samples by step {origin.step:,}",
            f'checkpoint.init_with = "{origin.init_with}" takes over no place in the data: a training loss below the held-out loss is memory',
        ),
        doing=observed.doing("training continues"),
        next='to go on where the parent ended: checkpoint.init_with = "training"; for another order, another runtime.seed',
    )


def other_ruler(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield an "info" reason if evaluations score other held-out sequences, or another file of a task, than earlier ones of the run.

    Also of a finished run. Figures of a user's observer have no file, and events of older versions do not name it: nothing for them.
    """
    lines, since = list[str](), observed.began_at
    starts = [(event.t, event.body) for event in observed.all_events if isinstance(event.body, RunStarted)]
    counts = [(t, start.environment.get("held_out_sequences")) for t, start in starts]
    for (_, before), (t, now) in pairwise(counts):
        if isinstance(before, int) and isinstance(now, int) and before != now:
            lines.append(
                f"held-out loss: of {before:,} sequences before, of {now:,} now (evaluation.sequences)"
            )
            since = t
    scored: dict[str, TaskEvaluated] = {}
    for t, body in o.of_kind(TaskEvaluated, observed.all_events):
        last = scored.get(body.task)
        is_known = last is not None and bool(last.sha256 and body.sha256)
        if last is not None and is_known and (last.sha256, last.items) != (body.sha256, body.items):
            lines.append(
                f"task {body.task}: {body.items:,} items of file {body.sha256[:12]} since step {body.step:,}, {last.items:,} of {last.sha256[:12]} before"
            )
            since = t
        scored[body.task] = body
    if not lines:
        return
    yield o.Reason(
        code="other-ruler",
        severity="info",
        title="Evaluations before and after a start do not compare",
        where="[evaluation]",
        since=since,
        evidence=tuple(lines[-_MOST_LISTED:]),
        doing=observed.doing("training continues; the weights do not depend on it"),
        next=f"score both checkpoints by one file or number of sequences: phalanx eval {observed.run} --step STEP",
    )


def _first_steps(observed: o.Observed, after: int) -> list[Step]:
    """Return up to ``RECENT_STEPS`` logged steps of the run from ``after`` + 1 on, if that one was logged and all losses are finite; else none."""
    steps = list(
        islice(
            (step for _, step in o.of_kind(Step, observed.all_events) if step.step > after), o.RECENT_STEPS
        )
    )
    is_start = bool(steps) and steps[0].step == after + 1
    return steps if is_start and all(math.isfinite(step.loss) for step in steps) else []


def _stage_evidence(observed: o.Observed, spec: RunSpec, stage: int) -> list[str]:
    """Return the weights of the sources before and after ``stage``, and the newest held-out loss of each source."""
    number = stages_of(spec.data).index(stage)
    weights = [
        f"{source.name} {source.weights[number - 1]:g} -> {source.weights[number]:g}"
        for source in spec.data.sources
        if number < len(source.weights) and source.weights[number - 1] != source.weights[number]
    ][:_MOST_LISTED]
    evaluated = observed.newest(Evaluated)
    held_out = (
        sorted(evaluated[1].sources.items(), key=lambda item: -item[1])[:_MOST_LISTED] if evaluated else []
    )
    return [
        f"the data change after step {stage:,} (data.stages): weights {', '.join(weights)}",
        *(
            [
                f"held out at step {evaluated[1].step:,}: {', '.join(f'{name} {loss:.4g}' for name, loss in held_out)}"
            ]
            if evaluated and held_out
            else []
        ),
    ]
