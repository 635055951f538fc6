"""Memory that a training step frees and the next one needs again, on a CPU.

A step allocates and frees the same gigabytes of activations, logits and gradients again and again. The C library (glibc) gives large blocks back to the
system at once, which fills them with zeros before it gives them out anew, page by page: for a block of 64 MB that took eight times as long as writing it once.
A GPU's memory stays with PyTorch's allocator anyhow.
"""

from __future__ import annotations

import ctypes

import torch

from phalanx.hardware.local.device import on_gpu

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Parameters of mallopt(3)."""
_NEVER, _NONE, _PAD_BYTES = -1, 0, 64 << 20


def keep_freed_memory(device: torch.device) -> bool:
    """Has this process keep what it frees for its own later tensors, if it computes on a CPU; ``True`` if it will.

    It then never has less than at its peak. Not where the C library is another than glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if on_gpu(device) or mallopt is None:
        return False
    # No block of its own for a large tensor, nothing back from the end of the heap, and room for more at once.
    settings = ((_MMAP_MAX, _NONE), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _PAD_BYTES))
    done = [mallopt(parameter, value) == 1 for parameter, value in settings]
    return all(done)
