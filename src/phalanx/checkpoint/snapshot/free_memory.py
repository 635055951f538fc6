"""The memory that a process can still fill, by what the machine and its control groups (cgroups(7)) leave."""

from contextlib import suppress
from pathlib import Path

from phalanx.observe.record.records import groups_of

_Files = tuple[str, str, str, str]
"""The names of a group's files and fields: limit, usage, and two kinds of files' pages in ``memory.stat``."""
_FILES: dict[int, _Files] = {
    2: ("memory.max", "memory.current", "active_file", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file"),
}
"""By the version of control groups."""


def free_memory_bytes(proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be filled without swapping or being killed for it: the machine's, or what the control groups leave.

    A limit may stand at this process's group or at any group above it, in either version of control groups; the tightest counts. Without
    limit where the system tells nothing (``proc`` and ``group`` are the places where Linux does).
    """
    found = [_left(folder, _FILES[version]) for folder, version in groups_of("memory", proc, group)]
    with suppress(OSError, ValueError, KeyError):
        found.append(_numbers(proc / "meminfo")["MemAvailable:"] * 1024)
    return min((free for free in found if free is not None), default=1 << 62)


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
