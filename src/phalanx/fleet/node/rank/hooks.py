"""Hooks at the moments of a rank's life at which faults are injected; a worker without faults has ``NoHooks``."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, Protocol

from phalanx.checkpoint.save.saver import AsyncSaver
from phalanx.parallel.reduction.checksum import Witness
from phalanx.train.step.placement import Built

GuardedPhase = Literal["optimizer", "snapshot", "recovery"]
"""The phases of a step, or of an epoch, that the rank's guardian announces."""


class Hooks(Protocol):
    """Callbacks of one worker process, for every epoch in which it is a rank."""

    @abstractmethod
    def enters(self, rank: int) -> None:
        """The worker becomes ``rank`` of an epoch."""

    @abstractmethod
    def assembled(self, built: Built, saver: AsyncSaver) -> None:
        """The model is built and its state restored."""

    @abstractmethod
    def audited(self, witness: Witness) -> None:
        """Audits are on: gradients pass through ``witness``."""

    @abstractmethod
    def step_begins(self, step: int) -> None:
        """Step ``step`` begins."""

    @abstractmethod
    def at(self, phase: GuardedPhase) -> None:
        """The rank has come to ``phase``."""

    @abstractmethod
    def leaves(self) -> None:
        """The epoch has ended; its model must not be kept alive."""


class NoHooks(Hooks):
    """The hooks of a worker without faults: they do nothing."""

    def enters(self, rank: int) -> None:
        pass

    def assembled(self, built: Built, saver: AsyncSaver) -> None:
        pass

    def audited(self, witness: Witness) -> None:
        pass

    def step_begins(self, step: int) -> None:
        pass

    def at(self, phase: GuardedPhase) -> None:
        pass

    def leaves(self) -> None:
        pass
