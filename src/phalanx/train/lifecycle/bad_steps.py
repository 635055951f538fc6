"""Bad steps: a non-finite step or a spike is skipped, taken, or ends the run.

All ranks decide by the same numbers, which the step has reduced over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.observe.events import LossSpike, NonFinite
from phalanx.run.spec import RunSpec, TrainSpec
from phalanx.train.lifecycle.ending import RunFailedError
from phalanx.train.lifecycle.progress import TrainProgress
from phalanx.train.step.spikes import Spike
from phalanx.train.step.step import StepReport


class NonFiniteError(RunFailedError):
    """The loss or the gradient was infinite or not a number, and the run is to stop at that."""


class LossSpikeError(RunFailedError):
    """The loss or the gradient norm was far above what is usual, and the run is to stop at that."""


@dataclass(frozen=True)
class BadStep:
    """The decision on a step that was not finite or a spike."""

    event: NonFinite | LossSpike
    problem: str
    remedy: str = ""
    """The action for the user, if the run ends; empty if training continues with or without the step."""

    def error(self, *, saved: bool, newest: str) -> RunFailedError:
        """Return the error that ends the run, with problem and remedy.

        ``saved``: the weights as they were before the step are durable. ``newest``: the run's newest checkpoint, in words.
        """
        kept = "and saved" if saved else f"but could not be saved: {newest}"
        step = self.event.step
        kind = NonFiniteError if isinstance(self.event, NonFinite) else LossSpikeError
        weights = f"the weights are those of step {step - 1}, {kept}"
        return kind(f"step {step}: {self.problem}; {weights}. {self.remedy}", self.remedy)


def judge_nonfinite(train: TrainSpec, progress: TrainProgress, report: StepReport) -> BadStep:
    """Decide on a step that was not finite: skip it if ``train.on_nonfinite`` is "skip" and, with this one, fewer than
    ``train.max_skipped`` were skipped in a row. Else end the run with a remedy.
    """
    skip = train.on_nonfinite == "skip" and progress.skipped_in_a_row + 1 < train.max_skipped
    sources = ", ".join(report.nonfinite[:3])
    if len(report.nonfinite) > 3:
        sources += f" and {len(report.nonfinite) - 3} more"
    problem = f"loss {report.loss:g}, gradient norm {report.grad_norm:g}: not finite are {sources}"
    event = NonFinite(
        progress.step + 1,
        problem,
        skipped=skip,
        first_sample=progress.next_sample,
        samples=train.batch_size,
        ranks=list(report.nonfinite_ranks),
        slots=list(report.nonfinite_slots),
        parameters=list(report.nonfinite_parameters),
    )
    if skip:
        return BadStep(event, problem)
    remedy = (
        f"{train.max_skipped} steps in a row were skipped; lower optimizer.lr or lengthen schedule.warmup_steps"
        if train.on_nonfinite == "skip"
        else 'lower optimizer.lr, lengthen schedule.warmup_steps, or set train.on_nonfinite = "skip"'
    )
    return BadStep(event, problem, remedy)


def judge_spike(
    spec: RunSpec, progress: TrainProgress, report: StepReport, spike: Spike, run: Path
) -> BadStep:
    """Decide on a spike by ``train.on_spike``: continue with or without its update, fork, or end the run. Too many
    skips in a row or forks end it as well.

    ``run`` is the run's directory, for the remedy.
    """
    train, step = spec.train, progress.step + 1
    often = ""
    if train.on_spike == "skip" and progress.skipped_in_a_row + 1 >= train.max_skipped:
        often = f", and {train.max_skipped} steps in a row were not applied"
    if train.on_spike == "fork" and len(progress.forks) >= spec.spike.most_forks:
        often = f", and the run has forked {len(progress.forks)} times (spike.most_forks)"
    too_many = bool(often)
    problem = (
        f"the {spike.figure} is {spike.deviations:.3g} deviations above what is usual{often}: loss {report.loss:.4g} (usual "
        f"{spike.typical_loss:.4g}), gradient norm {report.grad_norm:.4g} (usual {spike.typical_grad_norm:.4g})"
    )
    event = LossSpike(
        step=step,
        loss=report.loss,
        grad_norm=report.grad_norm,
        typical_loss=spike.typical_loss,
        deviations=spike.deviations,
        action="stop" if too_many else train.on_spike,
        first_sample=progress.next_sample,
        samples=train.batch_size,
        typical_grad_norm=spike.typical_grad_norm,
        figure=spike.figure,
        slot=report.worst_slot,
        slot_loss=report.worst_slot_loss,
    )
    if event.action != "stop":
        return BadStep(event, problem)
    action = "continue" if too_many else "skip"
    remedy = (
        f"`phalanx spike {run} {step}` names the cause; "
        f"`phalanx train {run} --from {progress.step} --set train.on_spike={action}` "
        + ("takes it as it is" if too_many else "leaves its samples out")
    )
    return BadStep(event, problem, remedy)
