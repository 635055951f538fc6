"""The environment record of a run, for reproducing it: code version, packages, host.

Results that cannot be traced to a commit and to the versions beneath it cannot be reproduced. Each
attempt records these facts in its first event. Nothing here imports the packages: versions come
from the metadata of the installed distributions, so that asking costs milliseconds, not a torch import.

Below: the changes of the code against its commit, and the control groups of a process.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path, PurePosixPath

from phalanx import version as of_package
from phalanx.observe.logs.masking import MASKED, SecretMask, secret_values
from phalanx.process.this_process import host_name
from phalanx.run.read import SECRET_NAME

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
_ALL_BUT_RUNS = ("--", ":/", ":(exclude,top)runs")
"""All files of a checkout but the runs in it."""

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
    r"(PHALANX|OMP|MKL|KMP|GOMP|OPENBLAS|NCCL|TORCH|PYTORCH|CUDA|CUBLAS|HIP|ROCR|GLOO|UCX|XLA)_\w+|PYTHON(TRACEMALLOC|DEVMODE|MALLOC)"
)
_OF_ONE_PROCESS = frozenset(
    f"PHALANX_{name}" for name in ("COMMAND", "LAUNCHER", "MEETING_POINT", "RANK", "RANKS", "RUN_TOKEN")
)
"""Variables by which a launcher identifies each rank: they are no facts of the run."""
_LONGEST_VALUE = 500
_MOST_VARIABLES = 200
_MOST_MODULES = 256
_LONGEST_COMMAND = 4000


def environment_record() -> dict[str, object]:
    """Code, packages, host, command line and variables as plain JSON values: the ``environment`` of ``RunStarted``."""
    return {
        "code": dict(own_code()),
        "packages": package_versions(),
        "modules": module_digests(),
        "host": host_facts(),
        "command": command_line(),
        "variables": variables(),
    }


_INSTALLED = frozenset(("site-packages", "dist-packages"))
"""Folders of installed packages, also of other environments on the path."""


def module_digests() -> dict[str, str]:
    """Return the SHA-256 (12 hex digits) of each imported source file that no installed package, nor Python, nor this package has, by the name
    of its module: code of the user's own, and packages installed in place. At most ``_MOST_MODULES``."""
    installed = (*sysconfig.get_paths().values(), str(OWN_PACKAGE.parent))
    digests: dict[str, str] = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if (
            name.startswith("__")
            or not isinstance(file, str)
            or not file.endswith(".py")
            or file.startswith(installed)
            or not _INSTALLED.isdisjoint(Path(file).parts)
        ):
            continue
        with suppress(OSError):
            digests[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
        if len(digests) == _MOST_MODULES:
            break
    return digests


def command_line(words: Sequence[str] | None = None, mask: SecretMask | None = None) -> str:
    """Return a command as a shell takes it, without secrets, cut if it is long: ``words``, or that of this process.

    A rank was started by a launcher with words of its own: ``PHALANX_COMMAND`` has those that a person typed.
    """
    mask = mask or SecretMask.of_environment(os.environ)
    recorded = os.environ.get("PHALANX_COMMAND", "") if words is None else ""
    shown = mask(recorded or shlex.join(words or sys.orig_argv))
    return shown if len(shown) <= _LONGEST_COMMAND else f"{shown[:_LONGEST_COMMAND]} ..."


def variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that libraries and this package act by, sorted, at most ``_MOST_VARIABLES``.

    If a name looks like a secret's, the value is masked; long values are cut.
    """
    environment = os.environ if environment is None else environment
    mask = SecretMask.of_environment(environment)
    names = sorted(name for name in environment if _VARIABLES.fullmatch(name) and name not in _OF_ONE_PROCESS)
    return {
        name: MASKED if SECRET_NAME.search(name) else mask(environment[name])[:_LONGEST_VALUE]
        for name in names[:_MOST_VARIABLES]
    }


@functools.cache
def own_code() -> Mapping[str, object]:
    """``code_version`` of the code that this process runs: as it was at the first call, which is what has been imported."""
    return code_version()


def code_version(package: Path | None = None, *, dirty: bool = True) -> dict[str, object]:
    """Return the version of our package, and its git commit where it runs from a checkout.

    ``git_dirty`` is True if tracked files differ from the commit, or untracked ones outside runs/ exist, or git
    fails: such a run cannot be repeated from the commit alone. Without ``dirty`` that is not examined. An installed
    package has the hash of its wheel's list of files instead.
    """
    package = package or OWN_PACKAGE
    version: dict[str, object] = {"version": of_package.__version__}
    if not is_checkout(package):
        return version | installed_from(package)
    version["git_commit"] = (git(package, "rev-parse", "--verify", "HEAD") or "").strip() or None
    if not dirty:
        return version
    status = git(package, "status", "--porcelain", *_ALL_BUT_RUNS)
    version["git_dirty"] = status is None or bool(status.strip())
    return version


def is_checkout(package: Path) -> bool:
    """True if the package's files are tracked by git. Not merely inside: a virtual environment may lie in somebody else's repository."""
    return git(package, "ls-files", "--error-unmatch", "__init__.py") is not None


def installed_from(package: Path, name: str = DISTRIBUTION) -> dict[str, object]:
    """Return the hash of an installed wheel's list of files, which identifies the build; empty if ``package`` is not from that wheel."""
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
    """Return the standard output of git in ``directory``; None if it is not installed, fails, or takes longer than
    10 s.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="surrogateescape",  # a diff may contain any bytes
            timeout=GIT_TIMEOUT_S,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Return package -> installed version, and that of ``python``; packages that are not installed are left out."""
    versions = {name: version for name in names if (version := _installed(name)) is not None}
    return {"python": platform.python_version()} | versions


@functools.cache
def _installed(name: str) -> str | None:
    """Return the version of an installed package, or None; cached, because PyTorch's metadata alone takes
    milliseconds to read.
    """
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def host_facts() -> dict[str, object]:
    """The machine: name, platform, processor, cores this process may use, memory in bytes."""
    return {
        "name": host_name(),
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


def is_bound() -> bool:
    """Return True if this process may use only some of the machine's cores (taskset, or a launcher that binds ranks)."""
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name: as the kernel lists it, else of an Arm core by its numbers, else the platform's."""
    fields: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    named = fields.get("model name") or fields.get("Hardware")
    return named or _arm_model(fields) or platform.processor() or platform.machine()


def _arm_model(fields: Mapping[str, str]) -> str:
    """Return the name of an Arm processor, from the numbers in its identification register that Linux lists; empty if it is none."""
    numbers = [fields.get(f"CPU {key}", "") for key in ("implementer", "part", "variant", "revision")]
    if not all(numbers):
        return ""
    implementer, part, variant, revision = numbers
    core = _ARM_CORES.get((implementer, part), f"Arm {implementer} {part}")
    return f"{core} r{variant.removeprefix('0x')}p{revision}"


def process_age_ns() -> int:
    """Return the nanoseconds since this process was started, to 10 ms; 0 where the kernel does not report it.

    Linux keeps the start in ``/proc/self/stat`` (field 22, in clock ticks since boot).
    """
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return 0
    after_name = stat.read_text().rpartition(")")[2].split()
    started_ns = int(after_name[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return max(0, time.clock_gettime_ns(time.CLOCK_BOOTTIME) - started_ns)


# The state of a checkout beyond its commit: the changes of tracked files as a patch, and the names of untracked files.
#
# A run from a checkout with changes can be repeated only with the patch. Files with names of secrets are left out, and text
# that looks like a secret is masked. Untracked files are only named, because they may be data or private. The patch is bounded,
# and marked if it was cut.


MOST_BYTES = 4 << 20
_MOST_NAMES = 200
_SECRET_FILE = re.compile(
    r"(^|/)(\.env[^/]*|\.netrc|\.npmrc|id_[a-z0-9]+|[^/]*(secret|credential|token|password)[^/]*|[^/]*\.(pem|key|p12|pfx))$",
    re.I,
)
_QUOTED = re.compile(
    r"((?:secret|passw(?:or)?d|api_?key|access_?key|token(?!iz|s\b))\w*[\"']?\s*[=:]\s*)([\"'])[^\"'\s]{8,}\2",
    re.I,
)
_TOKENS = re.compile(
    r"\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}|gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|xox[abeprs]-[\w-]{10,}|AIza[\w-]{30,})"
    r"|(?<=://)[^\s/'\"@:{}]{1,256}:[^\s/'\"{}]{1,512}(?=@)|(?<=PRIVATE KEY-----)(?:(?!-----)[\s\S]){40,16384}(?=[-+ ]?-----END)"
)
"""For code, narrower than what is masked in logs: code speaks of passwords without holding any, and a patch should apply."""
_PLAIN = ("--no-color", "--no-ext-diff", "--no-textconv")
"""Options of git diff for a patch that does not depend on the user's settings."""
_FILE_OF_PATCH = re.compile(r"^diff --git ", re.MULTILINE)
_NAME_OF_PATCH = re.compile(r"diff --git .* (?:\"b/(.*)\"|b/(.*))\n")
_CODE_FILE = re.compile(r"\.(py|pyi|c|cc|cpp|cu|h|js|md|toml)$")


@dataclass(frozen=True)
class CodePatch:
    """How the files of a checkout differ from its commit."""

    patch: bytes
    """As ``git apply`` takes it, if neither ``masked`` nor ``cut``."""
    untracked: tuple[str, ...] = ()
    """Files that the commit does not know; their content is not kept."""
    left_out: tuple[str, ...] = ()
    """Changed files whose names mark them as secret."""
    masked: bool = False
    """True if something that looked like a secret was replaced, so that the patch may not apply."""
    cut: bool = False
    failed: bool = False
    """True if git failed or took longer than 10 s, so that changes are missing here."""

    @property
    def sha256(self) -> str:
        """The hash of the patch; empty if there is none."""
        return hashlib.sha256(self.patch).hexdigest() if self.patch else ""

    def facts(self) -> dict[str, object]:
        """The fields of it in a run's record; empty ones are left out."""
        table = {
            "patch_sha256": self.sha256,
            "untracked": list(self.untracked),
            "left_out": list(self.left_out),
            "patch_masked": self.masked,
            "patch_cut": self.cut,
            "patch_failed": self.failed,
        }
        return {name: value for name, value in table.items() if value}


def code_patch(
    package: Path | None = None, secrets: Collection[str] | None = None, *, max_bytes: int = MOST_BYTES
) -> CodePatch | None:
    """Return the changes of the checkout that the package runs from; ``None`` if there are none, or it runs from
    none.

    Files of secrets are left out, and ``secrets`` (by default those in this process's environment) and credentials
    are masked. The patch is cut after ``max_bytes``. Untracked files are listed by name. If git fails, ``failed`` is
    set.
    """
    package = package or OWN_PACKAGE
    if not is_checkout(package):
        return None
    root = Path((git(package, "rev-parse", "--show-toplevel") or "").strip() or package)
    listed_changed = git(root, "diff", "HEAD", "--name-only", "-z")
    listed_untracked = git(root, "ls-files", "--others", "--exclude-standard", "-z", *_ALL_BUT_RUNS)
    if listed_changed == listed_untracked == "":
        return None
    changed, untracked = _names(listed_changed), _names(listed_untracked)
    left_out = [name for name in changed if _SECRET_FILE.search(name) and not _CODE_FILE.search(name)]
    shown = [f":(top,literal){name}" for name in changed if name not in left_out]
    text = git(root, "diff", "HEAD", *_PLAIN, "--binary", "--", *shown) if shown else ""
    masked = _masked(text or "", secret_values(os.environ) if secrets is None else secrets)
    content = masked.encode(errors="surrogateescape")
    return CodePatch(
        patch=content[:max_bytes],
        untracked=tuple(untracked[:_MOST_NAMES]),
        left_out=tuple(left_out[:_MOST_NAMES]),
        masked=masked != (text or ""),
        cut=len(content) > max_bytes,
        failed=None in (listed_changed, listed_untracked, text),
    )


def _masked(text: str, secrets: Collection[str]) -> str:
    """Return a patch with ``secrets`` replaced, and each file's part masked."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASKED)
    starts = [0, *(match.start() for match in _FILE_OF_PATCH.finditer(text) if match.start()), len(text)]
    return "".join(_masked_file(text[start:stop]) for start, stop in pairwise(starts))


def _masked_file(patch: str) -> str:
    """Return the patch of one file, masked: tokens and quoted secrets in all, and in a file that is no code as in
    logs.

    Settings, notes and scripts have secrets without quotes.
    """
    name = _NAME_OF_PATCH.match(patch)
    is_code = name is None or _CODE_FILE.search(name[1] or name[2]) is not None
    if not is_code and "\nGIT binary patch\n" not in patch:
        patch = SecretMask()(patch)
    return _TOKENS.sub(MASKED, _QUOTED.sub(rf"\1\2{MASKED}\2", patch))


def _names(listed: str | None) -> list[str]:
    return [name for name in (listed or "").split("\0") if name]


# The control groups of this process (cgroups(7)): the limits of a container on what it uses of its machine.


PROC, ROOT = Path("/proc"), Path("/sys/fs/cgroup")


def groups_of(controller: str, proc: Path = PROC, root: Path = ROOT) -> Iterator[tuple[Path, int]]:
    """Yield the folders of this process's groups, from its own up to the root, each with the version (1 or 2) of its files.

    ``proc/self/cgroup`` has a line ``0::PATH`` for version 2 and ``N:...CONTROLLER...:PATH`` for version 1. In a
    container, PATH may be that of the host, which is not visible here; then the root of what is mounted is the
    container's own group, and it is yielded in any case.
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
    """Return the processors that a group may use; infinite if it sets no limit, or its files cannot be read."""
    try:
        if version == 2:  # "max 100000" or "200000 100000", microseconds in a period
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if quota not in ("max", "-1") else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
