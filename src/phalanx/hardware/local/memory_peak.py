"""Measures the rate at which the device at hand moves memory: what operations that compute little are up against.

A copy reads and writes every byte once, as STREAM's does (McCalpin, 1995). The arrays are larger than the last caches, and not much larger: on a
GPU that a run has filled, more would not fit, or would make the allocator give up the blocks that the next step needs.
"""

from __future__ import annotations

import time

import torch

from phalanx.hardware.local.device import on_gpu, wait_for_device

_ROUNDS = 4


def measure_copy_bytes_per_s(device: torch.device) -> float:
    """The best rate, in bytes read and written a second, at which this process copies memory of ``device``; a few milliseconds."""
    size = (256 << 20) if on_gpu(device) else (32 << 20)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(_ROUNDS):
        wait_for_device(device)
        begin_s = time.perf_counter()
        target.copy_(source)
        wait_for_device(device)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return 2 * size / best_s
