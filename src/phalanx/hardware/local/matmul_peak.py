"""Measures the matrix-multiply peak of the device at hand.

A peak from a data sheet says what the silicon could do; a peak that was measured with the same library, format and
thread count says what a training step is up against. MFU on a CPU is stated against the latter.
"""

from __future__ import annotations

import time

import torch

from phalanx.hardware.local.device import wait_for_device

_BUDGET_S = 0.4
_FIRST_CPU_SIZE, _CPU_SIZE = 256, 2048


def measure_matmul_flops(device: torch.device, dtype: torch.dtype, budget_s: float = _BUDGET_S) -> float:
    """The best rate, in FLOP/s, at which this process multiplies two square matrices of ``dtype`` on ``device``.

    8,192 rows and columns on a GPU, on a CPU up to 2,048: sizes grow for as long as a product takes less than an eighth of ``budget_s``, so that
    few threads, which reach their plateau with small matrices, measure small ones, and a CPU without kernels for ``dtype`` (bf16 on processors
    with AVX2 alone: 1 GFLOP/s) does not take minutes. The best of as many rounds as fit into the budget (two at least, after one to
    warm up), because noise only ever slows down.
    """
    size = _FIRST_CPU_SIZE if device.type == "cpu" else 8192
    best = _best_s(device, dtype, size, 0.0)
    while device.type == "cpu" and size < _CPU_SIZE and 8 * best < budget_s:
        size *= 2
        best = _best_s(device, dtype, size, 0.0)
    if 2 * best < budget_s:  # else the two rounds have taken all of it
        best = min(best, _best_s(device, dtype, size, budget_s))
    return 2 * size**3 / best


def _best_s(device: torch.device, dtype: torch.dtype, size: int, budget_s: float) -> float:
    """The shortest time of a product of two matrices ``(size, size)``, in s."""
    # Random numbers, as a training step has: a GPU at its power limit multiplies constants more than a tenth faster.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    out = torch.mm(left, right)
    best, spent, rounds = float("inf"), 0.0, 0
    while spent < budget_s or rounds < 2:
        wait_for_device(device)
        begin = time.perf_counter()
        torch.mm(left, right, out=out)
        wait_for_device(device)
        elapsed = time.perf_counter() - begin
        best, spent, rounds = min(best, elapsed), spent + elapsed, rounds + 1
    return best
