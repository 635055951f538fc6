"""A tier in the memory of this process: the smallest implementation of the protocol, and the fastest to restore from."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from phalanx.checkpoint.format.boxes import (
    OWN_MEMORY,
    Box,
    BoxLocation,
    PlannedRead,
    StoredBox,
    require_complete,
)
from phalanx.checkpoint.format.errors import AbandonedError, NoSuchStepError
from phalanx.checkpoint.format.image import ByteArray, Image, RawArray, spans, view_of
from phalanx.checkpoint.tiers.tier import Draft, StepRecord, always, never

POLL_S = 0.02


class MemoryTier:
    """Checkpoints as copies of images. Safe to use from several threads."""

    def __init__(self, name: str = "memory", distance: int = OWN_MEMORY) -> None:
        self._name = name
        self._distance = distance
        self._changed = threading.Condition()
        self._drafts: dict[Draft, dict[int, Image | str]] = {}
        self._committed: dict[int, tuple[StepRecord, dict[int, Image]]] = {}

    @property
    def name(self) -> str:
        return self._name

    def write(self, draft: Draft, rank: int, image: Image, *, cancelled: Callable[[], bool] = never) -> None:
        if cancelled():
            raise AbandonedError(f"step {draft.step}: the save was cancelled")
        self._put(draft, rank, Image(image.layout, image.data[: image.layout.nbytes].copy()))

    def fail(self, draft: Draft, rank: int, reason: str) -> None:
        self._put(draft, rank, reason)

    def _put(self, draft: Draft, rank: int, content: Image | str) -> None:
        with self._changed:
            self._drafts.setdefault(draft, {})[rank] = content
            self._changed.notify_all()

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
        def settled() -> bool:
            ranks = self._drafts.get(draft, {})
            return (
                len(ranks) >= record.world_size
                or cancelled()
                or any(isinstance(r, str) for r in ranks.values())
            )

        with self._changed:
            deadline = time.monotonic() + timeout_s
            while not settled() and time.monotonic() < deadline:
                self._changed.wait(POLL_S)  # woken by a write; ``cancelled`` has no way to wake anybody
            ranks = self._drafts.pop(draft, {})
            images = {rank: image for rank, image in ranks.items() if isinstance(image, Image)}
            if len(images) < record.world_size or cancelled():
                reasons = [
                    f"rank {rank}: {content}" for rank, content in ranks.items() if isinstance(content, str)
                ]
                raise AbandonedError(
                    f"step {draft.step}: {len(images)} of {record.world_size} ranks delivered within {timeout_s} s"
                    + "".join(f"; {reason}" for reason in reasons)
                )
            stored = [
                StoredBox(e.box, BoxLocation(self._name, "", 0))
                for image in images.values()
                for e in image.layout.entries
            ]
            require_complete(stored, required)
            authorize()
            self._committed.setdefault(draft.step, (record, images))
            return sum(image.layout.nbytes for image in images.values())

    def sweep(self, attempt: int) -> list[str]:
        with self._changed:
            stale = [draft for draft in self._drafts if draft.attempt != attempt]
            for draft in stale:
                del self._drafts[draft]
        return [str(draft) for draft in stale]

    def steps(self) -> list[int]:
        return sorted(self._committed)

    def has(self, step: int) -> bool:
        return step in self._committed

    def record(self, step: int) -> StepRecord:
        return self._get(step)[0]

    def extra(self, step: int) -> dict[str, Any]:
        return self.record(step).extra

    def collect(
        self,
        draft: Draft,
        rank: int,
        world_size: int,
        *,
        timeout_s: float,
        cancelled: Callable[[], bool] = never,
    ) -> None:
        """Everything is in one place already."""

    def boxes(
        self, step: int, rank: int | None = None, needed: Sequence[Box] | None = None
    ) -> tuple[StoredBox, ...]:
        return tuple(
            StoredBox(entry.box, BoxLocation(self._name, str(holder), self._distance))
            for holder, image in sorted(self._get(step)[1].items())
            if rank is None or holder == rank
            for entry in image.layout.entries
            if needed is None or any(entry.box.name == box.name for box in needed)
        )

    def read(self, step: int, reads: Sequence[PlannedRead]) -> Iterator[tuple[Box, RawArray]]:
        images = self._get(step)[1]
        starts = {
            (str(rank), entry.box): (image, entry.start)
            for rank, image in images.items()
            for entry in image.layout.entries
        }
        for read in reads:
            image, start = starts[read.source.location.holder, read.source.box]
            stored = image.data[start : start + read.source.box.nbytes]
            yield from _pieces(read, stored)

    def delete(self, step: int) -> None:
        self._get(step)
        del self._committed[step]

    def set_aside(self, step: int) -> None:
        self.delete(step)

    def _get(self, step: int) -> tuple[StepRecord, dict[int, Image]]:
        try:
            return self._committed[step]
        except KeyError:
            raise NoSuchStepError(f"{self._name}: step {step} is not held; held: {self.steps()}") from None


def _pieces(read: PlannedRead, stored: ByteArray) -> Iterator[tuple[Box, RawArray]]:
    for span in spans(read.source.box, read.part, max(stored.nbytes, 1)):
        yield span.part, view_of(read.source.box, span, stored[span.start : span.stop])
