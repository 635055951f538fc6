"""A hard cap on the memory of a process: a control group of its own (cgroups(7), either version), else a limit on its data (setrlimit(2))."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PLACES = (
    (_ROOT, "cgroup.controllers", "memory.max", "memory.peak"),
    (_ROOT / "memory", "memory.limit_in_bytes", "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
)


@dataclass(frozen=True)
class Cap:
    """A cap, which a process puts on itself by ``enter`` before it runs anything."""

    kind: str
    enter: Callable[[], None]
    _peak: Path | None = None

    def peak_bytes(self) -> int:
        """Return the peak memory of the group with its page cache; 0 if there is no group."""
        return 0 if self._peak is None else int(self._peak.read_text())


@contextmanager
def capped(nbytes: int, number: int) -> Iterator[Cap]:
    """Yield a cap of ``nbytes``; a process beyond it is killed by the kernel (control group), or gets no memory (limit)."""
    for root, sign, limit, peak in _PLACES:
        folder = root / f"phalanx-bench-{os.getpid()}-{number}"
        if not (root / sign).exists():
            continue
        try:
            folder.mkdir()
            (folder / limit).write_text(str(nbytes))
        except OSError:
            with suppress(OSError):
                folder.rmdir()
            continue
        try:
            yield Cap(
                "control group",
                lambda at=folder / "cgroup.procs": at.write_text(str(os.getpid())),  # type: ignore[misc]
                folder / peak,
            )
        finally:
            with suppress(OSError):
                folder.rmdir()
        return
    yield Cap("limit on data", lambda: resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes)))
