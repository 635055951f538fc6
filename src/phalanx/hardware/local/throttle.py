"""What slows the processors of this machine down while they work: heat, a hardware slowdown, a power brake.

A GPU's driver tells the reasons why its clocks are low at this moment (NVML, package ``nvidia-ml-py``, optional; meanings of the bits: nvml.h). The kernel
counts how often a processor's clocks were lowered for heat, of each core and each package
(``/sys/devices/system/cpu/cpuN/thermal_throttle``; Linux, Documentation/ABI/testing/sysfs-devices-system-cpu); machines whose kernel
does not say, such as most virtual ones, say nothing here.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

THROTTLED = {
    0x08: "hardware slowdown",
    0x40: "thermal slowdown by hardware",
    0x20: "thermal slowdown by software",
    0x80: "power brake",
}
"""Reasons (bits) for low clocks that a healthy GPU does not have; idle clocks and the power cap are none."""
CPUS = Path("/sys/devices/system/cpu")
_COUNTS = ("package_throttle_count", "core_throttle_count")


def reasons_in_words(bits: int) -> list[str]:
    """The reasons among NVML's bits that speak of a machine in trouble."""
    return [text for bit, text in THROTTLED.items() if bits & bit]


def throttled_gpus() -> list[str]:
    """A sentence on each GPU whose clocks are low at this moment; may hang where a driver does."""
    try:
        nvml: Any = importlib.import_module("pynvml")  # optional: only machines with GPUs have a use for it
        nvml.nvmlInit()
    except Exception:  # its errors have names only where it is installed
        return []
    found = []
    try:
        for number in range(nvml.nvmlDeviceGetCount()):
            with suppress(Exception):  # this GPU does not say
                gpu = nvml.nvmlDeviceGetHandleByIndex(number)
                words = reasons_in_words(int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)))
                if words:
                    bus, clock = (
                        nvml.nvmlDeviceGetPciInfo(gpu).busId,
                        nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
                    )
                    found.append(f"GPU {number} at {bus}: {', '.join(words)}, {clock} MHz")
    finally:
        with suppress(Exception):
            nvml.nvmlShutdown()
    return found


class Throttles:
    """What slows this machine down, look after look."""

    def __init__(self, root: Path = CPUS) -> None:
        self._cpus = CpuThrottles(root)

    def now(self) -> list[str]:
        """A sentence on each GPU that is slow at this moment, and on the processors that were since the last look."""
        return [*throttled_gpus(), *self._cpus.new()]


class CpuThrottles:
    """The kernel's counts of lowered clocks, as they were when they were looked at last."""

    def __init__(self, root: Path = CPUS) -> None:
        self._places = [
            place for name in _COUNTS for place in sorted(root.glob(f"cpu[0-9]*/thermal_throttle/{name}"))
        ]
        self._before = _read(self._places)

    def new(self) -> list[str]:
        """A sentence on the processors whose clocks were lowered for heat since the last look."""
        now = _read(self._places)
        grown = {place: count - self._before.get(place, count) for place, count in now.items()}
        self._before = now
        cpus = [_cpu(place) for place, more in grown.items() if more > 0]
        times = max(grown.values(), default=0)
        return [f"processors {_spans(set(cpus))}: clocks lowered for heat, {times} times"] if cpus else []


def _read(places: Iterable[Path]) -> dict[Path, int]:
    found = {}
    for place in places:
        with suppress(OSError, ValueError):
            found[place] = int(place.read_text())
    return found


def _cpu(place: Path) -> int:
    return int(re.sub(r"\D", "", place.parent.parent.name))


def _spans(numbers: set[int]) -> str:
    """Numbers in words: ``0-3, 8``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
