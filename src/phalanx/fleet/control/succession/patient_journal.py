"""Writes of a leading coordinator that must be on disk before anything is sent: tried until the disk takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from phalanx.fleet.control.succession.journal import Journal
from phalanx.fleet.core.replay import JournalError

RENEW_BYTES = 64 << 20
"""Size above which a journal is replaced by a short one."""
_RENEW_AGAIN_BYTES = 4 << 20
RETRY_S = 1.0
"""Seconds between two tries of a write that the disk did not take."""


class PatientJournal:
    """The journal of a coordinator that leads, which does nothing else while it waits for the disk."""

    def __init__(self, journal: Journal, log: Callable[[str], None], renew_bytes: int = RENEW_BYTES) -> None:
        """``renew_bytes``: Size above which ``renew`` replaces the journal."""
        self.journal, self._log = journal, log
        self._renew_bytes = self._renew_at_bytes = renew_bytes

    async def synced(self) -> None:
        """Waits until the journal is on disk."""
        await self.until_written(self.journal.sync)

    async def until_written(self, write: Callable[[], None]) -> None:
        """Calls ``write`` in a thread until it succeeds; meanwhile nothing is sent, and the server goes on listening."""
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(None, write)
            except JournalError as error:
                self._log(f"{error}; sends nothing until it can")
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def renew(self, first_line: Callable[[], bytes]) -> None:
        """Replaces a journal that has grown large. A disk that has no room for the new one is no reason to stop: the old one grows on."""
        if self.journal.size_bytes <= self._renew_at_bytes:
            return
        content = first_line()
        try:
            await asyncio.get_running_loop().run_in_executor(None, self.journal.begin_anew, content)
        except JournalError as error:
            self._log(f"{error}; the old one is kept, and it is tried again later")
            self._renew_at_bytes = self.journal.size_bytes + _RENEW_AGAIN_BYTES
        else:
            self._renew_at_bytes = max(self._renew_bytes, 2 * self.journal.size_bytes)
