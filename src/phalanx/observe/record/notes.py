"""Notes in a run directory for as long as something lasts: servers of the run's weights, and nodes whose processors are slowed down.

A server refreshes its note for as long as it serves, so whoever watches the run sees it.
"""

from __future__ import annotations

import heapq
import logging
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import msgspec

from phalanx.observe.record.machines import place_of
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
    """The state of a server. Counts are since its start."""

    model: str
    """Its name for clients."""
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
        """True if the server has written nothing for too long."""
        return now - self.seen_s > SILENT_S


class ServingNote:
    """Writer of a server's note, at intervals until it is closed."""

    def __init__(self, directory: RunDirectory, name: str, look: Callable[[], Serving]) -> None:
        """
        Args:
            directory: Of the run that is served.
            name: Of this server among all that serve the run, such as its machine and port.
            look: Returns the state of the server.
        """
        plain = re.sub(r"[^\w.-]", "_", name)
        self._path = directory.serving / f"{plain}.json"
        self._look = look
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="serving-note", daemon=True)

    def start(self) -> Self:
        """Start to write the note at intervals, on a thread."""
        self._thread.start()
        return self

    def once(self) -> None:
        """Write the note now. Raises ``OSError``."""
        self._path.parent.mkdir(exist_ok=True)
        write_atomically(self._path, msgspec.json.encode(asdict(self._look())), durable=False)

    def close(self) -> None:
        """Stop writing, and delete the note."""
        self._over.set()
        self._thread.join(2 * TOLD_EVERY_S)
        with suppress(OSError):
            self._path.unlink()

    def _tell(self) -> None:
        """Write the note at intervals until closed. Failures are logged, the first in a row as a warning."""
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
    """Return the notes of a run's servers, newest first: at most ``MOST_NOTES``. Unreadable notes are left out."""
    servers = []
    with suppress(OSError):
        # Servers that are killed leave their notes: those of years must hide none that serves now.
        for path in heapq.nlargest(MOST_NOTES, directory.serving.glob("*.json"), key=_written_ns):
            with suppress(OSError, msgspec.MsgspecError, RecursionError, UnicodeError):
                note = msgspec.json.decode(read_small(path, _MOST_BYTES), type=Serving)
                if all(0 <= t < _LATEST_S for t in (note.since_s, note.seen_s)):
                    servers.append(note)
    return sorted(servers, key=lambda note: note.seen_s, reverse=True)


# Nodes whose processors are slowed down while a run trains: each leaves a note in the run directory for as long as it lasts.
#
# One process of a node looks every ten seconds, on a thread of its own, and writes ``machines/NODE.throttled`` when there is something to say; the note is
# removed when there has been nothing for a while. Nothing is exchanged, and no step waits for it. ``phalanx why`` names the node by its note.


LOOK_S = 10.0
OVER_S = 60.0
"""A note is removed after so long without anything new; one that is older than twice this was left by a process that is gone."""
_SUFFIX = ".throttled"


class Throttling(msgspec.Struct, frozen=True):
    """The reasons why a node is slow."""

    node: str
    since_s: float
    """Unix seconds, as ``seen_s``."""
    seen_s: float
    """When it was seen last."""
    looks: int
    """Looks in which it was seen, since then."""
    reasons: tuple[str, ...] = msgspec.field(name="what")


class ThrottlingWatch:
    """Watch of this machine, at intervals until it is closed or the process ends."""

    def __init__(
        self,
        directory: RunDirectory,
        node: str,
        look: Callable[[], list[str]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``look`` returns sentences on what slows this machine down (``phalanx.hardware.local.detect.Throttles.now``)."""
        self._look = look
        self._place, self._node, self._clock = place_of(directory, node).with_suffix(_SUFFIX), node, clock
        self._note: Throttling | None = None
        self._over = threading.Event()

    def start(self) -> Self:
        """Start to look at intervals, on a thread."""
        threading.Thread(target=self._watch, name="throttling", daemon=True).start()
        return self

    def close(self) -> None:
        """Stop looking; the note stays until it is old."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.is_set():
            try:
                self.once()
            except Exception:  # a driver or a disk in trouble: the run is not, and the next look may do
                _LOG.debug("whether this machine is throttled is not known", exc_info=True)
            self._over.wait(LOOK_S)

    def once(self) -> None:
        """Look once: write the note if the machine is slowed down, and delete it once it has not been for a while. Raises ``OSError``."""
        reasons, now = self._look(), self._clock()
        note = self._note
        if reasons:
            since_s, looks = (note.since_s, note.looks) if note else (now, 0)
            if note is None:
                _LOG.warning("this machine is slowed down: %s", "; ".join(reasons))
            self._note = Throttling(self._node, since_s, now, looks + 1, tuple(reasons))
            self._place.parent.mkdir(exist_ok=True)
            write_atomically(self._place, msgspec.json.encode(self._note), durable=False)
        elif note is not None and now - note.seen_s > OVER_S:
            self._note = None
            self._place.unlink(missing_ok=True)


def read_throttling(directory: RunDirectory, now: float) -> list[Throttling]:
    """Return the nodes that are slowed down at ``now`` (Unix seconds); notes that cannot be read, or are old, are left out."""
    nodes = []
    with suppress(OSError):
        for path in sorted(Path(directory.machines).glob(f"*{_SUFFIX}")):
            with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                note = msgspec.json.decode(read_small(path, 1 << 16), type=Throttling)
                times = note.since_s, note.seen_s
                possible = all(0 <= t < _LATEST_S for t in times) and now - note.seen_s <= 2 * OVER_S
                if possible and note.reasons:
                    nodes.append(note)
    return nodes
