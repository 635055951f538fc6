"""Devices of serving, and numerics with their id: two processes with equal ids of exact numerics give equal bits to equal weights and tokens.

*Exact* numerics are the kernels of ``phalanx.hardware.portable``: a token's bits depend on its request and the weights alone. Their id names the definition, the
format computed in, the storage format of keys and values, and the form of latent attention, and nothing of the machine.

*Fast* numerics are PyTorch's kernels and others that are faster. Their id names the machine, and promises nothing.

Exact numerics are computed by kernels for CPUs, so numerics are fast on a GPU.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from phalanx.hardware.local.device import answers, device_name, give_back_memory, make_current
from phalanx.hardware.portable.operations import begin, begun
from phalanx.run.rules import ARITHMETIC, NotPortableError
from phalanx.run.spec import RunSpec
from phalanx_serve.traffic import events

# Devices, and the engine errors for their failures.


def device_named(name: str, gpus: int, *, only_cpu: str = "", number: int = 0) -> torch.device:
    """Return the device for ``name`` on a machine with ``gpus`` GPUs: "cpu", "cuda", "cuda:1", or "auto" (a GPU if
    there is one).

    ``only_cpu`` is the reason why the computation needs the CPU, which "auto" then selects; empty if it does not. For
    several processes, "auto" and "cuda" assign GPUs round-robin by the process's ``number``. Raises ServeError for
    another name, a missing device, or one that cannot compute the request.
    """
    if name == "cpu" or (name == "auto" and (only_cpu or not gpus)):
        return torch.device("cpu")
    form = re.fullmatch(r"auto|cuda(?::(\d+))?", name)
    if form is None:
        raise events.ServeError(
            f"--device {name}: it is no device; write auto, cpu, cuda, or cuda:1 for one of several GPUs"
        )
    if only_cpu:
        raise events.ServeError(f"--device {name}: {only_cpu}")
    if not gpus:
        raise events.ServeError(f"--device {name}: PyTorch sees no GPU here; serve with --device cpu")
    place = form[1]
    if place and int(place) >= gpus:
        raise events.ServeError(
            f"--device {name}: there are {gpus} GPUs here, so the last is cuda:{gpus - 1}"
            if gpus > 1
            else f"--device {name}: there is one GPU here, cuda:0"
        )
    return torch.device("cuda", int(place) if place else number % gpus)


def shown_device(device: torch.device) -> str:
    """Return a device for people: "cuda:0 (NVIDIA H100 80GB HBM3)"."""
    name = device_name(device)
    return f"{device} ({name})" if name else "the CPU" if device.type == "cpu" else str(device)


def require_device(device: torch.device, *, exact: bool, divided: bool) -> None:
    """Raise ServeError if an engine cannot compute on ``device`` with exact numerics, or with a model ``divided``
    among processes.
    """
    if device.type == "cpu":
        return
    if exact:
        raise events.ServeError(f"the weights are on {device}: {events.NOT_EXACT}")
    if divided:
        raise events.ServeError(
            f"the weights are on {device}, and the processes of --pipeline and --tensor send each other what a CPU has computed: serve with "
            "--device cpu, or the whole model on one GPU"
        )


@contextmanager
def computing_on(device: torch.device, task: str) -> Iterator[None]:
    """Context for ``task`` on ``device``, which becomes the current one; nothing changes on a CPU.

    Raises DeviceMemoryError, after freeing cached memory, if the device is out of memory, and PartLostError if it no
    longer answers. Other errors pass.
    """
    if device.type == "cpu":
        yield
        return
    make_current(device)  # per thread, and another one may have loaded the weights
    try:
        yield
    except torch.OutOfMemoryError as error:
        give_back_memory(device)
        detail = str(error).splitlines()[0] if str(error) else "out of memory"
        raise events.DeviceMemoryError(
            f"{device} has no memory for {task} ({detail}): keep fewer keys and values there (serve --memory), compute fewer tokens in a pass "
            "(serve --rows), in bfloat16 (--dtype), or on the CPU (--device cpu)"
        ) from error
    except RuntimeError as error:
        if answers(device):
            raise
        raise events.PartLostError(
            f"{device} fails every operation ({error}): start the server again"
        ) from error


# Numerics.


Numerics = Literal["exact", "fast"]
_CPU = torch.device("cpu")


def begin_exact() -> None:
    """Switch this process to portable kernels, from now on. Raises NotExactError where they cannot compute."""
    try:
        begin()
    except NotPortableError as error:
        raise events.NotExactError(
            f"numerics cannot be exact: {error.reason}; or serve with --numerics fast"
        ) from error


def numerics_id(
    kind: str,
    dtype: torch.dtype,
    *,
    kept: str = "compute",
    absorbed: bool = False,
    device: torch.device = _CPU,
) -> str:
    """Return the id of numerics ``kind`` in ``dtype``, with keys and values ``kept`` in a format: words and a hash.

    Exact ones hash the version of the arithmetic, fast ones the machine, libraries and threads. ``absorbed`` is the
    form of latent attention that exact numerics keep to. Fast numerics choose it by the number of operations.
    """
    facts: dict[str, object] = {"kind": kind, "dtype": str(dtype)}
    if kept != "compute":
        facts["kept"] = kept
    if kind == "exact":
        facts["arithmetic"] = ARITHMETIC
        if absorbed:
            facts["latent"] = "absorbed"
    else:
        facts["machine"] = _machine(device)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    kind += "" if kept == "compute" else f"-{kept}"
    return f"{kind}-{str(dtype).removeprefix('torch.')}-{digest}"


def bits_of(numerics: Numerics, run: RunSpec, dtype: str, *, kept: str = "compute") -> events.Bits:
    """Return whose bits ``run`` gives as it is served in ``dtype`` ("float32", "bfloat16").

    "trainer", or "request" (those of the request alone) if dtype or KV format differ from training, or "unspecified"
    with fast numerics or a custom model.
    """
    from phalanx.train.score import other_arithmetic  # with what trains, which takes seconds to import

    if numerics == "fast" or run.model.factory:
        return "unspecified"
    other = other_arithmetic(run, "bf16" if dtype == "bfloat16" else "fp32")
    return "request" if other or kept != "compute" else "trainer"


def _machine(device: torch.device) -> list[str]:
    """Return what names the machine and the libraries that compute on ``device``: processor, torch, instruction set, threads, device."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    processor = next((line for line in lines if line.startswith("model name")), platform.machine())
    return [
        processor,
        str(torch.__version__),
        "portable" if begun() else torch.backends.cpu.get_cpu_capability(),
        str(torch.get_num_threads()),
        device.type,
        device_name(device) or "",
    ]
