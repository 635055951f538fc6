"""The value that building a rank's model results in: the model with everything that is needed to run steps on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.observe.ledger.ledger import Bucket
from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.mesh.slots import Round
from phalanx.parallel.reduction.data_parallel import DataParallel
from phalanx.run.spec import RunSpec
from phalanx.train.optimizers.optimizer import Optimizer
from phalanx.train.step.placement import Placement
from phalanx.train.step.slot import SlotRunner


@dataclass(frozen=True)
class Built:
    """A model on one rank, with memory allocated but not yet filled."""

    spec: RunSpec
    """The resolved run."""
    model: DataParallel
    placement: Placement
    """Where this rank's parts lie in the whole tensors."""
    runner: SlotRunner
    """Forward and backward of a slot, with or without a pipeline."""
    optimizer: Optimizer
    rounds: list[Round]
    """The slots that this rank computes in each step, in order."""
    waits: Mapping[Bucket, CommClock]
    """Stopwatch per communication axis: exposed communication time of forward and backward, by ledger bucket."""
    flops_per_token: int
    """Training FLOP per token of the whole model."""
