"""What the NVIDIA GPUs of a node say of themselves, under the field names of NVIDIA's DCGM exporter.

Dashboards and alerts that people have for ``dcgm-exporter`` name these fields, so they are kept letter for letter; the numbers are read as the health checks
read them, through NVML and from the kernel's log. Only what a run is judged by is here: whoever wants all of DCGM's fields runs DCGM beside it.
"""

from __future__ import annotations

import importlib
from typing import Any

from phalanx.fleet.health.gpu import GpuReading, Xid, kernel_log, read_gpu, same_bus, xids
from phalanx.observe.metrics.samples import Derived, Kind, Labels, Metric, Sample, collect


def _derived(name: str, kind: Kind, text: str, compute: Any) -> Derived[GpuReading]:
    return Derived(Metric(f"DCGM_FI_DEV_{name}", kind, text, "NVML", ("gpu",)), compute)


GPU_METRICS: tuple[Derived[GpuReading], ...] = (
    _derived("GPU_TEMP", "gauge", "Temperature, in degrees Celsius.", lambda r: r.temperature_c),
    _derived("SM_CLOCK", "gauge", "Clock of the multiprocessors, in MHz.", lambda r: r.clock_mhz),
    _derived("CLOCK_THROTTLE_REASONS", "gauge", "Why its clocks are low, as bits (nvml.h).", lambda r: r.throttle_reasons),
    _derived("ECC_DBE_VOL_TOTAL", "counter", "Uncorrectable memory errors since the driver was loaded.", lambda r: r.uncorrected_errors),
    _derived("ROW_REMAP_PENDING", "gauge", "1 if memory rows wait for a reset to be replaced.", lambda r: int(r.remap_pending)),
    _derived("ROW_REMAP_FAILURE", "gauge", "1 if memory rows could not be replaced.", lambda r: int(r.remap_failed)),
)  # fmt: skip
XID = Metric(
    "DCGM_FI_DEV_XID_ERRORS",
    "gauge",
    "Number of the newest Xid error in the kernel's log, as far as it may be read; 0 for none.",
    "kernel log",
    ("gpu",),
)


def gpu_samples(labels: Labels) -> list[Sample]:
    """The samples of this machine's GPUs; none where there are none, or where ``nvidia-ml-py`` is not installed.

    May hang where a driver does. Raises NVML's errors.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")  # optional: only machines with GPUs have a use for it
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        readings = [read_gpu(nvml, number) for number in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()
    return samples_of(readings, xids(kernel_log()), labels)


def samples_of(readings: list[GpuReading], errors: tuple[Xid, ...], labels: Labels) -> list[Sample]:
    """The samples of what the GPUs have reported, by index as NVML counts them."""
    samples: list[Sample] = []
    for index, reading in enumerate(readings):
        own = labels | {"gpu": str(index)}
        newest = [error.number for error in errors if same_bus(error.bus, reading.bus)]
        samples += collect(GPU_METRICS, reading, own, lambda _metric, _error: None)
        samples.append(Sample(XID, own, newest[-1] if newest else 0))
    return samples
