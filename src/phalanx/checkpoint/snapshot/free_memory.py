"""The memory that a process can still fill, by what the machine and its control groups (cgroups(7)) leave."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_Files = tuple[str, str, str, str]
"""The names of a group's files and fields: limit, usage, and two kinds of files' pages in ``memory.stat``."""
_V2: _Files = ("memory.max", "memory.current", "active_file", "inactive_file")
_V1: _Files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file")


def free_memory_bytes(proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be filled without swapping or being killed for it: the machine's, or what the control groups leave.

    A limit may stand at this process's group or at any group above it, in either version of control groups; the tightest counts. Without
    limit where the system tells nothing (``proc`` and ``group`` are the places where Linux does).
    """
    found = [_left(folder, files) for folder, files in _memory_groups(proc, group)]
    with suppress(OSError, ValueError, KeyError):
        found.append(_numbers(proc / "meminfo")["MemAvailable:"] * 1024)
    return min((free for free in found if free is not None), default=1 << 62)


def _memory_groups(proc: Path, root: Path) -> Iterator[tuple[Path, _Files]]:
    """The folders of this process's memory groups, from its own up to the root, with the names that they use.

    ``proc/self/cgroup`` has a line ``0::PATH`` for version 2 and ``N:...memory...:PATH`` for version 1. In a container, PATH may be that of
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
        elif "memory" in controllers.split(","):
            paths[1] = path
    for mounted, path, files in (
        (root, paths[2], _V2),
        (root / "unified", paths[2], _V2),
        (root / "memory", paths[1], _V1),
    ):
        own = PurePosixPath("/", path)
        for above in (own, *own.parents):
            yield mounted / above.relative_to("/"), files


def _left(folder: Path, files: _Files) -> int | None:
    """Bytes that a control group leaves; None if it sets no limit (version 2 says "max", version 1 a number beyond any memory)."""
    limit_name, usage_name, *cached_names = files
    try:
        limit = int((folder / limit_name).read_text())
        cached = _numbers(folder / "memory.stat")  # files' pages, which the kernel gives up for others
        used = int((folder / usage_name).read_text()) - sum(cached[name] for name in cached_names)
    except (OSError, ValueError, KeyError):
        return None
    return max(0, limit - used)


def _numbers(table: Path) -> dict[str, int]:
    """The first two words of each line."""
    return {line.split()[0]: int(line.split()[1]) for line in table.read_text().splitlines()}
