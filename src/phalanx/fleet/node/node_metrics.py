"""Metrics of a node, from its agent: workers, memory, disk, versions, and NVIDIA GPUs.

The agent's event loop replaces its values atomically, so a thread may read them at any time.
"""

from __future__ import annotations

import importlib
import os
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpoint.snapshot.segments import free_memory_bytes
from phalanx.fleet.core.messages import NO_EPOCH, NO_STEP, RankSnapshot, WorkerPhase
from phalanx.fleet.health.node_health import GpuReading, Xid, kernel_log, read_gpu, same_bus, xids
from phalanx.fleet.node.agent_actions import WorkerLife
from phalanx.observe.metrics.samples import Derived, Kind, Labels, Metric, MetricValues, Sample, collect
from phalanx.observe.record.notes import nvidia_driver
from phalanx.observe.record.records import package_versions
from phalanx.version import __version__


@dataclass(frozen=True)
class AgentFacts:
    """State of an agent's node, as its metrics report it."""

    workers: Sequence[WorkerLife]
    phase: WorkerPhase
    attached: bool
    fit: bool
    deaths: int
    """Processes of workers that have ended."""
    snapshots: Sequence[RankSnapshot]


@dataclass(frozen=True)
class MachineFacts:
    """Memory and disk of the machine, as the operating system reports them."""

    memory_bytes: int
    free_memory_bytes: int
    disk_bytes: int
    disk_free_bytes: int


def _derived(name: str, kind: Kind, text: str, source: str, compute: Any, *labels: str) -> Derived[Any]:
    return Derived(Metric(f"phalanx_node_{name}", kind, text, source, labels), compute)


def _phases(agent: AgentFacts) -> MetricValues:
    return [({"phase": phase.value}, float(phase is agent.phase)) for phase in WorkerPhase]


def _step(agent: AgentFacts) -> MetricValues:
    """Return the last step of the slowest worker with a rank; ``None`` if there is none."""
    steps = [worker.step for worker in agent.workers if worker.epoch != NO_EPOCH]
    return min(steps) if steps and min(steps) != NO_STEP else None


def _running(agent: AgentFacts) -> MetricValues:
    return Counter(worker.running for worker in agent.workers)[True]


AGENT_METRICS: tuple[Derived[AgentFacts], ...] = (
    _derived("workers", "gauge", "Processes of workers that run.", "agent", _running),
    _derived("phase", "gauge", "1 for the phase that all its workers are in.", "agent", _phases, "phase"),
    _derived("step", "gauge", "Last step that all its workers have completed in their epoch.", "agent", _step),
    _derived("attached", "gauge", "1 if the agent is connected to a coordinator.", "agent", lambda a: float(a.attached)),
    _derived("fit", "gauge", "1 if the node has passed its health checks.", "agent", lambda a: float(a.fit)),
    _derived("worker_deaths_total", "counter", "Processes of workers that have ended.", "agent", lambda a: a.deaths),
    _derived("snapshot_bytes", "gauge", "Snapshots that the node's memory holds.", "agent", lambda a: sum(h.nbytes for h in a.snapshots)),
    _derived("waiting_seconds", "gauge", "Seconds for which a worker has waited for samples of an object store.", "agent",
             lambda a: max((w.waiting_s for w in a.workers), default=0.0)),
)  # fmt: skip
MACHINE_METRICS: tuple[Derived[MachineFacts], ...] = (
    _derived("memory_bytes", "gauge", "Memory of the machine.", "/proc", lambda m: m.memory_bytes),
    _derived("memory_free_bytes", "gauge", "Memory that can still be filled, also by its control groups.", "/proc", lambda m: m.free_memory_bytes),
    _derived("disk_bytes", "gauge", "Size of the file system of the run directory.", "statvfs", lambda m: m.disk_bytes),
    _derived("disk_free_bytes", "gauge", "Room on it for this user.", "statvfs", lambda m: m.disk_free_bytes),
)  # fmt: skip
SOFTWARE = Metric(
    "phalanx_node_software_info",
    "info",
    "Versions of the software that determines the bits on this node.",
    "package metadata",
    ("phalanx", "python", "torch", "numpy", "driver", "kernel"),
)


def agent_samples(facts: Callable[[], AgentFacts], labels: Labels) -> list[Sample]:
    """Return the samples of the agent's state."""
    return collect(AGENT_METRICS, facts(), labels)


def machine_samples(run_dir: Path, labels: Labels) -> list[Sample]:
    """Return the samples of this machine's memory and of the disk with ``run_dir``.

    Blocks while that file system hangs. Raises ``OSError`` if it cannot be examined.
    """
    disk = os.statvfs(run_dir)
    page = os.sysconf("SC_PAGE_SIZE")
    facts = MachineFacts(
        memory_bytes=page * os.sysconf("SC_PHYS_PAGES"),
        free_memory_bytes=free_memory_bytes(),
        disk_bytes=disk.f_frsize * disk.f_blocks,
        disk_free_bytes=disk.f_frsize * disk.f_bavail,
    )
    return collect(MACHINE_METRICS, facts, labels)


class SoftwareSampler:
    """Sampler of the software versions on this machine, looked up once."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._versions: Labels | None = None

    def samples(self) -> list[Sample]:
        """Return one sample that is always 1, with the versions of Phalanx, Python, PyTorch, NumPy, GPU driver and
        kernel as labels. The versions are read at the first call and kept.
        """
        if self._versions is None:
            packages = package_versions(("torch", "numpy"))
            versions = {
                "phalanx": __version__,
                "python": platform.python_version(),
                "torch": packages.get("torch", ""),
                "numpy": packages.get("numpy", ""),
                "driver": nvidia_driver(),
                "kernel": platform.release(),
            }
            self._versions = self._labels | versions
        return [Sample(SOFTWARE, self._versions, 1)]


# Metrics of the node's NVIDIA GPUs, under the field names of NVIDIA's DCGM exporter. Dashboards and alerts
# for ``dcgm-exporter`` use these names, so they are kept exactly. Values come from NVML and the kernel's log,
# as in the health checks. Only the fields that a run is judged by are here; DCGM, run beside it, has all of
# them.


def _of_gpu(name: str, kind: Kind, text: str, compute: Any) -> Derived[GpuReading]:
    return Derived(Metric(f"DCGM_FI_DEV_{name}", kind, text, "NVML", ("gpu",)), compute)


GPU_METRICS: tuple[Derived[GpuReading], ...] = (
    _of_gpu("GPU_TEMP", "gauge", "Temperature, in degrees Celsius.", lambda r: r.temperature_c),
    _of_gpu("SM_CLOCK", "gauge", "Clock of the multiprocessors, in MHz.", lambda r: r.clock_mhz),
    _of_gpu("CLOCK_THROTTLE_REASONS", "gauge", "Why its clocks are low, as bits (nvml.h).", lambda r: r.throttle_reasons),
    _of_gpu("ECC_DBE_VOL_TOTAL", "counter", "Uncorrectable memory errors since the driver was loaded.", lambda r: r.uncorrected_errors),
    _of_gpu("ROW_REMAP_PENDING", "gauge", "1 if memory rows wait for a reset to be replaced.", lambda r: int(r.remap_pending)),
    _of_gpu("ROW_REMAP_FAILURE", "gauge", "1 if memory rows could not be replaced.", lambda r: int(r.remap_failed)),
)  # fmt: skip
XID = Metric(
    "DCGM_FI_DEV_XID_ERRORS",
    "gauge",
    "Number of the newest Xid error in the kernel's log, as far as it may be read; 0 for none.",
    "kernel log",
    ("gpu",),
)


def gpu_samples(labels: Labels) -> list[Sample]:
    """Return the samples of this machine's GPUs; none if it has no GPUs, ``nvidia-ml-py`` is not installed, or
    NVML does not start.

    May hang where a driver does. Raises NVML's later errors.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")  # Optional: only machines with GPUs need it.
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
    """Return the samples of the GPUs' reports, labeled by NVML's index. Each has its newest Xid error of the log,
    else 0.
    """
    samples: list[Sample] = []
    for index, reading in enumerate(readings):
        own = labels | {"gpu": str(index)}
        newest = [error.number for error in errors if same_bus(error.bus, reading.bus)]
        samples += collect(GPU_METRICS, reading, own)
        samples.append(Sample(XID, own, newest[-1] if newest else 0))
    return samples
