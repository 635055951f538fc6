"""The quick health checks of a fleet: before a node is offered, and after one of its workers died; in all well under a second.

The worker, which has PyTorch and the accelerator's context loaded, checks matrix products and device memory. The agent, which has
neither, checks the disk, the network stack and the GPUs' own reports, in a thread while its workers start. The checks themselves
are those of ``phalanx health``.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Sequence
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
