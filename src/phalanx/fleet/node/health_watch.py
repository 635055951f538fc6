"""The health checks of a node: run whenever they are asked for, and on an unfit node again and again, since it may be repaired."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from phalanx.fleet.health.quick import complaints, of_node

_EXAMINE_S, _EXAMINE_AGAIN_S = 30.0, 30.0


class HealthWatch:
    """Checks what the workers of one node share: disk, network stack, GPUs."""

    def __init__(self, on_checked: Callable[[str], None], log: Callable[[str], None]) -> None:
        """``on_checked`` is called with the complaints of each check, empty if there are none; ``log`` takes lines for people."""
        self._on_checked, self._log = on_checked, log
        self._doctor, self._suspicion = ThreadPoolExecutor(1, "health"), asyncio.Event()

    def suspect(self) -> None:
        """Asks for a check."""
        self._suspicion.set()

    async def run(self) -> None:
        """Runs the checks that are asked for, until cancelled."""
        while True:
            await self._suspicion.wait()
            self._suspicion.clear()
            found = await self._complaints()
            if self._suspicion.is_set():
                continue  # asked for again: the new reason may have come after the check
            if found:
                self._log(f"unfit: {found}")
            self._on_checked(found)
            if found:
                await asyncio.sleep(_EXAMINE_AGAIN_S)
                self._suspicion.set()

    async def _complaints(self) -> str:
        checks = asyncio.get_running_loop().run_in_executor(self._doctor, of_node)
        try:
            return complaints(await asyncio.wait_for(checks, _EXAMINE_S))
        except TimeoutError:
            return f"its checks did not end within {_EXAMINE_S:g} s"

    def close(self) -> None:
        """Ends the thread, without waiting for a check that hangs."""
        self._doctor.shutdown(wait=False, cancel_futures=True)
