"""A small file system that a test can fill up: a real one, in memory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(mount: Path, size: str) -> Iterator[Path]:
    """A new file system of ``size`` (``4m``) at ``mount``; the test is skipped where that may not be made."""
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", mount], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"cannot mount a small file system: {made.stderr.decode().strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def fill(folder: Path) -> Path:
    """The file that has taken all that was left of the disk."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for piece in (1 << 16, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * piece)
    return filler
