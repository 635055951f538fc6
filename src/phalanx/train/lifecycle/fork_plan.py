"""Decisions of a fork at a loss spike: the state that its children begin with, their steps, and the child that is taken.

All of it follows from the run file and from recorded numbers, never from times, so every fleet decides alike. The *base* is the newest state
that is at least two steps older than the spike, on the grid of ``spike.base_every_steps``: the update just before a spike may be its cause. States
that an earlier fork has left behind are none. Without such a state the base is the state just before the spike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.run.directory.paths import step_of
from phalanx.run.sections.spike import Candidate, Preference
from phalanx.run.spec import RunSpec
from phalanx.train.lifecycle.progress import SPIKES_KEPT, TrainProgress
from phalanx.train.step.step import StepReport


@dataclass(frozen=True)
class ForkPlan:
    """The steps of a fork."""

    spike: int
    """The step of the spike."""
    base: int
    """The step whose state each child begins with."""
    end: int
    """The last step of each child."""


@dataclass(frozen=True)
class ChildStep:
    """The numbers of a child's step. What is not finite is ``None``, so that checkpoints can hold it."""

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    """Tokens of the run up to this step."""
    is_applied: bool

    def report(self, of_spike: StepReport) -> StepReport:
        """Return the report of this step, with the requests and the number of tokens of the step of the spike."""
        loss, norm = (math.nan if value is None else value for value in (self.loss, self.grad_norm))
        return replace(
            of_spike,
            loss=loss,
            grad_norm=norm,
            lr=self.lr,
            applied=self.is_applied,
            withheld=False,
            slot_losses=(),
        )


def plan_fork(spec: RunSpec, progress: TrainProgress) -> ForkPlan:
    """Return the steps of a fork at the spike that is the next step of ``progress``."""
    spike = progress.step + 1
    base = _base(spec, progress, spike)
    return ForkPlan(spike, base, min(progress.step + spec.spike.fork_steps, spec.train.steps))


def bases_needed(spec: RunSpec, progress: TrainProgress) -> list[int]:
    """Return the steps whose checkpoints must be kept when ``progress`` is saved.

    They are for a spike that may follow, and for the newest forks: a run that falls back to a state before a spike meets it again.
    """
    forked = [base for _, base, _ in progress.forks[-SPIKES_KEPT:]]
    steps = (*forked, _base(spec, progress, progress.step + 1), progress.step // _grid(spec) * _grid(spec))
    return sorted({step for step in steps if step > 0})


def is_left(step: int, progress: TrainProgress) -> bool:
    """Return True if a fork of ``progress`` went back behind ``step``, whose state before it led to nothing."""
    return any(base < step < end for _, base, end in progress.forks)


def _base(spec: RunSpec, progress: TrainProgress, spike: int) -> int:
    """Return the step that a fork goes back to: the newest on the grid of bases before the spike, not before an earlier fork or the
    run's start.

    Without such a step after the start, it is the step before the spike.
    """
    start = spec.checkpoint.init_from
    begin = (step_of(Path(start)) or 0) if spec.checkpoint.init_with == "training" and start else 0
    on_grid = (spike - 2) // _grid(spec) * _grid(spec)
    base = max(on_grid, *(end for _, _, end in progress.forks), begin)
    return base if base > begin else spike - 1


def _grid(spec: RunSpec) -> int:
    return spec.spike.base_every_steps


def begin_child(spec: RunSpec, base: TrainProgress, plan: ForkPlan, candidate: Candidate) -> TrainProgress:
    """Return the progress with which the child of a candidate begins: that of the base, with the fork and the candidate's change of
    rate, clip or format."""
    child = TrainProgress(**vars(base))
    child.forks = [*base.forks, [plan.spike, plan.base, plan.end]]
    if candidate == "rate":
        child.rate_scale *= spec.spike.rate_factor
    if candidate == "clip":
        child.clip_scale *= spec.spike.clip_factor
    if candidate == "wide":
        child.wide = True
    return child


def child_loss(plan: ForkPlan, steps: Sequence[ChildStep]) -> float:
    """Return the mean loss over the second half of the steps from the spike on; infinite if one is not finite."""
    first = plan.spike + (plan.end - plan.spike + 1) // 2
    losses = [step.loss for step in steps if step.step >= min(first, plan.end)]
    finite = [loss for loss in losses if loss is not None]
    return math.fsum(finite) / len(finite) if len(finite) == len(losses) else math.inf


def spikes_again(plan: ForkPlan, child: TrainProgress, steps: Sequence[ChildStep]) -> bool:
    """Return True if a step of a child after that of the spike is a spike, or was not finite and therefore not applied."""
    spikes = any(last > plan.spike for _, last in child.spikes)
    return spikes or any(not step.is_applied for step in steps if step.step > plan.spike)


@dataclass(frozen=True)
class ChildOutcome:
    """The figures by which a child is taken or not."""

    loss: float
    """As ``child_loss`` returns it."""
    spikes_again: bool

    @property
    def is_cured(self) -> bool:
        return math.isfinite(self.loss) and not self.spikes_again


def is_decided(prefer: Preference, outcome: ChildOutcome) -> bool:
    """Return True if no candidate after one with this outcome can be taken."""
    return prefer == "first" and outcome.is_cured


def best_child(prefer: Preference, outcomes: Mapping[Candidate, ChildOutcome]) -> Candidate | None:
    """Return the first candidate that decides by ``prefer``, else the one with the lowest loss, of equal ones the first; ``None``
    if that is not finite."""
    for candidate, outcome in outcomes.items():
        if is_decided(prefer, outcome):
            return candidate
    best = min(outcomes, key=lambda candidate: outcomes[candidate].loss)
    return best if math.isfinite(outcomes[best].loss) else None
