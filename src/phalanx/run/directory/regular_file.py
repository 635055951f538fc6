"""Reading of files in a run directory or dataset that somebody else may have put there.

Under any name may lie a pipe, whose reader would wait for a writer that never comes, a device, or a file of any size. A reader that looks at
many runs must come to an end at each of them: what is no regular file is refused before it is read, and what is meant to be small is not
read into memory when it is not. A link may lead to any file of whoever reads, whose content then would be shown, exported or copied: it is not
followed.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_SMALL_BYTES = 64 << 20
"""Larger than any record, status or run file, that of a fleet of 100,000 ranks included."""


_NOT_FOLLOWED = "it is a link, which is not followed: put the file itself there"


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open a file for reading, without waiting. Raises ``OSError`` if it cannot be read, or is a folder, a pipe or a device.

    A link is refused too, unless ``follow``: for files that a user names, and datasets whose user has linked their files.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(error.errno, _NOT_FOLLOWED, str(path)) from error
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no file", str(path))


def read_small(path: Path, most_bytes: int = MOST_SMALL_BYTES, *, follow: bool = False) -> bytes:
    """The content of a file. Raises ``OSError`` as ``open_regular`` does, and if the file has more than ``most_bytes``."""
    with open_regular(path, follow=follow) as file:
        if os.fstat(file.fileno()).st_size <= most_bytes:
            content = file.read(most_bytes + 1)
            if len(content) <= most_bytes:
                return content
    raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))


def file_of_download(folder: Path, name: str) -> Path:
    """Return the file that ``name`` leads to in a downloaded ``folder``: one in it, or in the blobs of the download cache that it is in.

    Raises ``OSError`` for a link to any other file.
    """
    # Unlike Path.resolve, realpath raises nothing for links in a circle, which reading then names.
    folder, file = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / name))
    # Hugging Face's cache: models--NAME/snapshots/COMMIT/config.json is a link to models--NAME/blobs/DIGEST.
    blobs = folder.parent.parent / "blobs"
    if file.is_relative_to(folder) or (folder.parent.name == "snapshots" and file.is_relative_to(blobs)):
        return file
    raise OSError(errno.ELOOP, f"it leads out of its folder: {_NOT_FOLLOWED}", str(folder / name))


def leads_out(folder: Path, inside: Path) -> bool:
    """Return True if ``folder``, which is named as a folder of ``inside``, is a link to somewhere else."""
    return not folder.resolve().is_relative_to(inside.resolve())
