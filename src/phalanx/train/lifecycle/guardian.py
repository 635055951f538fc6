"""The interface between the training loop and whatever watches over its rank from outside.

The loop calls its guardian to learn whether the newest copy of the state is safe and whether the epoch is to end, and shows it the state
after each step. A rank of a fleet has a guardian that talks to its node's agent (``phalanx.fleet``); a rank that runs without a
fleet has ``Guardian`` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from numpy.typing import NDArray

from phalanx.checkpoint.committed.restore import Shard
from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.save.saver import AsyncSaver
from phalanx.data.reading.dataset import RunData
from phalanx.observe.rank_stream import RankFrame
from phalanx.train.step.state import Built
from phalanx.train.step.step import Audit, Stepper, StepReport

Samples = Callable[[int, int], NDArray[np.int64]]
"""Returns the samples of a slot, ``(sequences, seq_len + 1)``, given the step (from 1) and the slot (from 0)."""


class EpochSupersededError(CheckpointError):
    """A later epoch of the run has begun: this one must not write to the run directory any more, and ends."""


class Guardian:
    """Watch over one rank in one epoch of membership; that of a rank without a fleet does nothing."""

    def outside(self) -> AbstractContextManager[None]:
        """Inside, connections are opened that have nothing to do with other ranks, and outlive the end of an epoch."""
        return nullcontext()

    def assembled(self, built: Built, saver: AsyncSaver) -> None:
        """Called once the model is built and its state restored, before training begins."""

    def reads(self, data: RunData) -> None:
        """This rank's samples come from ``data``. Where they are in an object store it may have to wait for them, outside all collectives:
        that is no hang, and must be ended (``RunData.give_up``) when the rank has to leave the epoch at once."""

    def apart(self) -> AbstractContextManager[None]:
        """Inside, the rank computes steps that are none of the run's (a fork), and calls ``computed`` after each: that is no hang."""
        return nullcontext()

    def safe(self) -> bool:
        """True if this rank's newest snapshot would survive the loss of this node."""
        return True

    def leaving(self) -> bool:
        """True if this rank wants the epoch to end at the next step boundary."""
        return False

    def audit(self, stepper: Stepper, samples: Samples) -> Audit | None:  # noqa: ARG002  no audits here
        """Return the audit of the steps of ``stepper``; ``None`` if they are not audited."""
        return None

    def begins(self, step: int, shards: Sequence[Shard], extra: dict[str, object]) -> None:
        """Called when training begins with the state of ``step`` in ``shards``; ``extra`` goes with it into snapshots."""

    def computed(self) -> None:
        """Called before what ranks have summed or gathered is believed: a step, an evaluation, the hash. May raise, to end the epoch."""

    def not_finite(self, step: int, report: StepReport) -> None:
        """Called if ``step`` was not applied because its loss or gradient is not finite. May raise, to have it computed again elsewhere."""

    def ended(self, step: int, shards: Sequence[Shard], extra: dict[str, object], report: StepReport) -> None:
        """Called after each step, with the same ``report`` on all ranks but for times. May raise, to end the epoch."""

    def window_steps(self) -> int:
        """The steps after which it wants to see the numbers of all ranks; 0 means never."""
        return 0

    def measured(self, frame: RankFrame) -> None:
        """Called after a step that ends a window, with the same numbers of all ranks on all of them; before ``ended``."""

    def authorize(self) -> None:
        """Called on rank 0 before it commits or deletes checkpoints, or writes the result; thread-safe, reads the run directory.

        Raises ``EpochSupersededError``; another ``CheckpointError`` if it is not known now whether this epoch is the newest.
        """

    def await_authority(self) -> None:
        """Called before the last save: wait while ``authorize`` would fail for want of a coordinator. May raise, to end the epoch."""

    def saved(self, step: int) -> None:
        """Called on rank 0 when the checkpoint of ``step`` is committed on disk."""

    def fence(self) -> None:
        """Return once no copy of the weights is in flight: they are about to change."""
