"""Steps of a run on the null GPU, and the places in Phalanx where the host waits for the device."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from bench.train.step import build_stepper
from null_gpu import answers, counters
from phalanx.hardware.local.device import give_back_memory
from phalanx.parallel.process_group.rendezvous import leave
from phalanx.run.spec import RunSpec
from phalanx.train.assemble import make_deterministic
from phalanx.train.step.step import Stepper

CUDA = torch.device("cuda", 0)
_OWN = "/src/phalanx/"


@contextmanager
def stepper_of(spec: RunSpec, ranks: int = 1) -> Iterator[tuple[Stepper, Callable[[], None]]]:
    """Build rank 0 of ``ranks``, the others of which NCCL imagines; yield its stepper and a function that runs the next step."""
    answers.integers = _even_load(spec)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.cuda.set_device(CUDA)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=ranks)  # type: ignore[attr-defined]
    try:
        make_deterministic(spec, CUDA)
        yield build_stepper(spec, CUDA)
    finally:
        leave()
        gc.collect()
        give_back_memory(CUDA)


def _even_load(spec: RunSpec) -> int:
    """Return the rows of each expert of a rank in one product, if every expert is chosen as often.

    Experts on several ranks must be as many as the square of the ranks: then a rank also sends each other one as many rows.
    """
    moe, ranks = spec.model.moe, spec.parallel.expert
    if moe is None:
        return 1
    assert ranks == 1 or moe.experts == ranks**2
    tokens = spec.train.seq_len // (spec.parallel.context * spec.parallel.tensor)
    return tokens * moe.per_token // moe.experts * ranks


def kernels_of_a_step(spec: RunSpec, ranks: int = 1) -> Counter[str]:
    """Return the kernels of the second step by name, and their numbers."""
    with stepper_of(spec, ranks) as (_, step):
        step()
        counters.reset()
        step()
        return counters.kernels()


@contextmanager
def waits(places: Counter[str]) -> Iterator[None]:
    """Count the waits of the host for the device inside, by the function of Phalanx that waits."""
    shown = warnings.showwarning

    def count(message: Warning | str, *_: object) -> None:
        if "called a synchronizing" in str(message):
            places[_place(sys._getframe())] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = shown


def _place(frame: FrameType | None) -> str:
    """Return the innermost function of Phalanx that is not a helper for devices: ``train/step/step.py Stepper.run``."""
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if _OWN in path and "hardware/local/device.py" not in path and not name.endswith("_wait_for_device"):
            return f"{path.partition(_OWN)[2]} {name}"
        frame = frame.f_back
    return "elsewhere"
