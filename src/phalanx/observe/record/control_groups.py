"""The control groups of this process (cgroups(7)): the limits of a container on what it uses of its machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC, ROOT = Path("/proc"), Path("/sys/fs/cgroup")


def groups_of(controller: str, proc: Path = PROC, root: Path = ROOT) -> Iterator[tuple[Path, int]]:
    """The folders of this process's groups, from its own up to the root, each with the version (1 or 2) of its files.

    ``proc/self/cgroup`` has a line ``0::PATH`` for version 2 and ``N:...CONTROLLER...:PATH`` for version 1. In a container, PATH may be that of
    the host, which is not visible here; then the root of what is mounted is the container's own group, and it is looked at in any case.
    """
    try:
        lines = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except OSError:
        lines = []
    paths = {2: "/", 1: "/"}
    for number, controllers, path in (line for line in lines if len(line) == 3):
        if number == "0" and not controllers:
            paths[2] = path
        elif controller in controllers.split(","):
            paths[1] = path
    for mounted, version in ((root, 2), (root / "unified", 2), (root / controller, 1)):
        own = PurePosixPath("/", paths[version])
        for above in (own, *own.parents):
            yield mounted / above.relative_to("/"), version


def quota_cores(proc: Path = PROC, root: Path = ROOT) -> float:
    """Processor time that the tightest group allows, in cores; infinite without a limit."""
    return min(
        (_quota(folder, version) for folder, version in groups_of("cpu", proc, root)), default=math.inf
    )


def _quota(folder: Path, version: int) -> float:
    try:
        if version == 2:  # "max 100000" or "200000 100000", microseconds in a period
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if quota not in ("max", "-1") else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
