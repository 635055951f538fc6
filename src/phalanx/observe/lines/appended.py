"""Appends whole lines to a file that others read meanwhile.

A line is one ``write`` on a file opened for appending, with nothing buffered, so what was appended survives a kill of the process. A kill or a full
disk in the middle of it leaves at most one torn line, which the next line closes first, so that it costs nobody else's.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


class AppendedFile:
    """A file opened for appending lines. Not for several threads at once.

    Raises ``OSError`` from every method but ``close``; after it, what was written before is intact and the file may be written on.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self.size_bytes = os.fstat(self._descriptor).st_size
            """The size of the file as far as this writer knows: others may append to it too."""
            self._torn = self._ends_torn()
        except OSError:
            self.close()
            raise

    def append(self, line: bytes) -> int:
        """Writes a line, which ends in a newline, whole or with an error; returns the offset at which it begins.

        The offset is right while all who write to the file append, on a file system that appends in one move; over NFS it may not be.
        """
        whole = b"\n" + line if self._torn and self._ends_torn() else line
        self._torn = True  # unless all of it is written; of what was before an error, the file tells
        written = os.write(self._descriptor, whole)
        self.size_bytes = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        self._torn = written < len(whole)
        if self._torn:
            raise OSError(
                errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({written} of {len(whole)} bytes were written)"
            )
        return self.size_bytes - len(line)

    def _ends_torn(self) -> bool:
        size = os.fstat(self._descriptor).st_size
        return size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def close(self) -> None:
        """Closes the file; a second time does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
