"""Measures this machine for the planner: operations, collectives, copies, and steps of the trainer itself.

A plan is as good as the figures of its machine, and a data sheet has few of them. Here every kind of work that the planner's
formulas have a constant for is timed over a range of sizes. The result is plain points, (sizes, seconds) by the name of the
work; ``phalanx_plan.fit_profile`` fits constants to them and judges the fit.

Noise only slows down, so the least of several rounds is taken. On a machine with other users, wall-clock time includes their
work; the processor time of a rank does not, and it misses only the waiting for peers, which is short on one machine.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.hardware.local.device import on_gpu, wait_for_device

Clock = Literal["wall", "cpu"]
MeasuredPoints = dict[str, list[tuple[tuple[float, ...], float]]]
"""Measurements (sizes, seconds) by the name of the work."""

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SMALL = (256, 704, 1024)
_LARGE = (256, 512, 1024, 2048, 4096)
_MOST_FLOP = {"cpu": 2e10, "cuda": 2e13}
_COLD_BYTES = {"cpu": 2**27, "cuda": 2**30}
_GPU_SCALE = 4
"""The factor by which matrices are larger on an accelerator."""


@dataclass(frozen=True)
class Settings:
    """The device to measure, the clock, and the effort."""

    device: torch.device
    clock: Clock
    quick: bool = False
    """A quarter of the points, and fewer rounds."""

    @property
    def budget_s(self) -> float:
        """Seconds for one point, by ``clock``."""
        return 0.05 if self.quick else 0.2


def usual_clock(device: torch.device) -> Clock:
    """Processor time on a CPU whose cores are busy; else wall-clock time."""
    busy = os.getloadavg()[0] > 0.75 * (os.cpu_count() or 1)
    return "cpu" if device.type == "cpu" and busy else "wall"


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory_bytes() -> float:
    """The memory of this machine, or the limit of the container that this process is in."""
    whole = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(whole, float(text)) if text.isdigit() else whole


def best_seconds(work: Callable[[], object], settings: Settings) -> float:
    """The least time of ``work`` over as many rounds as fit the budget, two at least, after one to warm up."""
    read = time.process_time if settings.clock == "cpu" else time.perf_counter
    work()
    best, spent, rounds = float("inf"), 0.0, 0
    while spent < settings.budget_s or rounds < 2:
        wait_for_device(settings.device)
        begin = read()
        work()
        wait_for_device(settings.device)
        took = max(read() - begin, 1e-9)
        best, spent, rounds = min(best, took), spent + took, rounds + 1
    return best


def operations(settings: Settings) -> MeasuredPoints:
    """Matrix products, attention, what only moves memory, copies from the host, and the disk."""
    torch.set_num_threads(1)
    points: MeasuredPoints = {}
    for name in ("fp32",) if settings.device.type == "cpu" else ("bf16", "fp32"):
        points[f"matmul.{name}"] = list(_products(settings, _FORMATS[name]))
    points |= _attention(settings)
    points["memory"] = list(_pointwise(settings))
    points["host_copy"] = [_host_copy(settings)]
    points["disk"] = [_disk(settings)]
    return points


def product_sizes(settings: Settings) -> Iterator[tuple[int, int, int]]:
    """(m, n, k) of the products that are timed: rows as of micro-batches, weights of several widths."""
    scale = 1 if settings.device.type == "cpu" else _GPU_SCALE
    sizes = [
        (m * scale, n * scale, k * scale)
        for m in _LARGE
        for n in (*_SMALL, 4096)
        for k in (*_SMALL, 4096)
        if 2 * m * n * k * scale**3 <= _MOST_FLOP[settings.device.type]
    ]
    yield from sizes[:: 5 if settings.quick else 1]


def _products(settings: Settings, dtype: torch.dtype) -> Iterator[tuple[tuple[float, ...], float]]:
    for number, (m, n, k) in enumerate(product_sizes(settings)):
        seconds = best_seconds(_product(number % 3, m, n, k, settings.device, dtype), settings)
        yield (m, n, k), seconds


def _product(
    way: int, m: int, n: int, k: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], Tensor]:
    """A product with operands stored as in forward (``way`` 0), the input's gradient (1) or the weight's gradient (2)."""
    left = torch.randn((k, m) if way == 2 else (m, k), device=device).to(dtype)
    right = torch.randn((n, k) if way == 0 else (k, n), device=device).to(dtype)
    left, right = (left.t() if way == 2 else left), (right.t() if way == 0 else right)
    return lambda: left @ right


def _attention(settings: Settings) -> MeasuredPoints:
    dtype = torch.float32 if settings.device.type == "cpu" else torch.bfloat16
    scale = 1 if settings.device.type == "cpu" else _GPU_SCALE
    points: MeasuredPoints = {"attention.forward": [], "attention.backward": []}
    for batch, heads, length, width in [(1, 4, 256, 64), (2, 8, 512, 64), (1, 8, 1024, 64)][
        : 2 if settings.quick else 3
    ]:
        size = (batch, heads, length * scale, width)
        leaves = [
            torch.randn(size, device=settings.device, dtype=dtype, requires_grad=True) for _ in range(3)
        ]
        forward_s = best_seconds(_attend(leaves), settings)
        both_s = best_seconds(_attend_and_back(leaves), settings)
        # Half of the square: what a causal mask needs.
        flops = 2.0 * batch * heads * (length * scale) ** 2 * width
        points["attention.forward"].append(((flops,), forward_s))
        points["attention.backward"].append(((2.5 * flops,), max(both_s - forward_s, 0.1 * forward_s)))
    return points


def _attend(leaves: Sequence[Tensor]) -> Callable[[], Tensor]:
    query, key, value = leaves
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _attend_and_back(leaves: Sequence[Tensor]) -> Callable[[], None]:
    forward = _attend(leaves)
    upstream = torch.ones_like(leaves[0])

    def work() -> None:
        torch.autograd.grad(forward(), list(leaves), upstream)

    return work


def _pointwise(settings: Settings) -> Iterator[tuple[tuple[float, ...], float]]:
    largest = 24 if settings.device.type == "cpu" else 28
    for power in range(12, largest, 4 if settings.quick else 2):
        yield (12.0 * 2**power,), best_seconds(_add(2**power, settings.device), settings)


def _add(elements: int, device: torch.device) -> Callable[[], Tensor]:
    """Sums of arrays that no cache holds any more, into new memory each time: as a model's layers find theirs."""
    pairs = max(1, _COLD_BYTES[device.type] // (8 * elements))
    left = torch.ones(pairs, elements, device=device)
    right, turn = torch.ones_like(left), itertools.cycle(range(pairs))

    def work() -> Tensor:
        place = next(turn)
        return left[place] + right[place]

    return work


def _host_copy(settings: Settings) -> tuple[tuple[float, ...], float]:
    source = torch.ones(2**24, pin_memory=on_gpu(settings.device))
    target = torch.empty(2**24, device=settings.device)
    return (4.0 * 2**24,), best_seconds(lambda: target.copy_(source), settings)


def _disk(settings: Settings) -> tuple[tuple[float, ...], float]:
    """A file written and made durable, on the wall's clock: nobody computes meanwhile."""
    block = b"\0" * 2**24
    blocks = 1 if settings.quick else 8
    with tempfile.TemporaryFile(dir=Path.cwd()) as file:
        begin = time.perf_counter()
        for _ in range(blocks):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        took = time.perf_counter() - begin
    return (float(len(block) * blocks),), took
