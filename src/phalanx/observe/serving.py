"""Servers of a run's weights: each leaves a note in the run directory for as long as it serves, by which whoever watches the run sees it.

``RUN/serving/NAME.json`` is written anew every few seconds, on a thread of its own, and removed when the server ends in good order. One that was killed, or
stands still, leaves an old note behind, which says so. Nobody asks a server anything: a run directory may be somebody else's, and what it names is no address
to send requests to.
"""

from __future__ import annotations

import heapq
import logging
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import msgspec

from phalanx.run.directory.files import read_small, write_atomically
from phalanx.run.directory.paths import RunDirectory

TOLD_EVERY_S = 5.0
SILENT_S = 30.0
"""A server whose note is older is silent: it was killed, or stands still."""
MOST_NOTES = 64
_MOST_BYTES = 1 << 16
_LATEST_S = 1e10
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Serving:
    """What a server says of itself. Counts are since its start."""

    model: str
    """What clients call it."""
    url: str
    node: str
    since_s: float
    """Unix seconds, as ``seen_s``."""
    seen_s: float
    """When this was written."""
    state: str
    """ "serving", "draining" (it takes nothing new), or what is wrong."""
    numerics_id: str
    step: int | None
    """The step whose weights compute, where newer ones take over."""
    running: int
    """Texts that are computed; ``waiting`` are those that are not yet."""
    waiting: int
    pages_share: float
    """The share of the memory for keys and values that is in use."""
    finished: int
    """Texts that have ended; ``refused`` are requests that were answered with an error."""
    refused: int
    prompt_tokens: int
    generated_tokens: int
    first_token_s: float | None = None
    """Mean time from a request to its first token, and between two tokens of a text; ``None`` if there was none."""
    next_token_s: float | None = None

    def silent(self, now: float) -> bool:
        """True if nothing was heard of the server for too long."""
        return now - self.seen_s > SILENT_S


class ServingNote:
    """Writes a server's note again and again, until it is closed."""

    def __init__(self, directory: RunDirectory, name: str, look: Callable[[], Serving]) -> None:
        """
        Args:
            directory: Of the run that is served.
            name: Of this server among all that serve the run, such as its machine and port.
            look: Says what the server does now.
        """
        plain = re.sub(r"[^\w.-]", "_", name)
        self._path = directory.serving / f"{plain}.json"
        self._look = look
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="serving-note", daemon=True)

    def start(self) -> Self:
        """Writes on a thread from now on."""
        self._thread.start()
        return self

    def once(self) -> None:
        """Writes the note. Raises ``OSError``."""
        self._path.parent.mkdir(exist_ok=True)
        write_atomically(self._path, msgspec.json.encode(asdict(self._look())), durable=False)

    def close(self) -> None:
        """Writes no more, and takes the note away."""
        self._over.set()
        self._thread.join(2 * TOLD_EVERY_S)
        with suppress(OSError):
            self._path.unlink()

    def _tell(self) -> None:
        failed = False
        while not self._over.is_set():
            try:
                self.once()
                failed = False
            except OSError as error:  # texts are served all the same, and the next time may do
                if not failed:
                    _LOG.warning(
                        "what this server does cannot be noted in %s, and is tried again: %s",
                        self._path,
                        error.strerror or error,
                    )
                failed = True
            except Exception:
                _LOG.debug("what this server does is not known at present", exc_info=True)
            self._over.wait(TOLD_EVERY_S)


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # taken away meanwhile
        return 0


def read_serving(directory: RunDirectory) -> list[Serving]:
    """What the servers of a run have said last, the newest first, and of many the newest; notes that cannot be read are left out."""
    found = []
    with suppress(OSError):
        # Servers that are killed leave their notes: those of years must hide none that serves now.
        for path in heapq.nlargest(MOST_NOTES, directory.serving.glob("*.json"), key=_written_ns):
            with suppress(OSError, msgspec.MsgspecError, RecursionError, UnicodeError):
                note = msgspec.json.decode(read_small(path, _MOST_BYTES), type=Serving)
                if all(0 <= t < _LATEST_S for t in (note.since_s, note.seen_s)):
                    found.append(note)
    return sorted(found, key=lambda note: note.seen_s, reverse=True)
