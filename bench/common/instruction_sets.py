"""Limits on the instructions that PyTorch's libraries and this project's kernels use, as variables of the environment."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

LIMITS: dict[str, dict[str, str]] = {
    "default": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "DNNL_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "PHALANX_KERNELS": "plain",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "DNNL_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "PHALANX_KERNELS": "avx2",
    },
    "all": {},
}
"""By name, the variables that limit which instructions are used; ``all`` has no limit."""


def instruction_sets() -> list[str]:
    """Return the limits that this machine can be put under, the lowest first."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        flags = ""
    names = ["default"]
    if re.search(r"^flags.*\bavx2\b", flags, re.MULTILINE):
        names.append("avx2")
    if "avx2" not in names or re.search(r"^flags.*\bavx512f\b", flags, re.MULTILINE):
        names.append("all")
    return names


def emulated_haswell() -> tuple[str, ...]:
    """Return the command that runs a program for x86-64 on an emulated Haswell, which has AVX2 and no AVX-512; empty without the emulator.

    Features of a Haswell that qemu does not have, none of them arithmetic, are left out.
    """
    emulator = shutil.which("qemu-x86_64-static")
    return (emulator, "-cpu", "Haswell-noTSX,-pcid,-x2apic,-tsc-deadline,-invpcid") if emulator else ()
