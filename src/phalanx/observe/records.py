"""The environment record of a run, for reproducing it: code version, packages, host.

Results that cannot be traced to a commit and to the versions beneath it cannot be reproduced. Each
attempt records these facts in its first event. Nothing here imports what it asks about: versions come
from the metadata of the installed distributions, so that asking costs milliseconds, not a torch import.
"""

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

from phalanx.version import __version__

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "xxhash", "triton")
GIT_TIMEOUT_S = 10.0


def environment_record() -> dict[str, object]:
    """Code, packages and host as plain JSON values: the ``environment`` of ``RunStarted``."""
    return {"code": code_version(), "packages": package_versions(), "host": host_facts()}


def code_version(package: Path | None = None) -> dict[str, object]:
    """The version of our package, and its git commit where it runs from a checkout.

    ``git_dirty`` is True if tracked files differ from the commit or untracked ones lie beside the
    package: such a run cannot be repeated from the commit alone. An installed package has neither key.
    """
    package = package or Path(__file__).resolve().parents[1]
    version: dict[str, object] = {"version": __version__}
    # Tracked, not merely inside: a virtual environment may lie in somebody else's repository.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return version
    version["git_commit"] = (_git(package, "rev-parse", "--verify", "HEAD") or "").strip() or None
    status = _git(package, "status", "--porcelain", "--", ":/", ":(exclude,top)runs")
    version["git_dirty"] = status is None or bool(status.strip())
    return version


def _git(directory: Path, *arguments: str) -> str | None:
    """The output of git; None if it is not installed, refuses, or takes too long."""
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Package -> installed version; those that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def host_facts() -> dict[str, object]:
    """The machine: name, platform, processor, cores this process may use, memory in bytes."""
    return {
        "name": platform.node(),
        "platform": platform.platform(),
        "cpu_model": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def usable_cores() -> int:
    """Cores that this process may run on: a container or taskset may allow fewer than there are."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, as the kernel or else the platform gives it."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Hardware") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def process_age_ns() -> int:
    """Nanoseconds since this process was started, to 10 ms; 0 where the kernel does not tell.

    Linux keeps the start in ``/proc/self/stat`` (field 22, in clock ticks since boot).
    """
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return 0
    after_name = stat.read_text().rpartition(")")[2].split()
    started_ns = int(after_name[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return max(0, time.clock_gettime_ns(time.CLOCK_BOOTTIME) - started_ns)
