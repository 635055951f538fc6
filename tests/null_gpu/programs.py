"""Run a Python program of this folder in a process of its own, on the null GPU."""

from __future__ import annotations

import subprocess
import sys


def printed(program: str, *arguments: str) -> list[str]:
    """Return the lines that the module ``program`` prints. Raises with its errors if it fails."""
    command = [sys.executable, "-m", f"null_gpu.{program}", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.splitlines()
