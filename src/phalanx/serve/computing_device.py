"""Where an engine computes: which devices it can have, and what becomes of their errors.

Exact numerics are computed by kernels for CPUs (``phalanx.hardware.portable``), so numerics are fast on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from phalanx.hardware.local.device import answers, device_name, give_back_memory, make_current
from phalanx.serve.engine.errors import NOT_EXACT, DeviceMemoryError, EngineError, PartLostError


def device_named(name: str, gpus: int, *, only_cpu: str = "", number: int = 0) -> torch.device:
    """The device that ``name`` means on a machine with so many ``gpus``: "cpu", "cuda", "cuda:1", or "auto" (a GPU if there is one).

    ``only_cpu`` says what cannot be computed elsewhere, so that "auto" is the CPU; empty if nothing. Of several processes, "auto" and "cuda" deal the GPUs
    round by the process's ``number``. Raises EngineError for a device that is not there, or that cannot compute what is asked for.
    """
    if name == "cpu" or (name == "auto" and (only_cpu or not gpus)):
        return torch.device("cpu")
    if only_cpu:
        raise EngineError(f"--device {name}: {only_cpu}")
    if not gpus:
        raise EngineError(f"--device {name}: PyTorch sees no GPU here; serve with --device cpu")
    _, _, place = name.partition(":")
    if place and int(place) >= gpus:
        raise EngineError(
            f"--device {name}: there are {gpus} GPUs here, so the last is cuda:{gpus - 1}"
            if gpus > 1
            else f"--device {name}: there is one GPU here, cuda:0"
        )
    return torch.device("cuda", int(place) if place else number % gpus)


def shown_device(device: torch.device) -> str:
    """A device for people: "cuda:0 (NVIDIA H100 80GB HBM3)"."""
    name = device_name(device)
    return f"{device} ({name})" if name else "the CPU" if device.type == "cpu" else str(device)


def require_device(device: torch.device, *, exact: bool, divided: bool) -> None:
    """Raises EngineError for a ``device`` on which an engine cannot compute so: with exact numerics, or a model ``divided`` among processes."""
    if device.type == "cpu":
        return
    if exact:
        raise EngineError(f"the weights are on {device}: {NOT_EXACT}")
    if divided:
        raise EngineError(
            f"the weights are on {device}, and the processes of --pipeline and --tensor send each other what a CPU has computed: serve with "
            "--device cpu, or the whole model on one GPU"
        )


@contextmanager
def computing_on(device: torch.device, what: str) -> Iterator[None]:
    """Computes ``what`` on ``device``. Raises DeviceMemoryError if it has no memory for that, and PartLostError if it answers no more."""
    if device.type == "cpu":
        yield
        return
    make_current(device)  # of this thread, which may be another than that which has loaded the weights
    try:
        yield
    except torch.OutOfMemoryError as error:
        give_back_memory(device)
        said = str(error).splitlines()[0] if str(error) else "out of memory"
        raise DeviceMemoryError(
            f"{device} has no memory for {what} ({said}): keep fewer keys and values there (serve --memory), compute fewer tokens in a pass "
            "(serve --rows), in bfloat16 (--dtype), or on the CPU (--device cpu)"
        ) from error
    except RuntimeError as error:
        if answers(device):
            raise
        raise PartLostError(
            f"{device} answers with an error to whatever is asked ({error}): start the server again"
        ) from error
