"""Detects the GPUs of this machine without importing torch."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

from phalanx.hardware.catalog import this_machine
from phalanx.hardware.local.device_peak import system_named

_DRIVER = Path("/proc/driver/nvidia/gpus")


def system_here(driver: Path = _DRIVER) -> str | None:
    """The name of what plans take this machine for: ``this`` if it was calibrated, a system with its GPUs, or ``cpu``; ``None`` if unknown."""
    if this_machine().is_file():
        return "this"
    if not gpu_count(driver):
        return "cpu"
    told = (found.read_text() for found in sorted(driver.glob("*/information")))
    models = [model[1] for text in told if (model := re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE))]
    return system_named(models[0]) if models else None


def gpu_count(driver: Path = _DRIVER) -> int:
    """GPUs that PyTorch can use here: those of the driver that ``CUDA_VISIBLE_DEVICES`` leaves visible.

    None if the installed PyTorch is a CPU build.
    """
    if metadata.version("torch").endswith("+cpu") or not driver.is_dir():
        return 0
    present = len(list(driver.iterdir()))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
