"""Chooses the kernels for a device: those that read memory once, where they can be had and have shown that they give the right bits."""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from phalanx.hardware.kernels.host import HostKernels
from phalanx.hardware.kernels.reference import REFERENCE, Kernels, UpdateFactors
from phalanx.hardware.local.device import on_gpu

_log = logging.getLogger(__name__)
_SIZE = 4099
"""Elements of the check: more than a GPU's block, with a tail in whatever vectors a processor has."""


def kernels_for(device: torch.device, tensors: Iterable[Tensor]) -> Kernels:
    """The fastest kernels that take ``tensors``, all of them on ``device``."""
    if all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors):
        return fused_kernels(device)
    return REFERENCE


@functools.cache
def fused_kernels(device: torch.device) -> Kernels:
    """The kernels of one pass, checked once in a process; the reference, with a warning, where there are none."""
    found: list[str] = []
    for make in _ways(device):
        try:
            kernels = make()
            differing = differences(kernels, device)
        except Exception as error:  # a compiler that fails in whatever way is as good as none
            found.append(f"{type(error).__name__}: {error}")
            continue
        if not differing:
            return kernels
        found.append(f"{' and '.join(differing)} had other bits than PyTorch's operations")
    if found:
        _log.warning(
            "on %s, the optimizer and the gradient's norm go over memory several times instead of once, with the same bits: %s",
            device,
            "; ".join(found),
        )
    return REFERENCE


def _ways(device: torch.device) -> list[Callable[[], Kernels]]:
    if device.type == "cpu":
        return [functools.partial(HostKernels, mkl_roots=mkl) for mkl in (True, False)]
    if on_gpu(device) and importlib.util.find_spec("triton") is not None:
        from phalanx.hardware.kernels.gpu import GpuKernels

        return [GpuKernels]
    return []


def differences(kernels: Kernels, device: torch.device, reference: Kernels = REFERENCE) -> list[str]:
    """The results in which ``kernels`` differ from ``reference`` on numbers of all sizes, down to those below the normal ones."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: float, high: float) -> Tensor:
        sizes = torch.empty(_SIZE, dtype=torch.float64).uniform_(low, high, generator=generator).exp2()
        signs = torch.randint(0, 2, (_SIZE,), generator=generator) * 2 - 1
        return (sizes * signs).float().to(device)

    weights, grads, means, squares = draw(-60, 10), draw(-100, 10), draw(-140, 10), draw(-148, 20).abs()
    factors = UpdateFactors(0.37, 0.9, 1 - 0.9, 0.95, 1 - 0.95, math.sqrt(1 - 0.95**3), 1e-8, 1e-3, 0.9999)
    updated, summed = [], []
    for one in (reference, kernels):
        held = [tensor.clone() for tensor in (weights, grads, means, squares)]
        one.adamw([held[0]], [held[1]], [held[2]], [held[3]], factors)
        updated.append(torch.cat(held))
        constants = (1.5 * 2.0**34, 1.5 * 2.0**-4)  # squares up to 2^20, fewer than 2^13 of them
        sums = one.extracted_sums([grads], constants, device)
        summed.append(torch.cat((one.peak([grads], device).view(1), sums)))
    return [
        name
        for name, (expected, found) in (("updates", updated), ("sums", summed))
        if not torch.equal(expected, found)
    ]
