"""Orders to the device that a rank computes on, and questions to it: the same calls for a CPU and for a GPU.

On a CPU everything has happened when a call returns, so most of this does nothing there. A GPU has a queue (a stream) that the
host runs ahead of, a current device for each thread of the host, and an allocator that keeps what is freed.
"""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

_GPU = "cuda"
"""PyTorch's name for GPUs, AMD's too."""


def on_gpu(device: torch.device) -> bool:
    """True if work on ``device`` is queued there and runs on while the host goes on."""
    return device.type == _GPU


def gpus() -> int:
    """Number of GPUs that PyTorch sees on this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_of_rank(local_rank: int) -> torch.device:
    """The device of the process of this number on this machine: a GPU of its own, where there are GPUs."""
    return torch.device(_GPU, local_rank) if gpus() else torch.device("cpu")


def current_gpu() -> torch.device:
    """The GPU that is the current one of this thread."""
    return torch.device(_GPU, torch.cuda.current_device())


def make_current(device: torch.device) -> None:
    """Makes a GPU the current one of this thread.

    Whatever is made without a device is then made there: FSDP's buffers and streams, NCCL's communicators, and the first
    context of the process, which would else take memory of the machine's first GPU as well.
    """
    if on_gpu(device):
        torch.cuda.set_device(device)


def wait_for_device(device: torch.device) -> None:
    """Waits until everything queued on ``device``, on any stream, is done. Raises what went wrong there."""
    if on_gpu(device):
        torch.cuda.synchronize(device)


def wait_for_stream(device: torch.device) -> None:
    """Waits until everything queued on the current stream of ``device`` is done."""
    if on_gpu(device):
        torch.cuda.current_stream(device).synchronize()


def answers(device: torch.device) -> bool:
    """True if ``device`` can still compute.

    After an illegal access, an uncorrectable memory error and the like, a process gets the same error from every later call to
    its GPU; only a new process helps.
    """
    try:
        wait_for_device(device)
    except RuntimeError:
        return False
    return True


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory that this process's tensors have taken on a GPU; ``None`` on a CPU."""
    return torch.cuda.max_memory_allocated(device) if on_gpu(device) else None


def forget_peak_memory(device: torch.device) -> None:
    """Lets ``peak_memory_bytes`` begin anew with what a GPU's tensors take now."""
    if on_gpu(device):
        torch.cuda.reset_peak_memory_stats(device)


def held_memory_bytes(device: torch.device) -> int:
    """The memory that this process has: on a GPU the most that its tensors have taken so far, on a CPU what is resident now."""
    on_device = peak_memory_bytes(device)
    if on_device is not None:
        return on_device
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return most_memory_bytes(device)


def most_memory_bytes(device: torch.device) -> int:
    """The most memory that this process has had so far: on a GPU that of its tensors, on a CPU what was resident."""
    on_device = peak_memory_bytes(device)
    if on_device is not None:
        return on_device
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def temperature_c(device: torch.device) -> float | None:
    """The temperature of a GPU; ``None`` of a CPU, and where NVML is missing (package ``nvidia-ml-py``, optional) or does not know it."""
    if not on_gpu(device):
        return None
    try:
        return float(torch.cuda.temperature(device))
    except (
        Exception
    ):  # pynvml's errors have names only where it is installed; and no trouble with it is worth a step
        return None


def device_name(device: torch.device) -> str | None:
    """The name of a GPU as its driver gives it; ``None`` for a CPU."""
    return torch.cuda.get_device_name(device) if on_gpu(device) else None


def give_back_memory(device: torch.device) -> None:
    """Gives memory that PyTorch keeps for later tensors back to the driver, for NCCL and other processes to take."""
    if on_gpu(device):
        torch.cuda.empty_cache()


def brought(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on ``device``; on a CPU, ``tensor`` itself.

    By way of page-locked memory: a copy to a GPU from any other memory keeps the host until all that was queued before it is done.
    PyTorch keeps such memory for the next time, and does not give it out again before the copy is done. A tensor with gaps between its
    elements would be page-locked with them, and then copied by way of ordinary memory after all (ATen's ``copy_requires_temporaries``).
    """
    if not on_gpu(device):
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def fetched(tensor: Tensor) -> NDArray[Any]:
    """The numbers of a small tensor of a device in the host's memory, which waits for all that was queued before."""
    return tensor.cpu().numpy()
