"""The word of a coordinator that checkpoints are not to be trusted, for whoever copies them: a file, since the copies are made by others.

An audit that finds a corruption condemns the steps after the last one that is known to be good. The coordinator sets them aside on disk; in the
object store the agents do, which cannot be reached at any moment. Until they have, the file stays, and nothing is copied.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from phalanx.run.directory.files import read_small, write_atomically
from phalanx.run.directory.paths import RunDirectory


def _file(directory: RunDirectory) -> Path:
    return directory.fleet / "distrusted-after"


def record_distrust(directory: RunDirectory, step: int) -> None:
    """Says that what was saved after ``step`` is not to be trusted. Raises ``OSError``."""
    earlier = distrusted_after(directory)
    if earlier is None or step < earlier:
        write_atomically(_file(directory), f"{step}\n".encode())


def distrusted_after(directory: RunDirectory) -> int | None:
    """The step after which copies are not to be trusted and have not been set aside; ``None`` if all are trusted. Raises ``OSError``."""
    try:
        return int(read_small(_file(directory)))
    except (FileNotFoundError, ValueError):
        return None


def forget_distrust(directory: RunDirectory, step: int) -> None:
    """Says that the copies after ``step`` have been set aside. Raises ``OSError``."""
    if distrusted_after(directory) == step:
        with suppress(FileNotFoundError):
            _file(directory).unlink()
