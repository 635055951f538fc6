"""The files and folders below a folder that other processes may change while it is walked.

``Path.rglob`` raises ``FileNotFoundError`` if a folder goes away between its listing and its opening (CPython up to 3.12,
``pathlib._RecursiveWildcardSelector``), so two preparations into one place, or a look at a checkpoint that is being pruned, would
end with a traceback of nobody's fault. ``os.walk`` passes over what has gone; unasked it would also pass over a folder that a faulty disk does
not list, and who counts or copies the files would miss some without a word.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def files_below(folder: Path) -> Iterator[Path]:
    """Yields the path of every file in ``folder`` and its folders, in no order; a folder that is missing or may not be read holds none.

    A symbolic link to a file counts as a file; one to a folder is not followed. A file may have gone when its path is used. Raises
    ``OSError`` for a folder that cannot be listed for another reason, as after an error of its disk.
    """
    for parent, _, names in os.walk(folder, onerror=_raise_unless_gone):
        for name in names:
            yield Path(parent, name)


def folders_below(folder: Path) -> Iterator[Path]:
    """Yields the path of ``folder`` and of every folder in it, in no order. Errors are those of ``files_below``."""
    for parent, _, _ in os.walk(folder, onerror=_raise_unless_gone):
        yield Path(parent)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
        raise error
