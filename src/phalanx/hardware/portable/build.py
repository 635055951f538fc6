"""Compile the library of portable kernels without importing PyTorch, and check that the processor can run it.

The kernels are C files (``products.c``, ``attention.c``, ``sums.c``, ``functions/``, and ``layer_step.c``, which calls the others), which define what is computed, and
one C++ file (``registered.cpp``) for PyTorch. The library is compiled at its first use, in seconds, once for each release of PyTorch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from pathlib import Path

from phalanx.hardware.kernels.compiler import OPTIONS, NoHostKernelsError, compiled

_SOURCE = Path(__file__).with_name("products.c")
_BESIDE = tuple(
    _SOURCE.parent / name
    for name in (
        "attention.c",
        "layer_step.c",
        "products_fp64.c",
        "sums.c",
        "registered.cpp",
        *(f"functions/{name}.c" for name in ("functions", "functions_avx512", "functions_fp64", "slopes")),
    )
)

_NOTICE = "compiling the portable kernels, once for this user and machine (about ten seconds)"


def library_file() -> Path:
    """Return the path of the library for the installed PyTorch, compiled if it is not cached. A notice is printed
    before the compiler starts.

    Raises ``NoHostKernelsError`` if PyTorch is missing or compilation fails.
    """
    package = importlib.util.find_spec("torch")
    if package is None or package.origin is None:
        raise NoHostKernelsError("PyTorch is not installed")
    torch = Path(package.origin).parent
    # The release is an option, so that each has a library of its own.
    release = f'-DPYTORCH_RELEASE="{importlib.metadata.version("torch")}"'
    options = (*OPTIONS, f"-I{torch / 'include'}", release)
    linked = (f"-L{torch / 'lib'}", "-l:libtorch_cpu.so", "-lstdc++")
    return compiled(_SOURCE, options, beside=_BESIDE, linked=linked, notice=_NOTICE)


# Processors that support portable numerics.


def unfit_processor() -> str:
    """Return why this processor has no portable numerics, as a clause; empty if it has: 64-bit Arm, or x86-64 with AVX2 and FMA."""
    machine = platform.machine()
    if machine in ("aarch64", "arm64"):
        return ""
    if machine != "x86_64":
        return f"this one is {machine}"
    return "" if {"avx2", "fma"} <= _processor_flags() else f"this one is {machine} without them"


def _processor_flags() -> set[str]:
    """Return the processor's features by Linux's names; empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())
