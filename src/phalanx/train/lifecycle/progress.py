"""The progress of a run: the part of its state that is not tensors. All of it goes into checkpoints and snapshots."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from phalanx.run.spec import TrainSpec
from phalanx.train.step.spikes import Spike, SpikeRule
from phalanx.train.step.step import StepReport

_SPIKES_KEPT = 3
"""So many of the newest spikes keep the checkpoint before them: a run that spikes all day must not fill its disk."""
_LEFT_OUT_KEPT = 256
"""So many of the newest stretches of samples that were left out are listed; the event stream has them all."""
_SINCE_0_1 = {"recent", "spikes", "left_out"}


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
    """Loss and gradient norm of the last ``train.spike_window`` steps, by which spikes are told. Never changed in place, as those below."""
    spikes: list[list[int]] = field(default_factory=list)
    """First and last step of the newest spikes."""
    left_out: list[list[int]] = field(default_factory=list)
    """First sample and number of the newest stretches that changed no weight because of a spike."""

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> TrainProgress:
        """Reads the progress back from a checkpoint's ``extra``; one of an older version has no history of losses."""
        known = (one.name for one in fields(cls) if one.name in extra or one.name not in _SINCE_0_1)
        return cls(**{name: extra[name] for name in known})

    def withholds(self, train: TrainSpec, loss: float, grad_norm: float) -> bool:
        """True if the update of the next step, with this loss and gradient norm, is not to be applied because it is a spike."""
        if train.on_spike == "continue":
            return False
        return SpikeRule.of(train).find(self.recent, loss, grad_norm) is not None

    def spike(self, report: StepReport, train: TrainSpec) -> Spike | None:
        """The spike that the next step is, if it is one."""
        return SpikeRule.of(train).find(self.recent, report.loss, report.grad_norm)

    def advance(self, report: StepReport, updates: int, train: TrainSpec, spike: Spike | None) -> None:
        """Counts one more step of ``train.batch_size`` sequences; ``updates`` are those applied so far, ``spike`` is what ``spike`` found."""
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
        """Notes that the step that was just counted is a spike, and that it left out so many samples."""
        if self.spikes and self.spikes[-1][1] == self.step - 1:
            self.spikes = [*self.spikes[:-1], [self.spikes[-1][0], self.step]]
        else:
            self.spikes = [*self.spikes, [self.step, self.step]][-_SPIKES_KEPT:]
        if samples and self.left_out and sum(self.left_out[-1]) == first_sample:
            self.left_out = [*self.left_out[:-1], [self.left_out[-1][0], self.left_out[-1][1] + samples]]
        elif samples:
            self.left_out = [*self.left_out, [first_sample, samples]][-_LEFT_OUT_KEPT:]
