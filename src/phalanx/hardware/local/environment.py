"""Environment variables that CUDA, cuBLAS and NCCL read once, when a process first uses them; none of them touches a CPU.

``set_for_rank`` is for the main function of every process that may hold a rank, before anything starts CUDA. What the user has set
stays.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

RANK = {
    # Without it, cuBLAS may pick another algorithm from one run to the next, by the memory that it finds free.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Mixtures of experts allocate other sizes at each step; fixed segments would be cut into pieces that fit nothing.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # A pipeline's receives wait on streams of their own. With the default of 8 hardware queues, a kernel could be queued behind
    # a receive that waits for what this kernel is to send.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
"""For every rank."""

SURVIVING_RANK = {
    # PyTorch's watchdog would end the process at the first error or timeout of a peer. A fleet's worker survives that: its agent
    # has it abort the communicators (``phalanx.parallel.process_group.abort``).
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # The monitor would end the process when the watchdog hangs, as it may while communicators are aborted.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # The agent asks for the flight record; written at a timeout too, it would only delay the abort.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""For a rank that outlives its process groups, besides."""

_OLD_NAMES = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}


def set_for_rank(environ: MutableMapping[str, str] = os.environ, *, survives: bool = False) -> None:
    """Sets what this process's CUDA libraries are to read, where ``environ`` does not say it yet.

    With ``survives``, for a process that goes on when its process groups break.
    """
    for name, value in (RANK | (SURVIVING_RANK if survives else {})).items():
        if _OLD_NAMES.get(name, name) not in environ:
            environ.setdefault(name, value)
