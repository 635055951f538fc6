"""The stream that a run is shown on: a full disk or a closed pipe behind it is no reason to end the run."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from typing import TextIO


class DisplayStream(io.TextIOBase):
    """Writes to ``stream`` until that fails; warns on stderr once then, and drops everything from there on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._failed = False

    @property
    def encoding(self) -> str:  # type: ignore[override]  # read by rich, which never sets it
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not self._failed:
            try:
                self._stream.write(text)
            except (OSError, ValueError) as error:  # ValueError: it was closed
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if not self._failed:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        with suppress(OSError, ValueError):  # stderr may be what has failed
            print(f"warning: the display failed: {error}; training goes on", file=sys.stderr, flush=True)
