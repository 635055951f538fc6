"""PyTorch's team of threads, among which C kernels divide their work.

Kernels use the OpenMP runtime that PyTorch has loaded, which waits for its threads anyway; a second runtime would compete with it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

_LEAST_SHARE = 1 << 16
"""Elements of a matrix for which another thread is woken."""


class Team:
    """Entries of the OpenMP runtime that PyTorch uses; ``None`` (one thread) if it has another interface."""

    def __init__(self) -> None:
        entries = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
        runtime = _openmp()
        symbols = [getattr(runtime, name, None) for name in entries]
        usable: list[ctypes.c_void_p | None] = [
            ctypes.cast(symbol, ctypes.c_void_p) for symbol in symbols if symbol is not None
        ]
        if len(usable) < len(entries):
            usable = [None] * len(entries)
        self.parallel: ctypes.c_void_p | None = usable[0]
        self.barrier: ctypes.c_void_p | None = usable[1]
        self.number: ctypes.c_void_p | None = usable[2]
        self.members: ctypes.c_void_p | None = usable[3]

    def threads(self, elements: int) -> int:
        """Return the number of threads for a matrix of so many elements."""
        if self.parallel is None:
            return 1
        return min(torch.get_num_threads(), 1 + elements // _LEAST_SHARE)


def _openmp() -> ctypes.CDLL:
    """Return PyTorch's own library, through which the loader finds its OpenMP runtime; the whole process for a build without that file.

    Python loads PyTorch locally, so its runtime is among the global symbols only of builds that load it globally, as those for x86-64 do.
    """
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return ctypes.CDLL(None)
