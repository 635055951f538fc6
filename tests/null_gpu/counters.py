"""Counters of the null GPU (``nullgpu.c``) in this process: launches, copies, kernels by name, communicators.

The null GPU takes the place of the CUDA runtime, the driver, cuBLAS, cuSOLVER and NCCL under PyTorch's CUDA build. ``with.sh`` preloads it.
Kernels are counted and do nothing. Copies up to 1 MiB are made. The dispatcher, autograd, FSDP, ProcessGroupNCCL, the allocator, streams and
the compiler are the real ones.
"""

from __future__ import annotations

import ctypes
import functools
import re
import tempfile
from collections import Counter

_LIBRARY = ctypes.CDLL(None)

ON_DEVICE = (
    *("launch", "gemm", "triton", "d2d", "memset"),
    *("h2d_pinned", "h2d_pageable", "d2h_pinned", "d2h_pageable"),
)
"""Counters of work that a GPU would have run."""


def is_present() -> bool:
    """Return True if the null GPU is preloaded in this process."""
    return hasattr(_LIBRARY, "nullgpu_count")


def reset() -> None:
    """Set all counters to zero, except those of communicators."""
    _LIBRARY.nullgpu_reset()


def counts() -> Counter[str]:
    """Return the number of calls by kind: ``launch``, ``gemm``, ``triton``, ``h2d_pageable``, ``stream_sync`` and others."""
    _LIBRARY.nullgpu_name.restype = ctypes.c_char_p
    _LIBRARY.nullgpu_count.restype = ctypes.c_int64
    numbers: Counter[str] = Counter()
    while (name := _LIBRARY.nullgpu_name(len(numbers))) is not None:
        numbers[name.decode()] = _LIBRARY.nullgpu_count(len(numbers))
    return numbers


def on_device() -> int:
    """Return the number of kernels, products and copies since the last reset."""
    numbers = counts()
    return sum(numbers[name] for name in ON_DEVICE)


def kernels() -> Counter[str]:
    """Return launches by kernel name, and products by shape: ``lt 512x256x512 b1 t14``."""
    numbers: Counter[str] = Counter()
    with tempfile.NamedTemporaryFile("r") as file:
        _LIBRARY.nullgpu_dump(file.name.encode())
        for line in file:
            kind, count, name = line.rstrip("\n").split("\t")
            numbers[_demangled(name) if kind == "K" else name] += int(count)
    return numbers


@functools.cache
def _demangled(name: str) -> str:
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_void_p
    text = demangle(name.encode(), None, None, None)
    if not text:
        return name
    readable = ctypes.string_at(text).decode()
    _LIBRARY.free(ctypes.c_void_p(text))
    return re.sub(r"\(anonymous namespace\)::", "", readable)


def hang() -> None:
    """Make every later wait of the host block, as in a collective of a lost peer, until a communicator is aborted."""
    _LIBRARY.nullgpu_hang(1)


def is_hanging() -> bool:
    """Return True after ``hang`` while no communicator has been aborted."""
    return bool(_LIBRARY.nullgpu_hangs())


def communicators() -> tuple[int, int]:
    """Return the numbers of NCCL communicators that this process has made and aborted."""
    _LIBRARY.nullgpu_comms.restype = ctypes.c_int64
    return int(_LIBRARY.nullgpu_comms(0)), int(_LIBRARY.nullgpu_comms(1))
