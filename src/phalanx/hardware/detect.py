"""Detects the GPUs of this machine without importing torch."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path


def gpu_count(driver: Path = Path("/proc/driver/nvidia/gpus")) -> int:
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
