"""This node's share of the copies of checkpoints in the run's store, as far as the agent is concerned: dealt, settled, given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from phalanx.fleet.control.distrust import distrusted_after, forget_distrust
from phalanx.observe.event_log import EventLog, EventLogError
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import RunSpec

if TYPE_CHECKING:
    from phalanx.checkpoint.save.store_uploader import CopyEvent, StoreUploader


class StoreCopies:
    """The copies that one node makes; none if the run has no store."""

    def __init__(
        self, spec: RunSpec, directory: RunDirectory, attempt: int, log: Callable[[str], None]
    ) -> None:
        self._spec, self._directory, self._attempt, self._log = spec, directory, attempt, log
        self._uploader: StoreUploader | None = None
        self._events: EventLog | None = None
        self._hurried = asyncio.Event()

    def deal(self, ranks: tuple[int, ...], of: int) -> None:
        """From now on this node copies the files of these of ``of`` ranks."""
        if not self._spec.checkpoint.store:
            return
        # The client of stores, only where there is one.
        from phalanx.checkpoint.save.store_uploader import CopyShare

        if self._uploader is None:
            self._uploader = self._begin()
        self._uploader.deal(CopyShare(ranks, of))

    def _begin(self) -> StoreUploader:
        from phalanx.checkpoint.save.store_uploader import Condemned, CopyRules, StoreUploader, UploadTimes
        from phalanx.checkpoint.tiers.disk import DiskTier
        from phalanx.store.open_store import open_store

        checkpoint, directory = self._spec.checkpoint, self._directory
        return StoreUploader(
            DiskTier(directory.checkpoints),
            open_store(checkpoint.store),
            CopyRules.of(self._spec),
            f"fleet{self._attempt}",
            self._append,
            self._log,
            UploadTimes(others_s=checkpoint.timeout_s),
            Condemned(partial(distrusted_after, directory), partial(forget_distrust, directory)),
        )

    def _append(self, event: CopyEvent) -> None:
        try:
            if self._events is None:
                self._events = EventLog(self._directory.events, self._attempt)
            self._events.append(event)
        except EventLogError as error:
            self._log(str(error))

    def hurry(self) -> None:
        """Gives up what is not in the store yet."""
        self._hurried.set()

    async def end(self, *, settled: bool) -> None:
        """Ends the copying; if it is to be ``settled``, with all of this node's share in the store, unless it is hurried."""
        if self._uploader is None:
            return
        if settled:
            settling = asyncio.create_task(asyncio.to_thread(self._uploader.settle))
            hurried = asyncio.create_task(self._hurried.wait())
            await asyncio.wait((settling, hurried), return_when=asyncio.FIRST_COMPLETED)
            if not settling.done():
                self._log("asked once more to end: gives up its copies to the store")
            elif missing := self._uploader.missing():
                self._log(f"not in the store: steps {', '.join(map(str, missing))}")
            hurried.cancel()
        self._uploader.cancel()
