"""A rank's state compared with its machine's memory before it is allocated, and PyTorch's allocation errors as errors for the user.

Linux grants more memory than there is and kills the process that uses it, so an allocation that cannot succeed is best refused before it.
"""

from __future__ import annotations

import torch

from phalanx.model.facts.holdings import holding, place_of, state_bytes
from phalanx.run.layout import Layout
from phalanx.run.spec import RunSpec
from phalanx.train.lifecycle.ending import RunFailedError

_HELD_TOGETHER = ("weights", "gradients", "moments")
_REMEDY = (
    "make the model smaller ([model]), divide it among more machines (phalanx plan layout), use a larger machine, "
    "or raise its limits (ulimit -v, ulimit -u, those of a container)"
)


class MemoryShortError(RunFailedError):
    """This machine has too little memory for a rank of the run."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}: {_REMEDY}", _REMEDY)


def require_memory(spec: RunSpec, layout: Layout, rank: int, memory_bytes: float) -> None:
    """Raise MemoryShortError if weights, gradients and optimizer state of ``rank`` exceed ``memory_bytes``. A user's own model is not counted."""
    if spec.model.factory:
        return
    sizes = state_bytes(spec, layout, holding(spec, layout, place_of(layout, rank)), compute_bytes=4)
    needed = sum(sizes.get(kind, 0) for kind in _HELD_TOGETHER)
    if needed > memory_bytes:
        raise MemoryShortError(
            f"weights, gradients and optimizer state of rank {rank} take {needed / 2**30:,.1f} GiB, and this machine has "
            f"{memory_bytes / 2**30:,.1f} GiB of memory"
        )


def shortage_of(error: BaseException) -> MemoryShortError | None:
    """Return the error for the user if ``error`` is a failed allocation on host or GPU, or a thread that the kernel refused, else None."""
    text = str(error).partition("\n")[0]
    # matched text: PyTorch has no type for a failed allocation on a CPU
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in text:
        return MemoryShortError(f"an allocation of memory failed ({text or type(error).__name__})")
    # matched text: Python has no type for a thread that cannot be started, which needs memory for its stack
    if isinstance(error, RuntimeError) and text == "can't start new thread":
        return MemoryShortError(
            "no thread could be started: the memory, or the number of processes, that this rank may have is used up"
        )
    return None
