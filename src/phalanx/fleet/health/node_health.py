"""The health of a node in a fleet: reports of its NVIDIA GPUs, and the quick checks before it is offered and after a worker died.

*GPU reports* are memory errors, temperature, throttled clocks and Xid errors. They are read through NVML (package ``nvidia-ml-py``,
optional) and from the kernel's log, and judged as values. Meanings of the Xid numbers: NVIDIA, "Xid Errors"
(docs.nvidia.com/deploy/xid-errors); of the throttle reasons: ``hardware/local/detect.py``.

*Quick checks* take well under a second in all. The worker, which has PyTorch and the accelerator's context loaded, checks matrix products
and device memory. The agent, which has neither, checks the disk, the network stack and the GPU reports, in a thread while its workers
start. The checks themselves are those of ``phalanx health`` (``phalanx.fleet.health.checks``).
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.fleet.health import checks as machine_checks
from phalanx.hardware.local.detect import reasons_in_words

FATAL_XIDS = {
    48: "double-bit memory error",
    62: "internal micro-controller halt",
    63: "memory row remapped",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of single-bit memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "GSP does not answer",
    120: "GSP error",
}
"""Xid errors that indicate faulty hardware; others (13, 31, 43, 45) are usually the program's own."""


@dataclass(frozen=True)
class GpuReading:
    """The report of one GPU."""

    name: str
    bus: str
    """PCI address, such as ``0000:3b:00.0``."""
    temperature_c: float
    limit_c: float
    """The temperature at which it begins to throttle; 0 if unknown."""
    clock_mhz: float
    throttle_reasons: int
    """Bit mask (nvml.h)."""
    uncorrected_errors: int
    """Uncorrectable memory errors since the driver was loaded."""
    remap_pending: bool
    """True if memory rows wait for a reset to be remapped."""
    remap_failed: bool


@dataclass(frozen=True)
class Xid:
    """A line of the kernel's log about a GPU."""

    bus: str
    number: int


def xids(log: str) -> tuple[Xid, ...]:
    """Return the NVIDIA Xid errors (PCI bus, number) in the text of a kernel log, in its order."""
    return tuple(
        Xid(match[1], int(match[2]))
        for match in re.finditer(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): ([0-9]+)", log)
    )


def judge_gpu(
    reading: GpuReading, errors: Sequence[Xid], limits: machine_checks.HealthLimits = machine_checks.ANY_RATE
) -> machine_checks.CheckResult:
    """Judge a GPU by its report and the kernel's log.

    Bad for uncorrected memory errors, memory rows that wait for or failed replacement, and fatal Xids of its bus.
    It is slow if it throttles or reaches the limit of temperature, by ``limits`` or else its own. Rates are not judged.
    """
    limit_c = limits.temperature_c or reading.limit_c
    throttled = reasons_in_words(reading.throttle_reasons)
    fatal = sorted({x.number for x in errors if x.number in FATAL_XIDS and same_bus(x.bus, reading.bus)})
    bad = [
        *(f"{n} uncorrected memory errors" for n in [reading.uncorrected_errors] if n),
        *(["memory rows wait for a reset to be replaced"] if reading.remap_pending else []),
        *(["memory rows could not be replaced"] if reading.remap_failed else []),
        *(f"Xid {number}: {FATAL_XIDS[number]}" for number in fatal),
    ]
    slow = [
        *throttled,
        *([f"{reading.temperature_c:.0f} C, limit {limit_c:.0f}"] * (0 < limit_c <= reading.temperature_c)),
    ]
    measures = {"temperature_c": reading.temperature_c, "clock_mhz": reading.clock_mhz}
    text = (
        "; ".join([*bad, *slow]) or f"{reading.temperature_c:.0f} C, {reading.clock_mhz:.0f} MHz, no errors"
    )
    return machine_checks.CheckResult(
        "gpu",
        "bad" if bad else "slow" if slow else "good",
        f"{reading.name} at {reading.bus}: {text}",
        measures,
    )


def same_bus(left: str, right: str) -> bool:
    """Return True if two PCI addresses have the same bus and device; case, domain and function are ignored.

    NVML writes the domain with eight digits, the kernel with four and without the function.
    """
    short = [address.lower().split(".")[0].split(":")[-2:] for address in (left, right)]
    return short[0] == short[1]


def gpus(limits: machine_checks.HealthLimits = machine_checks.ANY_RATE) -> list[machine_checks.CheckResult]:
    """Check all GPUs of this machine: one result for each, none if NVML counts none.

    Instead, a single result "not checked" if the NVML package is not installed or does not start, and a single result
    "bad", without those of the other GPUs, if one GPU does not answer.
    """
    try:
        pynvml: Any = importlib.import_module("pynvml")  # Optional: only machines with GPUs need it.
    except ImportError:
        return [machine_checks.CheckResult("gpu", "not checked", "nvidia-ml-py is not installed")]
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [machine_checks.CheckResult("gpu", "not checked", f"NVML: {error}")]
    try:
        errors = xids(kernel_log())
        count = pynvml.nvmlDeviceGetCount()
        return [judge_gpu(read_gpu(pynvml, number), errors, limits) for number in range(count)]
    except pynvml.NVMLError as error:
        return [machine_checks.CheckResult("gpu", "bad", f"a GPU does not answer: {error}")]
    finally:
        pynvml.nvmlShutdown()


def read_gpu(nvml: Any, number: int) -> GpuReading:
    """Read the report of GPU ``number`` through the module ``nvml``. A counter that it does not support counts as
    no error.

    Raises NVML's other errors.
    """
    gpu = nvml.nvmlDeviceGetHandleByIndex(number)

    def ask(question: Callable[..., Any], *args: Any, otherwise: Any = 0) -> Any:
        try:
            return question(gpu, *args)
        except nvml.NVMLError_NotSupported:
            return otherwise

    _, _, pending, failed = ask(nvml.nvmlDeviceGetRemappedRows, otherwise=(0, 0, 0, 0))
    return GpuReading(
        name=str(nvml.nvmlDeviceGetName(gpu)),
        bus=str(nvml.nvmlDeviceGetPciInfo(gpu).busId),
        temperature_c=float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
        limit_c=float(ask(nvml.nvmlDeviceGetTemperatureThreshold, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)),
        clock_mhz=float(ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)),
        throttle_reasons=int(ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)),
        uncorrected_errors=int(
            ask(
                nvml.nvmlDeviceGetTotalEccErrors,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            )
        ),
        remap_pending=bool(pending),
        remap_failed=bool(failed),
    )


def kernel_log() -> str:
    """Return the kernel's messages in its ring buffer, without waiting; empty if this user may not read them."""
    lines: list[bytes] = []
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        while True:
            lines.append(os.read(log, 8192))
    except OSError:  # The end of the log, or not allowed.
        return b"\n".join(lines).decode(errors="replace")
    finally:
        os.close(log)


# The quick checks of a fleet.

_DISK_BYTES, _LINK_BYTES, _MEMORY_BYTES, _PRODUCTS = 4 << 20, 1 << 20, 32 << 20, 2
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def of_node() -> list[machine_checks.CheckResult]:
    """Check what the workers of a node share: disk of the temporary folder, loopback and GPUs. Needs no PyTorch."""
    return [
        machine_checks.guarded("disk", _disk),
        machine_checks.guarded("link", lambda: machine_checks.loopback(_LINK_BYTES)),
        *gpus(),
    ]


def of_device(device: str) -> list[machine_checks.CheckResult]:
    """Check one worker's accelerator, in that worker: exact matrix products and memory. Needs PyTorch."""
    return [
        machine_checks.guarded("matrix product", lambda: machine_checks.exact_products(device, _PRODUCTS)),
        machine_checks.guarded("memory", lambda: machine_checks.memory(device, _MEMORY_BYTES)),
    ]


def complaints(results: Sequence[machine_checks.CheckResult]) -> str:
    """Return the failed checks as text; empty if the machine is fit."""
    return "; ".join(
        f"{result.check}: {result.text}" for result in results if result.status in ("bad", "slow")
    )


def _disk() -> machine_checks.CheckResult:
    """Check the disk of the temporary folder; "not checked" if it is full. Raises any other ``OSError``."""
    try:
        return machine_checks.disk(Path(tempfile.gettempdir()), _DISK_BYTES)
    except OSError as error:
        if error.errno in _FULL:  # A run continues with a full disk.
            return machine_checks.CheckResult("disk", "not checked", f"no space in {tempfile.gettempdir()}")
        raise


# Watch over a node's health: runs the checks on demand, and repeats them on an unfit node, since it may be
# repaired.

_EXAMINE_S, _EXAMINE_AGAIN_S = 30.0, 30.0


class HealthWatch:
    """Checks the hardware that the workers of one node share: disk, network stack, GPUs."""

    def __init__(self, on_checked: Callable[[str], None], log: Callable[[str], None]) -> None:
        """``on_checked`` is called with the complaints of each check, empty if there are none; ``log`` takes lines for people."""
        self._on_checked, self._log = on_checked, log
        self._doctor, self._suspicion = ThreadPoolExecutor(1, "health"), asyncio.Event()

    def suspect(self) -> None:
        """Request a check."""
        self._suspicion.set()

    async def run(self) -> None:
        """Run the node's checks after each ``suspect()``, until cancelled; pass their complaints, or "", to
        ``on_checked``.

        With complaints, log them and repeat after 30 s. A request during the checks starts them again without a
        result.
        """
        while True:
            await self._suspicion.wait()
            self._suspicion.clear()
            failures = await self._complaints()
            if self._suspicion.is_set():
                continue  # Requested again: the new reason may have come after the check.
            if failures:
                self._log(f"unfit: {failures}")
            self._on_checked(failures)
            if failures:
                await asyncio.sleep(_EXAMINE_AGAIN_S)
                self._suspicion.set()

    async def _complaints(self) -> str:
        """Run the node's checks in a thread and return their complaints; not ending within ``_EXAMINE_S`` is one."""
        checks = asyncio.get_running_loop().run_in_executor(self._doctor, of_node)
        try:
            async with asyncio.timeout(_EXAMINE_S):
                return complaints(await checks)
        except TimeoutError:
            return f"its checks did not end within {_EXAMINE_S:g} s"

    def close(self) -> None:
        """End the thread, without waiting for a check that hangs."""
        self._doctor.shutdown(wait=False, cancel_futures=True)
