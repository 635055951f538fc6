"""Numbers for what the host reads of kernels that have not run. Call ``pretend`` once, before the first step of a process.

A step reads its loss, token count, norm and expert counts, and stops if they are zero or not finite. So they are read as ones. A served step reads
which logits are finite, and its tokens: all are finite, and every token is number 1. What compares results of kernels with each other succeeds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.hardware.kernels import choose
from phalanx.hardware.local import device
from phalanx.parallel.reduction import reproducible_sums
from phalanx.train.measure import numerics
from phalanx.train.step.step import StepFlags, Stepper, StepReport
from phalanx_serve.engine import sampler

NO_FLAGS = StepFlags()
integers = 1
"""The number that the host reads in place of a zero integer, and of all integers of a list if it is more than 1: the rows of an expert."""


def pretend(*, fused: bool = True) -> None:
    """Let the host read ones from the device. ``fused`` = False leaves the Triton programs out, which PyTorch's dispatcher does not see."""
    # It needs Triton, and these tests are collected also without that.
    from phalanx_serve.kv_cache import decode_attention

    torch.backends.cuda.enable_cudnn_sdp(False)
    for name in ("item", "tolist"):
        setattr(Tensor, name, _answering(getattr(Tensor, name)))
    choose.differences = lambda *_, **__: [] if fused else ["updates"]
    reproducible_sums.matches_operations = lambda *_: fused
    decode_attention.differences = lambda *_: []
    numerics.require_equal = lambda *_: None
    sampler.fetched = _sampling(device.fetched)  # type: ignore[attr-defined,assignment]
    run = Stepper.run

    @functools.wraps(run)
    def run_with_own_flags(
        stepper: Stepper, number: int, flags: StepFlags = NO_FLAGS, **options: Any
    ) -> StepReport:
        return dataclasses.replace(run(stepper, number, flags, **options), flags=flags)

    Stepper.run = run_with_own_flags  # type: ignore[method-assign,assignment]


def _answering(read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    @functools.wraps(read)
    def answer(tensor: Tensor) -> Any:
        value = read(tensor)
        return _ones(value) if tensor.device.type == "cuda" else value

    return answer


def _sampling(fetched: Callable[[Tensor], NDArray[np.int64]]) -> Callable[[Tensor], NDArray[np.int64]]:
    """Return a ``fetched`` of results of a served step, (finite, token, bits of the log-probability), that are all ones."""
    return lambda results: np.ones_like(fetched(results))


def _ones(value: Any) -> Any:
    match value:
        case bool():
            return value
        case [int(), *_] if (
            integers > 1
        ):  # memory is not cleared: rows of experts may be any number that was there before
            return [integers] * len(value)
        case list():
            return [_ones(element) for element in value]
        case float():
            return value if 1e-30 < abs(value) < 1e30 else 1.0
        case _:
            return value if 0 < abs(value) < 1 << 40 else integers
