"""Numerics of serving, and their id: two processes with equal ids of exact numerics give equal bits to equal weights and tokens.

*Exact* numerics are the kernels of ``phalanx.hardware.portable``: a token's bits depend on its request and the weights alone. Their id names the definition, the
format computed in, the storage format of keys and values, and the form of latent attention, and nothing of the machine.

*Fast* numerics are PyTorch's kernels and others that are faster. Their id names the machine, and promises nothing.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Literal

import torch

from phalanx.hardware.local.device import device_name
from phalanx.hardware.portable.operations import begin, begun
from phalanx.run.rules.portable import ARITHMETIC, NotPortableError
from phalanx.run.spec import RunSpec
from phalanx.serve.engine.errors import NotExactError
from phalanx.traffic.events import Bits
from phalanx.train.score.arithmetic import other_arithmetic

Numerics = Literal["exact", "fast"]
_CPU = torch.device("cpu")


def begin_exact() -> None:
    """Have this process compute with portable kernels. Raises NotExactError where it cannot."""
    try:
        begin()
    except NotPortableError as error:
        raise NotExactError(
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
    """Return the id of numerics ``kind`` in ``dtype``, with keys and values ``kept`` in a format.

    ``absorbed`` is the form of latent attention that exact numerics keep to. Fast numerics choose it by the number of operations.
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


def bits_of(numerics: Numerics, run: RunSpec, dtype: str, *, kept: str = "compute") -> Bits:
    """Return the origin of the bits of ``run`` as it is served in ``dtype`` ("float32", "bfloat16")."""
    if numerics == "fast" or run.model.factory:
        return "unspecified"
    other = other_arithmetic(run, "bf16" if dtype == "bfloat16" else "fp32")
    return "request" if other or kept != "compute" else "trainer"


def _machine(device: torch.device) -> list[str]:
    """Return what names the machine and the libraries that compute on ``device``."""
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
