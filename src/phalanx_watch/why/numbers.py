"""Numbers of training: losses that jump, do not fall or are not finite, and gradient norms that grow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import median

from phalanx.observe.display.state import described_layer, first_nonfinite
from phalanx.observe.events import Evaluated, LayerStatistics, LossSpike, NonFinite, Step
from phalanx.run.rules import stages_of
from phalanx_watch.why import observed as o
from phalanx_watch.why import surroundings
from phalanx_watch.why.changes import Change, change_before, other_ruler
from phalanx_watch.why.layers import vanished_weights
from phalanx_watch.why.skipped import suspect_of_nonfinite


def spike(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason for the worst spike of loss or gradient norm that is recent, in steps or in time; none if the
    run is finished.

    Critical if it ended the run or the loss has not come back.
    """
    if observed.finished or observed.last_step is None:
        return
    window, reached = observed.spike_window, observed.last_step[1].step
    fresh = {
        spike.step: (t, spike)
        for t, spike in o.of_kind(LossSpike, observed.events)
        if spike.step + o.SPIKE_WINDOWS * window > reached or observed.now - t < o.NEWS_S
    }
    if not fresh:
        return
    unplanned = {step: timed for step, timed in fresh.items() if not _is_planned(observed, step, window)}
    is_planned, fresh = not unplanned, unplanned or fresh
    since, worst = max(fresh.values(), key=lambda timed: timed[1].deviations)
    count, back, saved = len(fresh), _is_back(observed, worst), observed.checkpoint_before(min(fresh))
    slot = f", slot {worst.slot}" if worst.slot is not None else ""
    evidence = [
        f"step {worst.step:,}: loss {worst.loss:.4g} (usual {worst.typical_loss:.4g}), gradient norm {worst.grad_norm:.4g} (usual "
        f"{worst.typical_grad_norm:.4g}): the {worst.figure} is {worst.deviations:.3g} deviations above what is usual",
        f"its batch: samples {worst.first_sample:,} to {worst.first_sample + worst.samples - 1:,}"
        + (
            f"; the largest loss is slot {worst.slot}'s, {worst.slot_loss:.4g}"
            if worst.slot_loss is not None
            else ""
        ),
    ]
    change = _recent_change(observed, worst.step, window, of_data=is_planned)
    if change is not None:
        evidence += change.evidence
    if count > 1:
        evidence.append(f"{count} steps since step {min(fresh):,} were spikes")
    if back is not None:
        evidence.append("the loss is back where it was" if back else "the loss has not come back since")
    yield o.Reason(
        code="loss-spike",
        severity="critical"
        if worst.action == "stop" or (back is False and not is_planned)
        else "info"
        if is_planned
        else "warning",
        title=f"The loss rises in step {worst.step:,}, where the data change as planned"
        if is_planned
        else f"Loss spike in step {worst.step:,}"
        if worst.figure == "loss"
        else f"Spike of the gradient norm in step {worst.step:,}",
        where=f"step {worst.step:,}{slot}",
        since=since,
        evidence=tuple(evidence),
        doing={
            "continue": observed.doing(
                "training continues"
                if saved is None
                else f"training continues; the checkpoint before it is kept (step {saved:,})"
            ),
            "skip": "its samples were left out: the step changed no weight",
            "stop": "the run ended before it, saved",
            "fork": "the run forks: it continues as one of its children (event ChildTaken)",
        }[worst.action],
        next=f"phalanx data show {observed.run} --step {worst.step} (are these the texts that you mean?)"
        if is_planned
        else change.next
        if change is not None and back is False
        else _way_back(observed, worst, saved, back),
    )


def diverged(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a critical reason if the median loss is above that of an untrained model, or far above the run's own past
    for a window of steps; or less far, while the weights of a layer vanish.

    None beside a critical spike, or with too few steps.
    """
    losses = [(t, step) for t, step in observed.settled if math.isfinite(step.loss)]
    if len(losses) < o.RECENT_STEPS or any(reason.severity == "critical" for reason in spike(observed)):
        return  # a spike that has not come back names the step and its batch
    window = observed.spike_window
    untrained = _untrained_loss(observed)
    best = _least_median(observed, lambda step: step.loss)
    now = median(step.loss for _, step in losses[-o.RECENT_STEPS :])
    above = now > (1 + o.BACK) * untrained
    vanished = vanished_weights(observed)
    limit = (1 + o.BACK) * untrained if above else (1 + (o.BACK if vanished else o.RISEN)) * best
    reached = losses[-1][1].step
    # The steps since the loss was below the limit last, on which the rule rests.
    below = max((step.step for _, step in losses if step.loss <= limit), default=0)
    risen = [(t, step) for t, step in losses if step.step > below]
    if not above and (now <= limit or not risen or reached - risen[0][1].step < window):
        return
    since, first = next(((t, step) for t, step in losses if step.loss > limit), losses[-1])
    back = _train_from_before(observed, first.step)
    where = "in a run of its own" if observed.checkpoint_before(first.step) is None else "from before it"
    change = _recent_change(observed, first.step, window, of_data=False)
    yield o.Reason(
        code="diverged",
        severity="critical",
        title=f"The loss has diverged: {now:.4g}",
        where=_since_step(below, first),
        since=since,
        evidence=(
            f"the median loss of the newest {o.RECENT_STEPS} logged steps, up to {reached:,}, is {now:.4g}",
            *(
                (f"an untrained model has {untrained:.4g} (all tokens are equally probable to it)",)
                if above
                else ()
            ),
            *((f"the run's own best is {best:.4g}",) if math.isfinite(best) else ()),
            *(change.evidence if change is not None else ()),
            *((vanished,) if vanished else ()),
        ),
        doing=observed.doing(f"training continues; {observed.newest_checkpoint}"),
        next=change.next
        if change is not None
        else f"lower optimizer.weight_decay, {where}: {back} --set optimizer.weight_decay=..."
        if vanished
        else f"lower optimizer.lr or lengthen schedule.warmup_steps, {where}: {back} --set optimizer.lr=...",
    )


def raised_loss(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if, a window of steps after the newest change of data or fields, the loss is still above its level before, or varies
    far more with the same data.

    Info if the data change. None beside a divergence, or beside a spike that is critical or planned.
    """
    change = change_before(observed, observed.last_step[1].step) if observed.last_step else None
    if change is None:
        return
    window, steps = observed.spike_window, o.of_kind(Step, observed.events)
    since = [(t, step) for t, step in steps if step.step > change.step and math.isfinite(step.loss)]
    before = [loss for loss in change.losses_before if math.isfinite(loss)][-window:]
    if min(len(since), len(before)) < o.RECENT_STEPS or since[-1][1].step - change.step < window:
        return
    reached = since[-1][1].step
    in_window = sum(step.step > reached - window for _, step in since)
    losses = [step.loss for _, step in since[-max(o.RECENT_STEPS, in_window) :]]
    usual, most = median(before[-o.RECENT_STEPS :]), max(before[-o.RECENT_STEPS :])
    now, noise, noise_before = median(losses), _noise(losses), _noise(before)
    has_risen = usual > 0 and now > max(most, (1 + o.BACK) * usual)
    if not has_risen and (change.of_data or not 0 < o.NOISIER * noise_before < noise):
        return
    if any(diverged(observed)) or any(reason.severity != "warning" for reason in spike(observed)):
        return
    how = (
        f"is {now / usual - 1:.0%} higher"
        if has_risen
        else f"varies {noise / noise_before:.1f} times as much"
    )
    yield o.Reason(
        code="raised-loss",
        severity="info" if change.of_data else "warning",
        title=f"The loss {how} since step {change.step + 1:,}, where {'the data' if change.of_data else 'fields of the run'} change",
        where=f"step {change.step + 1:,} and after",
        since=since[0][0],
        evidence=(
            f"the median loss of the newest {len(losses)} logged steps, up to {reached:,}, is {now:.4g}, and {noise:.2g} from step to step",
            f"before step {change.step + 1:,} it was {usual:.4g}, at most {most:.4g}, and {noise_before:.2g} from step to step",
            *change.evidence,
        ),
        doing=observed.doing("training continues"),
        next=change.next,
    )


def _noise(losses: Sequence[float]) -> float:
    """Return the median change between neighbors of ``losses``, without their trend, which is larger if fewer steps are logged."""
    trend = (losses[-1] - losses[0]) / (len(losses) - 1)
    return median(abs(after - before - trend) for before, after in pairwise(losses))


def _recent_change(observed: o.Observed, step: int, window: int, *, of_data: bool) -> Change | None:
    """Return the newest change, of data or of fields, if it is within the window before ``step``."""
    change = change_before(observed, step)
    return change if change and change.of_data == of_data and step <= change.step + window else None


def not_learning(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the median loss is still near an untrained model's, two windows of steps after the warmup.

    None with fewer than ``RECENT_STEPS`` finite losses, or if it has diverged.
    """
    spec = observed.spec
    losses = [(t, step) for t, step in observed.recent if math.isfinite(step.loss)]
    # The first loss is no measure: a run may begin with trained weights, or with weights that are worse than none.
    if spec is None or spec.model.vocab_size < 2 or len(losses) < o.RECENT_STEPS or any(diverged(observed)):
        return
    after = spec.schedule.warmup_steps + 2 * spec.train.spike_window
    reached = losses[-1][1].step
    untrained, now = math.log(spec.model.vocab_size), median(step.loss for _, step in losses)
    if reached < after or now <= (1 - o.UNLEARNED) * untrained:
        return
    first, is_far = observed.first_loss, observed.began_far
    moved = _update_ratio(observed)
    yield o.Reason(
        code="not-learning",
        title=f"The loss began at {first:.4g}, and at {now:.4g} is still that of an untrained model"
        if is_far
        else f"The loss does not fall: {now:.4g}",
        where="the whole run",
        since=observed.began_at,
        evidence=(
            f"the median loss of the newest {len(losses)} logged steps, up to {reached:,}, is {now:.4g}",
            f"an untrained model has {untrained:.4g}; the rate has been full since step {spec.schedule.warmup_steps:,}",
            *(
                (
                    f"a step moves the weights by {moved:.1g} of their size, where a thousandth is usual: the rate is too low",
                )
                if moved < o.SMALL_UPDATE
                else ()
            ),
        ),
        doing=observed.doing("training continues"),
        next=(
            f"the initial weights are too large (model.init_std = {spec.model.init_std:g}), or not those that you mean: "
            if is_far
            else f"phalanx data show {observed.run} --step {reached} (are these the texts that you mean?); then change optimizer.lr "
        )
        + "in a run of its own: phalanx train RUN_FILE --set "
        + ("model.init_std=..." if is_far else "optimizer.lr=..."),
    )


def _update_ratio(observed: o.Observed) -> float:
    """Return the median over layers of the newest measured updates, as a share of their weights; infinite without a measurement."""
    measured = observed.newest(LayerStatistics)
    ratios = [
        value
        for name, values in (measured[1].figures.items() if measured else ())
        if name.endswith(".update_ratio")
        for value in values
        if value is not None
    ]
    return median(ratios) if ratios else math.inf


def endless_warmup(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the warmup is not shorter than the run, so that no step has the full learning rate.

    None before step ``RECENT_STEPS``. Also of a finished run.
    """
    spec = observed.spec
    if spec is None or observed.last_step is None:
        return
    _, step = observed.last_step
    warmup = spec.schedule.warmup_steps
    if warmup < spec.train.steps or step.step < o.RECENT_STEPS:
        return
    yield o.Reason(
        code="endless-warmup",
        title=f"The learning rate warms up to the end: {step.lr:.3g} of {spec.optimizer.lr:.3g} at step {step.step:,}",
        where="schedule.warmup_steps",
        since=observed.began_at,
        evidence=(
            f"schedule.warmup_steps = {warmup:,} is not less than train.steps = {spec.train.steps:,}: no step has the full rate",
            f"step {step.step:,} of {step.steps:,}: loss {step.loss:.4g}, learning rate {step.lr:.3g}",
        ),
        doing=observed.doing("training continues, with too small a rate"),
        next="shorten the warmup in a run of its own: phalanx train RUN_FILE --set schedule.warmup_steps=...",
    )


def loss_too_low(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the loss of a run from fresh weights is lower than its text allows, of which the size of the compressed held-out
    text is a measure.

    The held-out loss separates a leak from memorized data. Trained models are left out: short answers, such as labels, can be learned to
    such a loss.
    """
    spec = observed.spec
    losses = [(t, step) for t, step in observed.recent if math.isfinite(step.loss)]
    if spec is None or spec.checkpoint.init_from or spec.model.vocab_size < 2 or len(losses) < o.RECENT_STEPS:
        return
    untrained = math.log(spec.model.vocab_size)
    evaluated = observed.newest(Evaluated)
    compressed = _compressed_loss(observed, evaluated[1] if evaluated else None)
    limit = min(o.TOO_GOOD * untrained, o.XZ_SHARE * compressed)
    now = median(step.loss for _, step in losses)
    if now >= limit:
        return
    below = [t for t, step in observed.settled if step.loss < limit]
    held_out = evaluated[1].loss if evaluated else None
    cause = (
        "either targets leak into the inputs, or the data repeat themselves"
        if held_out is None
        else f"so is the held-out loss, {held_out:.4g}: targets leak into the inputs, or the held-out text is in the training text"
        if held_out < limit
        else f"the held-out loss is {held_out:.4g}: the training data are memorized"
    )
    yield o.Reason(
        code="loss-too-low",
        title=f"The loss is too low to be true: {now:.2g}",
        where="the data, or the model's mask",
        since=below[0] if below else None,
        evidence=(
            f"the median loss of the newest {len(losses)} logged steps, up to {losses[-1][1].step:,}, is {now:.2g} nats a token; "
            f"an untrained model has {untrained:.4g}, and text leaves a twentieth of it",
            *((f"xz -9 leaves {compressed:.4g} of the held-out text",) if math.isfinite(compressed) else ()),
            cause,
        ),
        doing=observed.doing("training continues"),
        next=f"phalanx data show {observed.run} --step {losses[-1][1].step} (do the texts repeat?); "
        "of a model of your own, see that no position reads a later one; [dedup] of a recipe removes repeated documents",
    )


def _compressed_loss(observed: o.Observed, evaluated: Evaluated | None) -> float:
    """Return the size of the held-out text after ``xz -9`` in nats per token; infinite if it is not known."""
    xz = observed.started.xz_bits_per_byte if observed.started else None
    if xz is None or evaluated is None or not evaluated.bits_per_byte:
        return math.inf
    return xz * evaluated.loss / evaluated.bits_per_byte


def held_out_rises(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the held-out loss, or that of a source, is ``HELD_OUT_RISEN`` above its best in both newest evaluations.

    None if it diverged, or evaluations do not compare. Also of a finished run.
    """
    curves: dict[str, list[tuple[float, int, float]]] = {}
    for t, body in o.of_kind(Evaluated, observed.all_events):
        for name, loss in {"": body.loss, **body.sources}.items():
            if math.isfinite(loss):
                curves.setdefault(name, []).append((t, body.step, loss))
    risen = {
        name: min(curve, key=lambda point: point[2])
        for name, curve in curves.items()
        if len(curve) >= o.EVALUATIONS
        and min(loss for _, _, loss in curve[-o.NEWEST_MEASUREMENTS :])
        > (1 + o.HELD_OUT_RISEN) * min(loss for _, _, loss in curve)
    }
    if not risen or any(diverged(observed)) or any(other_ruler(observed)):
        return
    sources = ", ".join(name for name in risen if name)
    epochs = surroundings.epochs_read(observed)
    since, best_step, _ = min(risen.values(), key=lambda point: point[1])
    yield o.Reason(
        code="held-out-rises",
        title=f"The held-out loss{f' of {sources}' if sources else ''} rises since step {best_step:,}",
        where=f"source {sources}" if sources else "held-out text",
        since=since,
        evidence=(
            *(
                f"{name or 'all held-out text'}: {loss:.4g} at step {step:,}, {curves[name][-1][2]:.4g} at step {curves[name][-1][1]:,}"
                for name, (_, step, loss) in risen.items()
            ),
            *(
                f"{f'source {name}' if name else 'the training text'} has been read {epochs[name]:.3g} times: it is memorized"
                for name in epochs
                if epochs[name] > 1 and (name in risen or len(epochs) == 1)
            ),
            *_weights_now(observed, [name for name in risen if name]),
        ),
        doing=observed.doing("training continues, and fits the held-out text less and less"),
        next=f"use the checkpoint of step {best_step:,} if it is there (phalanx checkpoint list {observed.run}; evaluation.keep_best keeps it); in a run of "
        "its own, more text of this kind or fewer steps",
    )


def _weights_now(observed: o.Observed, names: Sequence[str]) -> Iterator[str]:
    """Yield a sentence on each named source that the present stage of the data reads less of than the first."""
    spec = observed.spec
    if spec is None or observed.last_step is None:
        return
    stages = stages_of(spec.data)
    start, _ = observed.stage_of(observed.last_step[1].step)
    stage = stages.index(start) if start in stages else 0
    for source in spec.data.sources:
        if source.name in names and stage < len(source.weights) and source.weights[stage] < source.weights[0]:
            yield (
                f"the weight of source {source.name} is {source.weights[stage]:g} since step {start + 1:,}, and was {source.weights[0]:g}: it is forgotten"
            )


def growing_norm(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the gradient norm has grown ``NORM_GROWN`` times over the run's past, for a window of steps.

    None if it diverged.
    """
    norms = [(t, step) for t, step in observed.settled if math.isfinite(step.grad_norm)]
    if len(norms) < o.RECENT_STEPS or any(diverged(observed)):
        return
    least = _least_median(observed, lambda step: step.grad_norm)
    now = median(step.grad_norm for _, step in norms[-o.RECENT_STEPS :])
    limit = o.NORM_GROWN * least
    if not now > limit > 0:
        return
    reached = norms[-1][1].step
    below = max((step.step for _, step in norms if step.grad_norm <= limit), default=0)
    grown = [(t, step) for t, step in norms if step.step > below]
    if not grown or reached - grown[0][1].step < observed.spike_window:
        return  # a spike, or the beginning of what may become one
    since, first = grown[0]
    back = _train_from_before(observed, first.step)
    yield o.Reason(
        code="growing-norm",
        title=f"The gradient norm has grown {now / least:.0f} times: {now:.4g}",
        where=_since_step(below, first),
        since=since,
        evidence=(
            f"the median norm of the newest {o.RECENT_STEPS} logged steps, up to {reached:,}, is {now:.4g}, before clipping",
            f"the least of the run's past is {least:.4g}",
        ),
        doing=observed.doing("training continues, with clipped gradients if optimizer.clip_norm is set"),
        next=f"it often comes before a divergence: lower optimizer.lr from before it: {back} --set optimizer.lr=...",
    )


def _train_from_before(observed: o.Observed, step: int) -> str:
    """Return the command that trains again from the newest checkpoint before ``step``, or from scratch without one."""
    saved = observed.checkpoint_before(step)
    return "phalanx train RUN_FILE" if saved is None else f"phalanx train {observed.run} --from {saved}"


def _since_step(below: int, first: Step) -> str:
    """Return where a change is that has lasted since ``first``. ``below`` is the last step before it; 0 if that is older than the events
    that were read, whose first step is another one each time.
    """
    return f"step {first.step:,} and after" if below else "all of the newest steps"


def _untrained_loss(observed: o.Observed) -> float:
    """Return the loss of a uniform prediction in nats, or of the run's first step if that is larger; infinite if neither is known."""
    vocabulary = observed.spec.model.vocab_size if observed.spec else 0
    first = observed.first_loss
    losses = [math.log(vocabulary)] if vocabulary > 1 else []
    if first is not None and math.isfinite(first):
        losses.append(first)
    return max(losses, default=math.inf)


def _least_median(observed: o.Observed, figure: Callable[[Step], float]) -> float:
    """Return the least median of a figure over stretches of ``RECENT_STEPS`` of the run's steps in the present stage of its data; infinite
    if there are too few."""
    steps = [step for _, step in o.of_kind(Step, observed.all_events)]
    start = observed.stage_of(steps[-1].step)[0] if steps else 0
    steps = [step for step in steps if step.step > start]
    values = [value for value in map(figure, steps) if math.isfinite(value)]
    stretches = range(0, len(values) - o.RECENT_STEPS + 1, o.RECENT_STEPS)
    return min((median(values[first : first + o.RECENT_STEPS]) for first in stretches), default=math.inf)


def _is_planned(observed: o.Observed, step: int, window: int) -> bool:
    """Return True if ``data.stages`` begins other data within the window before ``step``, for longer than that: the usual loss is that of the
    data before."""
    start, end = observed.stage_of(step)
    return start > 0 and step - start <= window < end - start


def _way_back(observed: o.Observed, worst: LossSpike, saved: int | None, back: bool | None) -> str:
    """Return the command that explains a spike, and the one that goes back and leaves the step out if that is due.

    It is due if the spike stopped the run. It also is if training continued, the loss is not ``back``, and there is a
    checkpoint ``before``.
    """
    look = f"phalanx spike {observed.run} {worst.step}"
    if worst.action == "stop":
        return f"{look}; then leave it out: phalanx train {observed.run} --from {worst.step - 1} --set train.on_spike=skip"
    if worst.action == "continue" and back is False and saved is not None:
        return f"{look}; to go back and leave it out: phalanx train {observed.run} --from {saved} --set train.on_spike=skip"
    return look


def _is_back(observed: o.Observed, worst: LossSpike) -> bool | None:
    """Return True if the median of the newest losses is back at the level before the spike; None if there are too few steps since.

    Losses on data that begin later (``data.stages``) count only if there are too few before.
    """
    _, end = observed.stage_of(worst.step)
    after = [
        (step.step, step.loss)
        for _, step in observed.steps
        if step.step > worst.step and math.isfinite(step.loss)
    ]
    on_stage = [loss for step, loss in after if step <= end]
    since = on_stage if len(on_stage) >= o.RECENT_STEPS // 2 else [loss for _, loss in after]
    if len(since) < o.RECENT_STEPS // 2:
        return None
    return median(since[-o.RECENT_STEPS :]) <= (1 + o.BACK) * worst.typical_loss


def evaluation_not_finite(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a critical reason if the newest loss on the held-out text is NaN or infinite: the weights are of no use."""
    newest = observed.newest(Evaluated)
    if newest is None or math.isfinite(newest[1].loss):
        return
    t, evaluated = newest
    good = [step for step, _ in observed.checkpoints if step < evaluated.step]
    yield o.Reason(
        code="not-finite",
        severity="critical",
        title=f"The held-out loss of step {evaluated.step:,} is {evaluated.loss}: these weights are of no use",
        where=f"the weights of step {evaluated.step:,}",
        since=t,
        evidence=(
            f"evaluated after step {evaluated.step:,}",
            f"checkpoints before it: {', '.join(f'{step:,}' for step in good[-3:])}"
            if good
            else "no checkpoint is before it",
        ),
        doing=observed.doing("training continues with these weights"),
        next=f"phalanx logs {observed.run} --level warning (since when steps are not finite); phalanx hash CHECKPOINT and phalanx score for "
        "earlier ones; continue from a good one in a run of its own (init_from)",
    )


def not_finite(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason for the newest step that was not finite: critical if the run ended before it, else a warning.

    None for a finished run. A skipped step is dropped after a window of steps and ``NEWS_S`` seconds, one that ended
    the run once a later start has computed it.
    """
    by_step = {body.step: (t, body) for t, body in o.of_kind(NonFinite, observed.events)}
    if not by_step or observed.finished:
        return
    since, last = by_step[max(by_step)]
    steps = o.of_kind(Step, observed.events)
    reached = steps[-1][1].step if steps else 0
    if last.skipped and reached >= last.step + observed.spike_window and observed.now - since >= o.NEWS_S:
        return
    if not last.skipped and any(t > since and step.step >= last.step for t, step in steps):
        return  # it was started again, and has passed the step
    statistics = [body for _, body in o.of_kind(LayerStatistics, observed.events) if body.step == last.step]
    first_layer = first_nonfinite(statistics[-1]) if statistics else None
    layer = (
        (f"{described_layer(first_layer[0])} is the first that is not finite ({first_layer[1]})",)
        if first_layer
        else ()
    )
    places = [
        f"step {last.step:,}",
        *(f"slot {slot}" for slot in last.slots[:1]),
        *(f"gradient of {name}" for name in last.parameters[:1]),
        *(
            [f"rank{'s' if len(last.ranks) > 1 else ''} {', '.join(map(str, last.ranks[:8]))}"]
            if last.ranks
            else []
        ),
    ]
    batch = (
        (f"its batch: samples {last.first_sample:,} to {last.first_sample + last.samples - 1:,}",)
        if last.samples
        else ()
    )
    often = (f"{len(by_step)} steps since step {min(by_step):,} were not finite",) if len(by_step) > 1 else ()
    shown = f" --slot {last.slots[0]}" if last.slots else ""
    suspect = suspect_of_nonfinite(observed) if last.skipped else None
    yield o.Reason(
        code="not-finite",
        severity="warning" if last.skipped else "critical",
        title=f"Step {last.step:,} is not finite: NaN or infinity",
        where=", ".join(places),
        since=since,
        evidence=(last.problem, *batch, *often, *((suspect.evidence,) if suspect else ()), *layer),
        doing="the step was skipped, and changed no weight (train.on_nonfinite)"
        if last.skipped
        else "the run ended before it, with the weights of the step before saved (train.on_nonfinite)",
        next=suspect.next
        if suspect
        else f"phalanx data show {observed.run} --step {last.step}{shown}; then lower optimizer.lr, lengthen schedule.warmup_steps"
        + (
            ""
            if last.skipped
            else f", or skip such steps: phalanx train {observed.run} --set train.on_nonfinite=skip"
        ),
    )
