"""What becomes of a step that was not finite, or a spike: it is told, and then training goes on without it, or with it, or ends.

Whatever ends here ends saved, with the weights as they were before that step, and the error says how to go on. All ranks come to the same end: what
is looked at is the same on all of them.
"""

from __future__ import annotations

from phalanx.observe.events import LossSpike, NonFinite
from phalanx.train.assembly.assemble import Training
from phalanx.train.lifecycle.ending import RunFailedError
from phalanx.train.lifecycle.progress import TrainProgress
from phalanx.train.lifecycle.saving import save, settle
from phalanx.train.step.spikes import Spike
from phalanx.train.step.step import StepReport


class NonFiniteError(RunFailedError):
    """The loss or the gradient was infinite or not a number, and the run is to stop at that."""


class LossSpikeError(RunFailedError):
    """The loss or the gradient norm was far above what is usual, and the run is to stop at that."""


def skip_or_raise(training: Training, progress: TrainProgress, report: StepReport) -> None:
    """Reports a step that was not finite; returns if it may be skipped, else saves the run and raises ``NonFiniteError``."""
    train = training.inputs.spec.train
    skip = train.on_nonfinite == "skip" and progress.skipped_in_a_row + 1 < train.max_skipped
    sources = ", ".join(report.nonfinite[:3])
    if len(report.nonfinite) > 3:
        sources += f" and {len(report.nonfinite) - 3} more"
    what = f"loss {report.loss:g}, gradient norm {report.grad_norm:g}: not finite are {sources}"
    training.reporter.emit(
        NonFinite(
            progress.step + 1,
            what,
            skipped=skip,
            first_sample=progress.next_sample,
            samples=train.batch_size,
            ranks=list(report.nonfinite_ranks),
            slots=list(report.nonfinite_slots),
            parameters=list(report.nonfinite_parameters),
        )
    )
    if skip:
        return
    weights = _weights_kept(training, progress)
    remedy = (
        f"{train.max_skipped} steps in a row were skipped; lower optimizer.lr or lengthen schedule.warmup_steps"
        if train.on_nonfinite == "skip"
        else 'lower optimizer.lr, lengthen schedule.warmup_steps, or set train.on_nonfinite = "skip"'
    )
    raise NonFiniteError(f"step {progress.step + 1}: {what}; {weights}. {remedy}", remedy)


def tell_spike_or_raise(
    training: Training, progress: TrainProgress, report: StepReport, spike: Spike
) -> None:
    """Reports a spike; returns if training goes on with or without its update, else saves the run and raises ``LossSpikeError``."""
    train, step = training.inputs.spec.train, progress.step + 1
    enough = train.on_spike == "skip" and progress.skipped_in_a_row + 1 >= train.max_skipped
    training.reporter.emit(
        LossSpike(
            step=step,
            loss=report.loss,
            grad_norm=report.grad_norm,
            typical_loss=spike.typical_loss,
            deviations=spike.deviations,
            action="stop" if enough else train.on_spike,
            first_sample=progress.next_sample,
            samples=train.batch_size,
            typical_grad_norm=spike.typical_grad_norm,
            what=spike.what,
            slot=report.worst_slot,
            slot_loss=report.worst_slot_loss,
        )
    )
    if train.on_spike == "continue" or (train.on_spike == "skip" and not enough):
        return
    weights = _weights_kept(training, progress)
    run = training.inputs.directory.path
    action = "continue" if enough else "skip"
    remedy = (
        f"look at the batch with `phalanx data show {run} --step {step}`; "
        f"`phalanx train {run} --from {progress.step} --set train.on_spike={action}` "
        + ("takes it as it is" if enough else "leaves its samples out")
    )
    often = f", and {train.max_skipped} steps in a row were not applied" if enough else ""
    what = (
        f"the {spike.what} is {spike.deviations:.3g} deviations above what is usual{often}: loss {report.loss:.4g} (usual "
        f"{spike.typical_loss:.4g}), gradient norm {report.grad_norm:.4g} (usual {spike.typical_grad_norm:.4g})"
    )
    raise LossSpikeError(f"step {step}: {what}; {weights}. {remedy}", remedy)


def keep_before_spikes(training: Training, progress: TrainProgress) -> None:
    """Has the checkpoints before the newest spikes kept, so that one can go back to them."""
    training.saver.keep_before([first for first, _ in progress.spikes])


def _weights_kept(training: Training, progress: TrainProgress) -> str:
    """Saves the weights as they were before the step; says which they are, and whether that could be done."""
    save(training, progress)
    saved = "and saved" if settle(training) else "but could not be saved: older checkpoints are kept"
    return f"the weights are those of step {progress.step}, {saved}"
