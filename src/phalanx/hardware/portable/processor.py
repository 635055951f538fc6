"""Checks without PyTorch whether a processor can have portable numerics."""

from __future__ import annotations

import platform
from pathlib import Path


def unfit_processor() -> str:
    """Why this processor has no portable numerics, as a clause; empty if it has."""
    machine = platform.machine()
    if machine in ("aarch64", "arm64"):
        return ""
    if machine != "x86_64":
        return f"this one is {machine}"
    return "" if {"avx2", "fma"} <= _processor_flags() else f"this one is {machine} without them"


def _processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())
