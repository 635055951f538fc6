"""Follows the logs of a run while it goes on: what its processes have said since the last look, merged in time.

A file is known by its inode, so one that is set aside under another name is read on where it was.
"""

from __future__ import annotations

import os
from contextlib import suppress

from phalanx.observe.logs.line import LogLine, decode_lines
from phalanx.run.directory.paths import RunDirectory
from phalanx.watch.logs.blocks import joined
from phalanx.watch.logs.files import streams
from phalanx.watch.logs.read import LogQuery

_MOST = 4 << 20
"""Bytes of a file that a look takes in; what is left comes with the next one."""


class Follower:
    """What is new in the logs of a run at each look."""

    def __init__(self, directory: RunDirectory, query: LogQuery) -> None:
        """What is there now is not new."""
        self._directory, self._query = directory, query
        self._read: dict[tuple[int, int], int] = {}
        for path in self._paths():
            with suppress(OSError), open(path, "rb") as file:
                found = os.fstat(file.fileno())
                self._read[found.st_dev, found.st_ino] = found.st_size

    def _paths(self) -> list[str]:
        found = streams(self._directory, self._query.attempt)
        return [str(path) for stream in found if not stream.raw for path in stream.files]

    def look(self) -> list[LogLine]:
        """The selected lines that have come since the last look."""
        found: list[LogLine] = []
        for path in self._paths():
            with suppress(OSError), open(path, "rb") as file:
                there = os.fstat(file.fileno())
                key = (there.st_dev, there.st_ino)
                begin = self._read.get(key, 0)
                if there.st_size < begin:
                    begin = 0  # another file: a new one takes the inode of the oldest, which was removed just before
                if there.st_size == begin:
                    continue
                file.seek(begin)
                piece = file.read(_MOST)
                whole, newline, _ = piece.rpartition(b"\n")
                if newline:
                    self._read[key] = begin + len(whole) + 1
                    found += joined(decode_lines(whole))
                elif len(piece) == _MOST:
                    self._read[key] = begin + len(piece)  # no log of ours
        return sorted((line for line in found if self._query.selects(line)), key=lambda line: line.t)
