"""The environment record of a run, for reproducing it: code version, packages, host.

Results that cannot be traced to a commit and to the versions beneath it cannot be reproduced. Each
attempt records these facts in its first event. Nothing here imports what it asks about: versions come
from the metadata of the installed distributions, so that asking costs milliseconds, not a torch import.
"""

import functools
import hashlib
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from phalanx import version as of_package
from phalanx.observe.logs.masking import MASKED, Mask
from phalanx.observe.record.control_groups import quota_cores
from phalanx.run.resolve import SECRET_NAME

PACKAGES = (
    *("torch", "numpy", "tokenizers", "safetensors", "xxhash", "triton"),
    *(
        f"nvidia-{library}{suffix}"
        for library in ("nccl", "cudnn", "cublas", "cuda-runtime")
        for suffix in ("-cu12", "-cu13", "")
    ),
)
DISTRIBUTION = "phalanx-train"
OWN_PACKAGE = Path(of_package.__file__).resolve().parent
"""All of our code, wherever below it this module lies."""
GIT_TIMEOUT_S = 10.0

_ARM_CORES = {
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0x46", "0x001"): "A64FX",
    ("0x48", "0xd01"): "Kunpeng-920",
    ("0xc0", "0xac3"): "Ampere-1",
    ("0xc0", "0xac4"): "Ampere-1a",
}
"""Names of cores by implementer and part, as ``lscpu`` has them (util-linux, ``sys-utils/lscpu-arm.c``)."""

_VARIABLES = re.compile(
    r"(PHALANX|OMP|MKL|KMP|GOMP|OPENBLAS|NCCL|TORCH|PYTORCH|CUDA|CUBLAS|HIP|ROCR|GLOO|UCX|XLA)_\w+"
)
_OF_ONE_PROCESS = frozenset(
    f"PHALANX_{name}" for name in ("COMMAND", "LAUNCHER", "MEETING_POINT", "RANK", "RANKS", "RUN_TOKEN")
)
"""What a launcher tells each rank: it says nothing about the run."""
_LONGEST_VALUE = 500
_MOST_VARIABLES = 200
_LONGEST_COMMAND = 4000


def environment_record() -> dict[str, object]:
    """Code, packages, host, command line and variables as plain JSON values: the ``environment`` of ``RunStarted``."""
    return {
        "code": dict(own_code()),
        "packages": package_versions(),
        "host": host_facts(),
        "command": command_line(),
        "variables": variables(),
    }


def command_line(words: Sequence[str] | None = None, mask: Mask | None = None) -> str:
    """The command that a process was started with, as a shell takes it, without secrets.

    A rank was started by a launcher with words of its own: ``PHALANX_COMMAND`` has those that a person typed.
    """
    mask = mask or Mask.of_environment(os.environ)
    given = os.environ.get("PHALANX_COMMAND", "") if words is None else ""
    shown = mask(given or shlex.join(words or sys.orig_argv))
    return shown if len(shown) <= _LONGEST_COMMAND else f"{shown[:_LONGEST_COMMAND]} ..."


def variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables that libraries and we act by, sorted; of those whose names speak of a secret, that they are set."""
    environment = os.environ if environment is None else environment
    mask = Mask.of_environment(environment)
    names = sorted(name for name in environment if _VARIABLES.fullmatch(name) and name not in _OF_ONE_PROCESS)
    return {
        name: MASKED if SECRET_NAME.search(name) else mask(environment[name])[:_LONGEST_VALUE]
        for name in names[:_MOST_VARIABLES]
    }


@functools.cache
def own_code() -> Mapping[str, object]:
    """``code_version`` of the code that this process runs: as it was when first asked, which is what has been imported."""
    return code_version()


def code_version(package: Path | None = None, *, dirty: bool = True) -> dict[str, object]:
    """The version of our package, and its git commit where it runs from a checkout.

    ``git_dirty`` is True if tracked files differ from the commit or untracked ones lie beside the
    package: such a run cannot be repeated from the commit alone. Without ``dirty`` nobody looks, which of many machines on one file
    system costs less. An installed package has neither key, but the hash of its wheel's list of files.
    """
    package = package or OWN_PACKAGE
    version: dict[str, object] = {"version": of_package.__version__}
    if not is_checkout(package):
        return version | installed_from(package)
    version["git_commit"] = (git(package, "rev-parse", "--verify", "HEAD") or "").strip() or None
    if not dirty:
        return version
    status = git(package, "status", "--porcelain", "--", ":/", ":(exclude,top)runs")
    version["git_dirty"] = status is None or bool(status.strip())
    return version


def is_checkout(package: Path) -> bool:
    """True if the package's files are tracked by git. Not merely inside: a virtual environment may lie in somebody else's repository."""
    return git(package, "ls-files", "--error-unmatch", "__init__.py") is not None


def installed_from(package: Path, name: str = DISTRIBUTION) -> dict[str, object]:
    """The hash of an installed wheel's list of files, which has a hash of each: it says which build the package is of."""
    try:
        wheel = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return {}
    installed = Path(str(wheel.locate_file(f"{package.name}/__init__.py")))
    listed = wheel.read_text("RECORD")
    if not listed or not installed.exists() or installed.resolve().parent != package.resolve():
        return {}  # an editable installation, or another copy
    return {"wheel_record_sha256": hashlib.sha256(listed.encode()).hexdigest()}


def git(directory: Path, *arguments: str) -> str | None:
    """The output of git; None if it is not installed, refuses, or takes too long."""
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="surrogateescape",  # a diff holds whatever bytes files hold
            timeout=GIT_TIMEOUT_S,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Package -> installed version; those that are not installed are left out."""
    versions = {name: version for name in names if (version := _installed(name)) is not None}
    return {"python": platform.python_version()} | versions


@functools.cache
def _installed(name: str) -> str | None:
    """A package's version; a process asks once, because PyTorch's description alone takes milliseconds to read."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


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
    """Cores that this process may use: taskset, or the quota of a container, may allow fewer than there are."""
    # macOS has no affinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(cores, quota_cores())))


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, as the kernel or else the platform gives it."""
    fields: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    named = fields.get("model name") or fields.get("Hardware")
    return named or _arm_model(fields) or platform.processor() or platform.machine()


def _arm_model(fields: Mapping[str, str]) -> str:
    """The name of an Arm processor, of which Linux gives only the numbers in its identification register; empty if it is none."""
    numbers = [fields.get(f"CPU {key}", "") for key in ("implementer", "part", "variant", "revision")]
    if not all(numbers):
        return ""
    implementer, part, variant, revision = numbers
    core = _ARM_CORES.get((implementer, part), f"Arm {implementer} {part}")
    return f"{core} r{variant.removeprefix('0x')}p{revision}"


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
