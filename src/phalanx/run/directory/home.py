"""The user's home: the place of caches and settings, if no variable names another."""

from __future__ import annotations

import os
import stat
import tempfile
from functools import cache
from pathlib import Path


def home() -> Path:
    """The user's home folder; a temporary folder of this user alone if there is none, as of a user without a name in a container."""
    try:
        return Path.home()
    except RuntimeError:
        return temporary_home()


@cache
def temporary_home() -> Path:
    """Return a folder for temporary files that is this user's alone."""
    folder = Path(tempfile.gettempdir()) / f"phalanx-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="phalanx-"))
    # In a folder that others may write to, another user may have made it first; libraries are loaded from it.
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
        return Path(tempfile.mkdtemp(prefix="phalanx-"))
    return folder
