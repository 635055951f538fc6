"""The numerics id: two processes with equal ids give equal bits to equal weights and tokens; with unequal ids nothing is promised.

It is a hash of the format computed in, the training sequence that attention follows, and of what decides roundings on this machine
(``phalanx.serve.numerics.facts.machine``). How rows are padded, and which kernel computes few of them, is not in it: probes show that neither changes a bit.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal

import torch

from phalanx.serve.numerics.facts import accelerator, machine

Numerics = Literal["exact", "fast"]
_CPU = torch.device("cpu")
_RULES = 2
"""The version of the rules by which exact numerics follow the trainer."""


def numerics_id(
    kind: str,
    dtype: torch.dtype,
    sequence: int,
    *,
    tensor: int = 1,
    threads: int = 0,
    kept: str = "compute",
    absorbed: bool = False,
    device: torch.device = _CPU,
) -> str:
    """The id of numerics ``kind`` in this process, with ``threads`` (0: PyTorch's present number), for weights divided over ``tensor`` ranks,
    keys and values that are ``kept`` in a format, and latent attention that is ``absorbed`` where numerics are exact. Of another ``device``
    than the CPU, its kind is in it."""
    facts: dict[str, object] = {
        "rules": _RULES,
        "kind": kind,
        "dtype": str(dtype),
        "sequence": sequence,
        "tensor": tensor,
        "machine": machine(threads),
    }
    if kept != "compute":
        facts["kept"] = kept
    if device.type != "cpu":
        facts["device"] = accelerator(device)
    # Fast numerics choose the form by the number of operations.
    if absorbed and kind == "exact":
        facts["latent"] = "absorbed"
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    kind += "" if kept == "compute" else f"-{kept}"
    return f"{kind}-{str(dtype).removeprefix('torch.')}-{digest}"
