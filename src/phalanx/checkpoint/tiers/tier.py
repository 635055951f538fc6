"""The tier protocol: a storage back end of checkpoints.

A save is a *draft* until it is committed: every rank writes its image into the draft, then one rank commits, and only then does the step
exist. Committed steps never change. The protocol does not depend on files or sockets: a disk, this process's memory and a peer's memory
have the same interface for saving, restoring, verifying and hashing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx.checkpoint.format.boxes import Box, PlannedRead, StoredBox
from phalanx.checkpoint.format.image import Image, RawArray


def never() -> bool:
    """Return False: the ``cancelled`` of a save that cannot be cancelled."""
    return False


def always() -> None:
    """Do nothing: the ``authorize`` of a job that cannot be superseded."""


@dataclass(frozen=True, slots=True)
class Draft:
    """An uncommitted save: the step, and the attempt (incarnation of the job) that saves it.

    Drafts of different attempts never mix, so files of a dead attempt, or of a stale one that still writes, cannot get into a committed
    checkpoint.
    """

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Metadata of a committed checkpoint. ``extra`` is small JSON; ``weights_sha256`` as in ``digest.py``."""

    step: int
    world_size: int
    extra: dict[str, object]
    weights_sha256: str | None = None


class ReadableTier(Protocol):
    """Storage from which checkpoints are restored. Every method raises a CheckpointError if the storage fails."""

    @property
    def name(self) -> str:
        """Name of the tier in plans (``BoxLocation.tier``) and messages."""
        ...

    def steps(self) -> list[int]:
        """Return the committed steps, oldest first."""
        ...

    def has(self, step: int) -> bool:
        """Return True if the step is committed."""
        ...

    def record(self, step: int) -> StepRecord:
        """Return the metadata of a committed step. Raises NoSuchStepError."""
        ...

    def extra(self, step: int) -> dict[str, object]:
        """Return the small JSON saved with a committed step. Raises NoSuchStepError."""
        ...

    def boxes(
        self, step: int, rank: int | None = None, needed: Sequence[Box] | None = None
    ) -> tuple[StoredBox, ...]:
        """Return the stored boxes of a committed step: of all ranks, or of the one that was saved as ``rank``.

        With ``needed``, boxes that overlap none of these may be left out; a tier of many ranks then reads only the relevant catalogs. A ``rank``
        that the checkpoint does not have has no boxes. Raises NoSuchStepError.
        """
        ...

    def read(self, step: int, reads: Sequence[PlannedRead]) -> Iterator[tuple[Box, RawArray]]:
        """Yield the elements of ``reads`` in pieces of bounded size.

        A piece is a box and its elements as raw unsigned integers, possibly a strided view. It is valid until the next piece is requested. Raises
        CorruptError if the bytes are not those that were written.
        """
        ...


class KeepingTier(ReadableTier, Protocol):
    """Storage that keeps checkpoints of any origin."""

    def set_aside(self, step: int) -> None:
        """Remove a damaged step from the list, so that it can be saved again; its files may be kept."""
        ...


class Tier(KeepingTier, Protocol):
    """Storage in which checkpoints are saved. Every method raises a CheckpointError if the storage fails."""

    def write(self, draft: Draft, rank: int, image: Image, *, cancelled: Callable[[], bool] = never) -> None:
        """Store ``rank``'s image in the draft; durable when this returns. Does not change the image."""
        ...

    def fail(self, draft: Draft, rank: int, reason: str) -> None:
        """Record that ``rank`` cannot deliver, so that the committing rank abandons the draft at once."""
        ...

    def collect(
        self,
        draft: Draft,
        rank: int,
        world_size: int,
        *,
        timeout_s: float,
        cancelled: Callable[[], bool] = never,
    ) -> None:
        """Do ``rank``'s part in joining the output of ``world_size`` ranks, after ``write``; most ranks have none.

        A process that writes for several ranks writes for all of them first. Raises AbandonedError if another rank failed, is missing after
        ``timeout_s``, or ``cancelled()`` becomes true. The failure is recorded for the committing rank.
        """
        ...

    def commit(
        self,
        draft: Draft,
        record: StepRecord,
        *,
        timeout_s: float,
        required: Sequence[Box] = (),
        authorize: Callable[[], None] = always,
        cancelled: Callable[[], bool] = never,
    ) -> int:
        """Wait for all of ``record.world_size`` ranks, then make the step visible atomically; return the bytes of all ranks' images.

        Raises AbandonedError, and drops the draft, if a rank failed, is missing after ``timeout_s``, or ``cancelled()`` becomes true. Raises
        NotCoveredError, likewise, if the ranks' boxes do not cover ``required`` and every tensor that they name. ``authorize`` is called
        last before the step becomes visible; if it raises, the draft is dropped. If the step is already committed, that one stays and the draft is
        dropped.
        """
        ...

    def sweep(self, attempt: int) -> list[str]:
        """Remove unfinished drafts of attempts other than ``attempt``. Return their names."""
        ...

    def delete(self, step: int) -> None:
        """Remove a committed step; it disappears from ``steps`` at once. Raises NoSuchStepError."""
        ...
