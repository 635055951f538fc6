"""Descriptors of the tests' own process by what they lead to.

Their numbers say nothing: other threads of the process, some of them left by earlier tests, open and close descriptors, too.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def descriptors_of(path: Path) -> set[int]:
    """Return the descriptors of this process that lead to the file ``path``."""
    numbers = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{number}") == str(path):
                numbers.add(int(number))
    return numbers


def open_pipes_and_files_below(folder: Path) -> set[str]:
    """Return the pipes that are open in this process, and the open files below ``folder``."""
    links = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            links.add(os.readlink(f"/proc/self/fd/{number}"))
    return {link for link in links if link.startswith(("pipe:", str(folder)))}
