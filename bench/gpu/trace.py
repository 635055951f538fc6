"""Time of a step on a GPU: kernels by class, and idle gaps by the host's operation at that time.

``profiled`` measures; ``summary`` is a function of the events of PyTorch's profiler (Chrome's trace format, times in microseconds).
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu.setting import Report, attempt, sizes_for, speed_run
from bench.gpu.speed import ours
from bench.train.step import Step
from phalanx.hardware.local.device import on_gpu, wait_for_device

Event = Mapping[str, Any]
GAP_US = 20.0
"""Shorter gaps are the time between two kernels of one launch queue."""
CLASSES = (
    ("communication", ("nccl",)),
    ("attention", ("flash", "fmha", "attention", "cudnn")),
    ("grouped product", ("grouped",)),
    ("matrix product", ("gemm", "nvjet", "cutlass", "cublas", "xmma")),
    ("compiled pointwise", ("triton",)),
    (
        "optimizer and norm",
        (
            "multi_tensor",
            "foreach",
            "minmax",
            "double",
            "aminmax",
            "_adamw_program",
            "_peak_program",
            "_extract_program",
        ),
    ),
    ("loss", ("softmax", "nll", "logsumexp")),
    ("copy", ("memcpy", "memset", "copy", "cat", "fill")),
    ("sort and index", ("sort", "scan", "index", "gather", "scatter", "searchsorted")),
    ("reduction", ("reduce", "layer_norm", "gammabeta", "_add_program")),
    ("other pointwise", ("elementwise",)),
)
"""Classes of kernels, and words in their names, the first that fits."""


def trace(device: torch.device, report: Report, presets: tuple[str, ...]) -> None:
    """Profile some steps of the first model."""
    sizes, ranks, steps = sizes_for(device), dist.get_world_size(), 3
    preset = (presets or sizes.presets)[0]
    spec = speed_run(preset, sizes, device, ranks)
    for name, value in (("preset", preset), ("ranks", ranks), ("steps", steps)):
        report(name, value)

    def find() -> dict[str, Any]:
        step = ours(spec, device)
        for _ in range(3):
            step()
        return summary(profiled(step, device, steps))

    attempt(report, "profile", device, find)


def profiled(step: Step, device: torch.device, steps: int) -> list[Event]:
    """Return the profiler's events of some steps."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu(device):
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    wait_for_device(device)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        wait_for_device(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return events


def summary(events: Iterable[Event]) -> dict[str, Any]:
    """Return busy and idle time of the GPU between its first and its last kernel, kernels by class, and gaps by host call."""
    timed = [event for event in events if event.get("ph") == "X"]
    work = sorted(
        (event for event in timed if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")),
        key=lambda event: float(event["ts"]),
    )
    if not work:
        return {"kernels": 0}
    by_class: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in work:
        for table, key in ((by_class, kernel_class(event["name"])), (by_name, event["name"][:100])):
            table[key][0] += float(event["dur"])
            table[key][1] += 1
    gaps = _gaps(work)
    begin = float(work[0]["ts"])
    span = max(float(event["ts"]) + float(event["dur"]) for event in work) - begin
    idle = sum(length for length, _ in gaps)
    return {
        "kernels": len(work),
        "span_ms": span / 1e3,
        "busy": 1 - idle / span,
        "idle_in_long_gaps": sum(length for length, _ in gaps if length > GAP_US) / span,
        "classes": _largest(by_class, span, 20),
        "kernels_by_name": _largest(by_name, span, 25),
        "gaps": _largest(_by_host_call(gaps, timed), span, 15),
    }


def kernel_class(name: str) -> str:
    """Return the class of a kernel by its name."""
    low = name.lower()
    return next((label for label, words in CLASSES if any(word in low for word in words)), "other")


def _gaps(work: Sequence[Event]) -> list[tuple[float, Event]]:
    """Return the times (us) in which no kernel ran, each with the kernel that ended it."""
    gaps, end = [], float(work[0]["ts"])
    for event in work:
        if float(event["ts"]) > end:
            gaps.append((float(event["ts"]) - end, event))
        end = max(end, float(event["ts"]) + float(event["dur"]))
    return gaps


def _by_host_call(gaps: Sequence[tuple[float, Event]], timed: Sequence[Event]) -> dict[str, list[float]]:
    """Sum long gaps by the operation from which the kernel that ended them was launched."""
    launches = {
        event["args"]["correlation"]: event
        for event in timed
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    operations: dict[object, list[Event]] = defaultdict(list)
    for event in sorted(timed, key=lambda event: float(event["ts"])):
        if event.get("cat") in ("cpu_op", "user_annotation"):
            operations[event.get("tid")].append(event)
    starts = {thread: [float(event["ts"]) for event in calls] for thread, calls in operations.items()}
    table: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for length, kernel in gaps:
        if length <= GAP_US:
            continue
        launch = launches.get(kernel.get("args", {}).get("correlation"))
        name = "unknown" if launch is None else _around(launch, operations, starts)
        table[name][0] += length
        table[name][1] += 1
    return table


def _around(
    launch: Event, operations: Mapping[object, list[Event]], starts: Mapping[object, list[float]]
) -> str:
    """Return the innermost operation of the same thread during which ``launch`` was made."""
    thread, at = launch.get("tid"), float(launch["ts"])
    calls = operations.get(thread, [])
    for event in reversed(calls[: bisect_right(starts.get(thread, []), at)]):
        if float(event["ts"]) + float(event["dur"]) >= at:
            return str(event["name"])[:100]
    return str(launch["name"])


def _largest(table: Mapping[str, Sequence[float]], span: float, most: int) -> dict[str, dict[str, float]]:
    rows = sorted(table.items(), key=lambda row: -row[1][0])[:most]
    return {name: {"ms": us / 1e3, "of_span": us / span, "count": times} for name, (us, times) in rows}
