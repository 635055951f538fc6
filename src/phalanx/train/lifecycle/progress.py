"""The progress of a run: how a step advances it, and which samples come next.

Progress is the part of a run's state that is not tensors. All of it goes into checkpoints and snapshots. The steps of a fork at a
loss spike follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from phalanx.data.errors import DataError
from phalanx.data.reading.cached_shard import fetched_bytes, most_ahead_bytes
from phalanx.data.reading.dataset import RunData
from phalanx.data.reading.prefetch import Prefetch
from phalanx.observe.events import IncidentKind
from phalanx.observe.ledger import Ledger
from phalanx.parallel.divisions import Round
from phalanx.run.directory.paths import step_of
from phalanx.run.sections.monitoring import Candidate, Preference
from phalanx.run.spec import RunSpec, TrainSpec
from phalanx.train.step.spikes import Spike, SpikeRule
from phalanx.train.step.state import Built
from phalanx.train.step.step import Batches, Stepper, StepReport

SPIKES_KEPT = 3
"""So many of the newest spikes keep the checkpoint before them: a run that spikes all day must not fill its disk."""
_LEFT_OUT_KEPT = 256
"""So many of the newest stretches of samples that were left out are listed; the event stream has them all."""
_SINCE_0_1 = {"recent", "spikes", "left_out", "rate_scale", "clip_scale", "wide", "forks"}


def is_due(step: int, every: int) -> bool:
    """Return True if something that is done every so many steps, 0 for never, is done after this one."""
    return every > 0 and step % every == 0


@dataclass
class TrainProgress:
    """The progress of a run."""

    step: int = 0
    """Steps done, skipped ones included."""
    tokens: int = 0
    updates: int = 0
    skipped_in_a_row: int = 0
    loss: float | None = None
    """The loss of the last step whose loss was finite."""
    next_sample: int = 0
    """The first sample of the next step, in the run's order: the place in the data."""
    recent: list[list[float]] = field(default_factory=list)
    """Loss and gradient norm of the last ``train.spike_window`` steps, by which spikes are found. Never changed in place, as those below."""
    spikes: list[list[int]] = field(default_factory=list)
    """First and last step of the newest spikes."""
    left_out: list[list[int]] = field(default_factory=list)
    """First sample and number of the newest stretches that changed no weight because of a spike."""

    rate_scale: float = 1.0
    """Factor of the learning rate, by the children that were taken at forks."""
    clip_scale: float = 1.0
    """Factor of ``optimizer.clip_norm``, by the children that were taken at forks."""
    wide: bool = False
    """True if products are computed in ``precision.compute``, by a child that was taken at a fork."""
    forks: list[list[int]] = field(default_factory=list)
    """Step of the spike, step of the state that was gone back to, and last step of the children, of each fork."""

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> TrainProgress:
        """Return the progress in a checkpoint's ``extra``. Fields that an older version did not write have their defaults. Raises
        ``KeyError`` for others."""
        names = (entry.name for entry in fields(cls))
        return cls(**{name: extra[name] for name in names if name in extra or name not in _SINCE_0_1})

    def withholds(self, train: TrainSpec, loss: float, grad_norm: float) -> bool:
        """True if the update of the next step, with this loss and gradient norm, is not to be applied because it is a spike."""
        if train.on_spike == "continue":
            return False
        return SpikeRule.of(train).find(self.recent, loss, grad_norm) is not None

    def stepper(
        self,
        built: Built,
        batches: Batches,
        ledger: Ledger,
        withholds: Callable[[float, float], bool] | None = None,
    ) -> Stepper:
        """Return what computes the steps after this progress, on ``built``, whose products get the progress's format.
        By default the updates are withheld that the run's rule for spikes withholds.
        """
        built.set_wide(wide=self.wide)
        by_rule = partial(self.withholds, built.spec.train)
        return Stepper(
            *(built, batches, ledger, self.updates, withholds or by_rule, self.rate_scale, self.clip_scale)
        )

    def spike(self, report: StepReport, train: TrainSpec) -> Spike | None:
        """The spike that the next step is, if it is one."""
        return SpikeRule.of(train).find(self.recent, report.loss, report.grad_norm)

    def advance(self, report: StepReport, updates: int, train: TrainSpec, spike: Spike | None) -> None:
        """Count one more step of ``train.batch_size`` sequences; ``updates`` are those applied so far, ``spike`` is the result of
        ``spike``.

        ``loss`` keeps the last finite value. A step that was not applied counts to ``skipped_in_a_row``, and any other resets it.
        """
        batch_size = train.batch_size
        self.step += 1
        if spike is not None:
            self._note_spike(self.next_sample, 0 if report.applied else batch_size)
        self.recent = SpikeRule.of(train).remember(self.recent, report.loss, report.grad_norm)
        self.tokens += report.tokens
        self.updates = updates
        self.next_sample += batch_size
        if math.isfinite(report.loss):
            self.loss = report.loss
        self.skipped_in_a_row = 0 if report.applied else self.skipped_in_a_row + 1

    def _note_spike(self, first_sample: int, samples: int) -> None:
        """Record the step just counted as a spike, and if ``samples`` is not 0, that so many from ``first_sample``
        were left out. Adjacent steps and ranges are merged; beyond a limit the oldest are dropped.
        """
        if self.spikes and self.spikes[-1][1] == self.step - 1:
            self.spikes = [*self.spikes[:-1], [self.spikes[-1][0], self.step]]
        else:
            self.spikes = [*self.spikes, [self.step, self.step]][-SPIKES_KEPT:]
        if samples and self.left_out and sum(self.left_out[-1]) == first_sample:
            self.left_out = [*self.left_out[:-1], [self.left_out[-1][0], self.left_out[-1][1] + samples]]
        elif samples:
            self.left_out = [*self.left_out, [first_sample, samples]][-_LEFT_OUT_KEPT:]


# Samples: the order of a run's samples is fixed, and ``TrainProgress.next_sample`` is the position in it.


class SampleSupply:
    """The samples of a rank's slots in each step of one attempt, and how far ahead they are read."""

    def __init__(
        self, data: RunData, spec: RunSpec, rounds: Sequence[Round], progress: TrainProgress
    ) -> None:
        self._data, self._spec, self._rounds = data, spec, rounds
        self._begun_step, self._begun_sample = progress.step, progress.next_sample

    def samples(self, step: int, slot: int) -> NDArray[np.int64]:
        """The samples ``(sequences, seq_len + 1)`` of slot ``slot`` in step ``step`` (from 1)."""
        return self._data.train_samples(*self._numbers(step, slot))

    def up_to(self, last_step: int) -> Iterator[NDArray[np.int64]]:
        """Yield the samples of this rank's rounds, step after step, each when it is taken."""
        steps = range(self._begun_step + 1, last_step + 1)
        return (self.samples(step, current.slot) for step in steps for current in self._rounds)

    def prefetch(
        self, rank: int, warn: Callable[[str, IncidentKind], None], enough: Callable[[], bool] | None
    ) -> Prefetch[NDArray[np.int64]]:
        """Return an iterator over the samples of this rank's rounds, step after step, each read while the one before is
        computed.

        Samples in object stores are also fetched further ahead, and only for them ``warn`` and ``enough`` are called.
        ``warn`` is called, with ``rank``, if the rank waits long. ``enough`` is polled while it waits; once it is true,
        ``WaitEndedError`` is raised.
        """
        rounds, cached = len(self._rounds), self._data.cached
        numbers = range(self._begun_step * rounds, self._spec.train.steps * rounds)
        depth, next_ahead = self._rounds_ahead(), numbers.start

        def samples_of_round(number: int) -> NDArray[np.int64]:
            """Return the samples of round ``number`` of the attempt, after requesting those of the next ``depth`` rounds from the store."""
            nonlocal next_ahead
            while next_ahead < min(number + depth, numbers.stop):
                step, turn = divmod(next_ahead, rounds)
                self._data.read_ahead(*self._numbers(step + 1, self._rounds[turn].slot))
                next_ahead += 1
            step, turn = divmod(number, rounds)
            return self.samples(step + 1, self._rounds[turn].slot)

        def warn_of_wait(waited_s: float) -> None:
            warn(
                f"rank {rank} has waited {waited_s:.0f} s for samples from {', '.join(dataset.url for dataset in cached)}; the run waits "
                f"until data.timeout_s = {self._spec.data.timeout_s:g} s are over, saves and ends then (at a second request to stop, at once)",
                IncidentKind.DATA_WAIT,
            )

        return Prefetch(
            samples_of_round,
            numbers,
            give_up=self._data.give_up,
            on_wait=warn_of_wait if cached else None,
            enough=enough if cached else None,
        )

    def _rounds_ahead(self) -> int:
        """Return the number of rounds that are fetched ahead of the requested one, within ``data.read_ahead_mib`` and
        a quarter of the cache; 0 if all data are in folders.
        """
        spec, cached = self._spec, self._data.cached
        if not cached:
            return 0
        token_bytes = max(dataset.index.item_bytes for dataset in cached)
        sample_bytes = fetched_bytes((spec.train.seq_len + 1) * token_bytes)
        ahead_bytes = most_ahead_bytes(
            int(spec.data.read_ahead_mib * (1 << 20)), int(spec.data.cache_gib * (1 << 30))
        )
        return ahead_bytes // (spec.train.batch_size // spec.train.slots * sample_bytes)

    def _numbers(self, step: int, slot: int) -> tuple[int, int]:
        """Return the first sample of slot ``slot`` in step ``step`` (from 1), and the number of samples in a slot.

        Counted from where this attempt began: before, the run's parent may have had another batch size.
        """
        train = self._spec.train
        per_slot = train.batch_size // train.slots
        first = self._begun_sample + (step - 1 - self._begun_step) * train.batch_size
        return first + slot * per_slot, per_slot


class BridgedSamples:
    """The samples of a rank's rounds. From the first round whose samples cannot be read, those of the round before are repeated.

    The other ranks wait for this one in the step's collectives. It completes them with repeated samples, and all ranks can
    save the state before the step. A step with repeated samples must not be applied.
    """

    def __init__(self, samples: Batches, bridges: Callable[[], bool]) -> None:
        """``bridges``: while it returns False, an error is raised at once."""
        self._samples, self._bridges = samples, bridges
        self._last: NDArray[np.int64] | None = None
        self.error: DataError | None = None
        """The error of the first samples that could not be read."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> NDArray[np.int64]:
        """Return the samples of the next round. Raises ``DataError`` where there are none before it, and what ``samples`` raises beside."""
        if self.error is None:
            try:
                self._last = next(self._samples)
            except DataError as error:
                if self._last is None or not self._bridges():
                    raise
                self.error = error
        assert self._last is not None
        return self._last


# Decisions of a fork at a loss spike: the state from which its children begin, their steps, and the child that is taken.
#
# All of this follows from the run file and from recorded numbers, never from times, so every fleet decides in the same way. The
# *base* is the newest saved state on the grid of ``spike.base_every_steps`` that is at least two steps older than the spike.
# The update just before a spike may be its cause. States that an earlier fork has abandoned do not count. Without such a state,
# the base is the state just before the spike.


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
        """Return the report of this step: its loss, norm, rate, and whether it was applied, without losses of
        slots. Requests, tokens and all other figures are those of the step of the spike.

        A loss or norm that was not finite becomes NaN.
        """
        loss, norm = (math.nan if value is None else value for value in (self.loss, self.grad_norm))
        return replace(
            of_spike, loss=loss, grad_norm=norm, lr=self.lr, applied=self.is_applied, slot_losses=()
        )


def plan_fork(spec: RunSpec, progress: TrainProgress) -> ForkPlan:
    """Return the steps of a fork at the spike that is the next step of ``progress``."""
    spike = progress.step + 1
    base = _base(spec, progress, spike)
    return ForkPlan(spike, base, min(progress.step + spec.spike.fork_steps, spec.train.steps))


def bases_needed(spec: RunSpec, progress: TrainProgress) -> list[int]:
    """Return the steps, ascending, whose checkpoints must be kept when ``progress`` is saved.

    They are for a spike that may follow, and for the newest forks: a run that falls back to a state before a spike
    meets it again.
    """
    forked = [base for _, base, _ in progress.forks[-SPIKES_KEPT:]]
    steps = (*forked, _base(spec, progress, progress.step + 1), progress.step // _grid(spec) * _grid(spec))
    return sorted({step for step in steps if step > 0})


def is_left(step: int, progress: TrainProgress) -> bool:
    """Return True if a fork of ``progress`` went back behind ``step``, whose state before it led to nothing."""
    return any(base < step < end for _, base, end in progress.forks)


def _base(spec: RunSpec, progress: TrainProgress, spike: int) -> int:
    """Return the step that a fork at ``spike`` goes back to: the newest on the grid that is at least two steps before
    the spike, but not before an earlier fork's end or the run's start.

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
    """Return the first candidate that already decides by ``prefer``. Otherwise return the one with the lowest loss,
    the first of equal ones; ``None`` if that loss is not finite.
    """
    for candidate, outcome in outcomes.items():
        if is_decided(prefer, outcome):
            return candidate
    best = min(outcomes, key=lambda candidate: outcomes[candidate].loss)
    return best if math.isfinite(outcomes[best].loss) else None
