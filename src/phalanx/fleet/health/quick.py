"""The quick health checks of a fleet: before a node is offered, and after one of its workers died; in all well under a second.

The worker, which has PyTorch and the accelerator's context loaded, checks matrix products and device memory. The agent, which has
neither, checks the disk, the network stack and the GPUs' own reports, in a thread while its workers start. The checks themselves
are those of ``phalanx health``.
"""

from __future__ import annotations

import asyncio
import errno
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from phalanx.fleet.health import checks as health_checks
from phalanx.fleet.health import gpu as gpu_health
from phalanx.fleet.health.checks import CheckResult, guarded

_DISK_BYTES, _LINK_BYTES, _MEMORY_BYTES, _PRODUCTS = 4 << 20, 1 << 20, 32 << 20, 2
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def of_node() -> list[CheckResult]:
    """Checks what the workers of a node share. Needs no PyTorch."""
    return [
        guarded("disk", _disk),
        guarded("link", lambda: health_checks.loopback(_LINK_BYTES)),
        *gpu_health.gpus(),
    ]


def of_device(device: str) -> list[CheckResult]:
    """Checks one worker's accelerator, in that worker."""
    return [
        guarded("matrix product", lambda: health_checks.exact_products(device, _PRODUCTS)),
        guarded("memory", lambda: health_checks.memory(device, _MEMORY_BYTES)),
    ]


def complaints(results: Sequence[CheckResult]) -> str:
    """The failed checks as text; empty if the machine is fit."""
    return "; ".join(f"{one.check}: {one.text}" for one in results if one.status in ("bad", "slow"))


def _disk() -> CheckResult:
    try:
        return health_checks.disk(Path(tempfile.gettempdir()), _DISK_BYTES)
    except OSError as error:
        if error.errno in _FULL:  # a run goes on with a full disk
            return CheckResult("disk", "not checked", f"no space in {tempfile.gettempdir()}")
        raise


# Watch over a node's health: runs the checks on demand, and on an unfit node again and again, since it may be repaired.

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
