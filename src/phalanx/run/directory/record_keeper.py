"""The keeper of ``record.json`` while a fleet runs.

A start of a run on a damaged record is refused, since nobody then knows which data the run was trained on. A fleet that runs does know: its
coordinator remembers the last good content, tells of the damage by name, and writes the file anew, before a worker that begins has to ask.
"""

from __future__ import annotations

from phalanx.run.directory.durable import write_atomically
from phalanx.run.directory.paths import DamagedRecordError, RunDirectory


class RecordKeeper:
    """Remembers a run's record, and mends it."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._kept = b""

    def look(self) -> str:
        """Looks at the record, and writes it anew if it is damaged or gone; returns what to tell, or nothing.

        A record that was damaged before this process first saw it stays as it is. Raises ``OSError`` if it cannot be read or written.
        """
        path = self._directory.record
        try:
            found = path.read_bytes()
            if found == self._kept:
                return ""
            self._directory.read_record()
        except FileNotFoundError:
            what = f"{path} was removed"
        except DamagedRecordError as error:
            what = str(error).partition(":")[0]
        else:
            self._kept = found
            return ""
        if not self._kept:
            return ""
        write_atomically(path, self._kept)
        return f"{what}; it has been written anew as it was"
