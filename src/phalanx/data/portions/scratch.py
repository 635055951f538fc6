"""A temporary folder of a task, whose full disk is an error that names it."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.data.errors import PreparationError


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A folder that is removed at the end. Raises ``PreparationError`` if there is no room for it, or for what is written to it."""
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise PreparationError(
            f"no room in {tempfile.gettempdir()} ({error.strerror}): make room there, or set TMPDIR to a folder on another disk"
        ) from error
