"""The tier protocol: a storage back end of checkpoints.

A save is a *draft* until it is committed: every rank writes its image into the draft, then one rank commits, and
only then is the step there. Committed steps never change. The protocol says nothing of files or sockets: a disk, the
memory of this process and a peer's memory look the same to whoever saves, restores, verifies or digests.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx.checkpoint.format.boxes import Box
from phalanx.checkpoint.format.image import Image, RawArray
from phalanx.checkpoint.format.restore_plan import Held, PlannedRead


def never() -> bool:
    """The ``cancelled`` of a save that nobody cancels."""
    return False


def always() -> None:
    """The ``authorize`` of a job that nobody supersedes."""


@dataclass(frozen=True, slots=True)
class Draft:
    """An uncommitted save: the step, and the attempt (incarnation of the job) that saves it.

    Drafts of different attempts never mix, so what a dead attempt left behind, or a stale one still writes, cannot
    end up in a committed checkpoint.
    """

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Record:
    """The metadata of a committed checkpoint. ``extra`` is small JSON; ``weights_sha256`` as in ``digest.py``."""

    step: int
    world_size: int
    extra: dict[str, object]
    weights_sha256: str | None = None


class ReadableTier(Protocol):
    """A place from which checkpoints are restored. Every method raises a CheckpointError where the place fails."""

    @property
    def name(self) -> str:
        """Names the tier in plans (``BoxLocation.tier``) and messages."""
        ...

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""
        ...

    def has(self, step: int) -> bool:
        """True if the step is committed."""
        ...

    def record(self, step: int) -> Record:
        """The record of a committed step. Raises NoSuchStepError."""
        ...

    def extra(self, step: int) -> dict[str, object]:
        """The small JSON saved with a committed step. Raises NoSuchStepError."""
        ...

    def boxes(
        self, step: int, rank: int | None = None, needed: Sequence[Box] | None = None
    ) -> tuple[Held, ...]:
        """The boxes held of a committed step: by all ranks, or by the one that was saved as ``rank``.

        With ``needed``, boxes that have no element in common with one of these may be left out; a tier of many ranks then looks at those
        only that hold something of it. A ``rank`` that the checkpoint does not have holds nothing. Raises NoSuchStepError.
        """
        ...

    def read(self, step: int, reads: Sequence[PlannedRead]) -> Iterator[tuple[Box, RawArray]]:
        """Yields the elements of ``reads`` in pieces of bounded size.

        A piece is a box and its elements as raw unsigned integers, perhaps a strided view; it is valid until the
        next piece is asked for. Raises CorruptError where the bytes are not those that were written.
        """
        ...


class KeepingTier(ReadableTier, Protocol):
    """A place that keeps checkpoints, however they came there."""

    def set_aside(self, step: int) -> None:
        """Takes a damaged step out of the list, so that it can be saved anew; what is left of it may be kept."""
        ...


class Tier(KeepingTier, Protocol):
    """A place where checkpoints are saved. Every method raises a CheckpointError where the place fails."""

    def write(self, draft: Draft, rank: int, image: Image, *, cancelled: Callable[[], bool] = never) -> None:
        """Keeps ``rank``'s image in the draft; durable when this returns. Reads the image, never changes it."""
        ...

    def fail(self, draft: Draft, rank: int, reason: str) -> None:
        """Tells the committing rank that ``rank`` cannot deliver, so that the draft is given up at once."""
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
        """Does ``rank``'s part in bringing together what ``world_size`` ranks have written, after ``write``; most ranks have none.

        Who writes for several ranks writes for all of them first. Raises AbandonedError where another rank failed or is not there
        after ``timeout_s``, or ``cancelled()`` turns true; whoever commits is told.
        """
        ...

    def commit(
        self,
        draft: Draft,
        record: Record,
        *,
        timeout_s: float,
        required: Sequence[Box] = (),
        authorize: Callable[[], None] = always,
        cancelled: Callable[[], bool] = never,
    ) -> int:
        """Waits for all of ``record.world_size`` ranks, then makes the step visible at once; returns the bytes of all ranks' images.

        Raises AbandonedError, and drops the draft, where a rank failed, is not there after ``timeout_s``, or
        ``cancelled()`` turns true; NotCoveredError, likewise, where the ranks' boxes together do not cover ``required``
        or all of a tensor that they name. ``authorize`` is called last before the step becomes visible; what it raises drops the
        draft. Committing a step that is there already leaves that one and drops the draft.
        """
        ...

    def sweep(self, attempt: int) -> list[str]:
        """Removes what attempts other than ``attempt`` left unfinished. Returns the names of what went."""
        ...

    def delete(self, step: int) -> None:
        """Removes a committed step; it vanishes from ``steps`` at once, whatever removing takes. Raises NoSuchStepError."""
        ...
