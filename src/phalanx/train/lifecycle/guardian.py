"""Whoever watches over a rank from outside of the training loop.

The loop does not know who answers when it asks whether the newest copy of the state is safe and whether to go on, and who
looks at the state when a step has ended. A rank of a fleet has a guardian that talks to its node's agent
(``phalanx.fleet``); one that runs alone has nobody.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.checkpoint.format.state import Shard
from phalanx.train.step.step import Audit, Stepper, StepReport

Samples = Callable[[int, int], NDArray[np.int64]]
"""What a slot of a step holds, ``(sequences, seq_len + 1)``: step from 1, slot from 0."""


class Guardian(Protocol):
    """Watches over one rank in one epoch of membership."""

    @abstractmethod
    def safe(self) -> bool:
        """Whether the newest copy of this rank's state that was taken would survive the loss of this node."""

    @abstractmethod
    def leaving(self) -> bool:
        """Whether this rank wants the epoch to end at the next step boundary."""

    @abstractmethod
    def audit(self, stepper: Stepper, samples: Samples) -> Audit | None:
        """Who audits the steps of ``stepper``, if anybody does."""

    @abstractmethod
    def begins(self, step: int, shards: Sequence[Shard], extra: dict[str, Any]) -> None:
        """The state of ``step`` is in place, and training begins."""

    @abstractmethod
    def ended(self, step: int, shards: Sequence[Shard], extra: dict[str, Any], report: StepReport) -> None:
        """``step`` has ended as ``report`` says, the same on all ranks but for times. May raise, to end the epoch."""

    @abstractmethod
    def saved(self, step: int) -> None:
        """The checkpoint of ``step`` is on disk. Called on rank 0."""

    @abstractmethod
    def fence(self) -> None:
        """Before weights change: copies that still run come first."""


class Nobody(Guardian):
    """The guardian of a rank that runs without a fleet."""

    def safe(self) -> bool:
        return True

    def leaving(self) -> bool:
        return False

    def audit(self, stepper: Stepper, samples: Samples) -> Audit | None:  # noqa: ARG002  nobody audits
        return None

    def begins(self, step: int, shards: Sequence[Shard], extra: dict[str, Any]) -> None:
        pass

    def ended(self, step: int, shards: Sequence[Shard], extra: dict[str, Any], report: StepReport) -> None:
        pass

    def saved(self, step: int) -> None:
        pass

    def fence(self) -> None:
        pass
