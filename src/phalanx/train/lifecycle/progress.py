"""The progress of a run: the part of its state that is not tensors. All of it goes into checkpoints and snapshots."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from phalanx.train.step.step import StepReport


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

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> TrainProgress:
        """Reads the progress back from a checkpoint's ``extra``."""
        return cls(**{field.name: extra[field.name] for field in fields(cls)})

    def advance(self, report: StepReport, updates: int, batch_size: int) -> None:
        """Counts one more step of ``batch_size`` sequences; ``updates`` are those applied so far."""
        self.step += 1
        self.tokens += report.tokens
        self.updates = updates
        self.next_sample += batch_size
        if math.isfinite(report.loss):
            self.loss = report.loss
        self.skipped_in_a_row = 0 if report.applied else self.skipped_in_a_row + 1
