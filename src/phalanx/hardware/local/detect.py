"""This machine without torch: its GPUs and their system, what throttles it, and environment variables of CUDA libraries."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any

from phalanx.hardware.catalog import accelerators, systems, this_machine
from phalanx.hardware.cluster import Accelerator

_DRIVER = Path("/proc/driver/nvidia/gpus")


def system_here(driver: Path = _DRIVER) -> str | None:
    """Return what plans take this machine for: ``this`` if it was calibrated, a system with its GPUs, or ``cpu``.

    ``None`` if the GPUs are not in the catalog.
    """
    if this_machine().is_file():
        return "this"
    if not gpu_count(driver):
        return "cpu"
    texts = (path.read_text() for path in sorted(driver.glob("*/information")))
    models = [model[1] for text in texts if (model := re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE))]
    return system_named(models[0]) if models else None


def gpu_count(driver: Path = _DRIVER) -> int:
    """Return the number of NVIDIA GPUs that PyTorch can use here; 0 if the installed PyTorch is a CPU build.

    They are the GPUs of the driver folder that ``CUDA_VISIBLE_DEVICES`` leaves visible: those before the first number
    that no GPU has, and none if a name is there twice (docs.nvidia.com/cuda/cuda-programming-guide, CUDA Environment
    Variables; torch.cuda.device_count). Identifiers (GPU-..., MIG-...) count as present. Does not import torch.
    """
    if metadata.version("torch").endswith("+cpu") or not driver.is_dir():
        return 0
    present = len(list(driver.iterdir()))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    names = list(
        takewhile(
            lambda name: name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < present),
            (name.strip() for name in visible.split(",")),
        )
    )
    return len(names) if len(set(names)) == len(names) else 0


# The system of an accelerator, by the name that its driver reports.


@dataclass(frozen=True)
class KnownPeak:
    """The dense bf16 peak of a known accelerator, in FLOP/s."""

    name: str
    bf16_flops: float
    source: str


def accelerator_named(device_name: str) -> KnownPeak | None:
    """Return the catalog's bf16 peak (FLOP/s) for a driver's device name such as "NVIDIA H200"; ``None`` if it is not in the catalog."""
    entry = _entry_named(device_name)
    if entry is None:
        return None
    return KnownPeak(entry.name, entry.flops["bf16"].value, entry.flops["bf16"].source)


def system_named(device_name: str) -> str | None:
    """The name of the first of the catalog's systems whose accelerators' driver reports that device name, or ``None``."""
    entry = _entry_named(device_name)
    return next((name for name, system in systems().items() if system.accelerator is entry), None)


def _entry_named(device_name: str) -> Accelerator | None:
    """Return the accelerator of the catalog whose name is the longest part of the device's; ``None`` if there is none.

    Accelerators without a bf16 rate do not count.
    """
    matches = [
        (len(part), entry)
        for entry in accelerators().values()
        for part in entry.device_names
        if part in device_name and "bf16" in entry.flops
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else None


# Throttling of GPUs and processors: heat, a hardware slowdown, a power brake, a quota.
#
# * GPUs: the driver reports the current reasons for low clocks (NVML, optional package ``nvidia-ml-py``; bits: nvml.h).
# * Heat of processors: the kernel counts how often it lowered the clocks of each core and package
#   (``/sys/devices/system/cpu/cpuN/thermal_throttle``; Linux, Documentation/ABI/testing/sysfs-devices-system-cpu). Most virtual
#   machines have no such counters, and then nothing is reported.
# * Quota: the kernel counts the periods in which a control group was stopped, because it had used up its processor time. An
#   example is a container with a CPU limit (Documentation/scheduler/sched-bwc.rst).


THROTTLED = {
    0x08: "hardware slowdown",
    0x40: "thermal slowdown by hardware",
    0x20: "thermal slowdown by software",
    0x80: "power brake",
}
"""Reasons (bits) for low clocks that a healthy GPU does not have; idle clocks and the power cap are none."""
CPUS = Path("/sys/devices/system/cpu")
_COUNTS = ("package_throttle_count", "core_throttle_count")
GROUPS = Path("/sys/fs/cgroup")
_OFTEN = 0.25
"""Share of the periods in which a group was stopped: a burst of threads that read data costs a few, and no step waits for them."""


def reasons_in_words(bits: int) -> list[str]:
    """The reasons among NVML's bits that speak of a machine in trouble."""
    return [text for bit, text in THROTTLED.items() if bits & bit]


def throttled_gpus() -> list[str]:
    """Return a sentence on each GPU whose clocks are lowered at this moment, with reasons and clock. Blocks if the
    driver hangs.

    Empty without NVML. GPUs that do not answer are left out.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")  # optional: only machines with GPUs have a use for it
        nvml.nvmlInit()
    except Exception:  # pynvml's error classes need pynvml
        return []
    reasons = []
    try:
        for number in range(nvml.nvmlDeviceGetCount()):
            with suppress(Exception):  # this GPU does not support the query
                gpu = nvml.nvmlDeviceGetHandleByIndex(number)
                words = reasons_in_words(int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)))
                if words:
                    bus, clock = (
                        nvml.nvmlDeviceGetPciInfo(gpu).busId,
                        nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
                    )
                    reasons.append(f"GPU {number} at {bus}: {', '.join(words)}, {clock} MHz")
    finally:
        with suppress(Exception):
            nvml.nvmlShutdown()
    return reasons


class Throttles:
    """Throttling of this machine, by counters read at each call."""

    def __init__(self, root: Path = CPUS) -> None:
        self._cpus, self._quota = CpuThrottles(root), QuotaThrottles()

    def now(self) -> list[str]:
        """A sentence on each GPU that is slow at this moment, and on the processors and the quota that were since the last look."""
        return [*throttled_gpus(), *self._cpus.new(), *self._quota.new()]


class QuotaThrottles:
    """The kernel's counts of periods in which this process's control group was stopped, as they were when they were looked at last."""

    def __init__(self, root: Path = GROUPS, membership: Path = Path("/proc/self/cgroup")) -> None:
        self._root, self._membership = root, membership
        self._before = self._read()

    def new(self) -> list[str]:
        """Return a sentence if the group was stopped in many of the periods since the last call; else nothing."""
        before, self._before = self._before, self._read()
        periods, stopped = (
            self._before.get(name, 0) - before.get(name, 0) for name in ("nr_periods", "nr_throttled")
        )
        if periods <= 0 or stopped < _OFTEN * periods:
            return []
        return [
            f"the CPU limit of its control group stopped it in {stopped} of {periods} periods: raise the limit (a container's CPU limit, cpu.max)"
        ]

    def _read(self) -> dict[str, int]:
        """Return the counters of the group and of those above it, of which the one that was stopped most often; empty if there are none."""
        groups = [self._root / controller / name for controller, name in self._memberships()]
        files = [folder / "cpu.stat" for group in groups for folder in (group, *group.parents)]
        counters = [_counters(file) for file in files if file.is_relative_to(self._root)]
        return max(counters, key=lambda group: group.get("nr_throttled", 0), default={})

    def _memberships(self) -> list[tuple[str, str]]:
        """Return folder of the controller and path in it of the groups that may limit the processor, of either version (cgroups(7))."""
        places = []
        with suppress(OSError):
            for line in self._membership.read_text().splitlines():
                _, controllers, name = line.split(":", 2)
                if not controllers or "cpu" in controllers.split(","):
                    places.append((controllers, name.lstrip("/")))
        return places


class CpuThrottles:
    """The kernel's counts of lowered clocks, as they were when they were looked at last."""

    def __init__(self, root: Path = CPUS) -> None:
        self._places = [
            place for name in _COUNTS for place in sorted(root.glob(f"cpu[0-9]*/thermal_throttle/{name}"))
        ]
        self._before = _read(self._places)

    def new(self) -> list[str]:
        """Return at most one sentence: the processors whose clocks were lowered for heat since the last call; empty if there are none."""
        now = _read(self._places)
        grown = {place: count - self._before.get(place, count) for place, count in now.items()}
        self._before = now
        cpus = [int(re.sub(r"\D", "", place.parent.parent.name)) for place, more in grown.items() if more > 0]
        times = max(grown.values(), default=0)
        return [f"processors {_spans(set(cpus))}: clocks lowered for heat, {times} times"] if cpus else []


def _read(places: Iterable[Path]) -> dict[Path, int]:
    """Return the counter in each file; those that cannot be read are left out."""
    counters = {}
    for place in places:
        with suppress(OSError, ValueError):
            counters[place] = int(place.read_text())
    return counters


def _counters(file: Path) -> dict[str, int]:
    """Return the counters of a file of lines of a name and a number; empty if it cannot be read."""
    with suppress(OSError, ValueError):
        return {name: int(count) for name, count in (line.split() for line in file.read_text().splitlines())}
    return {}


def _spans(numbers: set[int]) -> str:
    """Return numbers as text with ranges, ascending: ``0-3, 8``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


# Environment variables that CUDA, cuBLAS and NCCL read once, at their first use. None affects a CPU.
#
# The main function of every process that may run a rank calls ``set_for_rank`` before anything initializes CUDA. Variables that
# the user has set are not changed.


RANK = {
    # Without it, cuBLAS may pick another algorithm from one run to the next, by the memory that it finds free.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Mixtures of experts allocate other sizes at each step; fixed segments would be cut into pieces that fit nothing.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # A pipeline's receives wait on streams of their own. With the default of 8 hardware queues, a kernel could be queued behind
    # a receive that waits for what this kernel is to send.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
"""For every rank."""

SURVIVING_RANK = {
    # PyTorch's watchdog would end the process at the first error or timeout of a peer. A fleet's worker survives that: its agent
    # has it abort the communicators (``phalanx.parallel.process_group.abort``).
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # The monitor would end the process when the watchdog hangs, as it may while communicators are aborted.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # The agent requests the flight record itself; a dump at a timeout would only delay the abort.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""For a rank that outlives its process groups, besides."""

_OLD_NAMES = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}


def set_for_rank(environ: MutableMapping[str, str] = os.environ, *, survives: bool = False) -> None:
    """Set the variables of this process's CUDA libraries in ``environ``; those that are set, also by an older name,
    stay.

    With ``survives``, also those for a process that continues when its process groups break.
    """
    for name, value in (RANK | (SURVIVING_RANK if survives else {})).items():
        if _OLD_NAMES.get(name, name) not in environ:
            environ.setdefault(name, value)
